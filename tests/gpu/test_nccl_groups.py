"""Collectives and a step over NCCL, a rank per GPU. Needs two GPUs or more; deploy/gpu_check.sh runs it."""

from __future__ import annotations

import pytest
import torch
from oracles.group import GroupOfWorkers, on_ranks
from oracles.group_driver import GroupDriver

from parallel.collectives import Group, exchange_counts
from parallel.mesh import Mesh
from parallel.rendezvous import Carrier, RankGroups

PAIR = Mesh(tp=2, ep=2)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank per GPU")


def check_every_collective(carrier: Carrier, devices: list[str]) -> None:
    def work(rank: int, groups: RankGroups) -> None:
        for group in (groups.tp, groups.world):
            check_group(group, torch.device(devices[rank]))

    on_ranks(PAIR, work, carrier=carrier)


def check_group(group: Group, device: torch.device) -> None:
    x = torch.arange(6.0, device=device) + 10 * group.rank
    assert group.all_reduce(x.clone()).tolist() == [10.0 + 2 * i for i in range(6)]
    assert group.all_gather(x)[1].tolist() == [10.0 + i for i in range(6)]
    gathered = group.gather(x)
    assert (gathered is None) == (group.rank == 1)
    assert group.broadcast(x.clone()).tolist() == list(range(6))
    counts = [group.rank, 2]
    assert exchange_counts(group, torch.tensor(counts, device=device)) == ([0, 1] if group.rank == 0 else [2, 2])


@pytest.mark.gpu
@TWO_GPUS
def test_every_collective_over_nccl() -> None:
    check_every_collective("nccl", ["cuda:0", "cuda:1"])


def test_every_collective_over_gloo() -> None:
    check_every_collective("gloo", ["cpu", "cpu"])


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("mesh", [Mesh(tp=2), PAIR, Mesh(dp=2, ep=2)], ids=str)
def test_streams_are_those_of_one_cpu_rank(mesh: Mesh) -> None:
    found = []
    for each, device in ((Mesh(), "cpu"), (mesh, "cuda")):
        group = GroupOfWorkers.load(each, device=device)
        driver = GroupDriver(group, poison=False)
        for i in range(4):
            driver.drivers[i % each.dp].add(range(5 + i, 30 + 7 * i), 24)
        driver.run(2)
        found.append(sorted((live.prompt, live.out) for live in driver.live))
        group.close()
    assert found[0] == found[1]
