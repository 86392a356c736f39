"""Every collective is its plain-torch counterpart on any number of ranks; a peer that leaves is an error, no hang."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.threads import Ranks
from torch import Tensor

from parallel import rendezvous
from parallel.collectives import CollectiveError, Group, Tally, exchange_counts, solo
from parallel.mesh import Mesh
from parallel.rendezvous import RankGroups, join_groups, open_store, wait_for_all

SHAPES = [(), (3,), (2, 5), (0, 4), (3, 0), (4, 1, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]
TIMEOUT_S = 1.0
SLACK_S = 5.0
"""For a machine that is busy with other things."""


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(Mesh(tp=request.param))
    yield made
    made.close()


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[int, Ranks]]:
    made = {size: Ranks(Mesh(tp=size)) for size in (1, 2, 3, 4)}
    yield made
    for some in made.values():
        some.close()


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """What a rank holds; small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 20, shape, generator=generator).to(dtype)


def count_of(groups: RankGroups) -> int:
    return sum(tally.count for tally in groups.log.tallies.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_collective_equals_plain_torch(ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = ranks.mesh.size
    every = torch.stack([values(shape, dtype, rank) for rank in range(size)])

    def work(groups: RankGroups) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int]:
        group, mine = groups.tp, values(shape, dtype, groups.rank)
        reduced, told = mine.clone(), mine.clone()
        groups.log.clear()
        assert group.all_reduce(reduced) is reduced
        assert group.broadcast(told) is told
        result = reduced, group.all_gather(mine), group.gather(mine), told, count_of(groups)
        assert torch.equal(mine, values(shape, dtype, groups.rank))
        return result

    for rank, (reduced, gathered, on_leader, told, count) in enumerate(ranks(work)):
        assert torch.equal(reduced, every.sum(0).to(dtype))
        assert torch.equal(gathered, every)
        assert gathered.shape == (size, *shape)
        if rank == 0:
            assert on_leader is not None
            assert torch.equal(on_leader, every)
        else:
            assert on_leader is None
        assert torch.equal(told, every[0])
        assert count == (4 if size > 1 and every.numel() else 0)


def test_a_sum_has_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    def work(groups: RankGroups) -> Tensor:
        return groups.tp.all_reduce(torch.randn(1000, generator=torch.Generator().manual_seed(groups.rank)) * 1e3)

    first, *others = ranks(work)
    assert all(torch.equal(first, other) for other in others)


@given(size=st.integers(1, 4), data=st.data())
@settings(max_examples=40)
def test_rows_go_where_the_counts_say_in_rank_order(rings: dict[int, Ranks], size: int, data: st.DataObject) -> None:
    counts = [data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=size, max_size=size)) for _ in range(size)]
    tail = data.draw(st.sampled_from([(), (1,), (5,), (2, 3)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.uint8, torch.int64]))

    def work(groups: RankGroups) -> Tensor:
        sends = counts[groups.rank]
        expected = [row[groups.rank] for row in counts]
        assert exchange_counts(groups.tp, torch.tensor(sends)) == expected
        return groups.tp.all_to_all(values((sum(sends), *tail), dtype, groups.rank), sends, expected)

    for rank, came in enumerate(rings[size](work)):
        parts = []
        for sender, sends in enumerate(counts):
            rows = values((sum(sends), *tail), dtype, sender)
            parts.append(torch.split(rows, sends)[rank])
        assert torch.equal(came, torch.cat(parts))


def test_ranks_know_which_collectives_they_joined_and_in_what_order(ranks: Ranks) -> None:
    x = torch.ones(2)
    ones = [1] * ranks.mesh.size

    def joined(*kinds: str) -> Callable[[RankGroups], tuple[int, int, float]]:
        def work(groups: RankGroups) -> tuple[int, int, float]:
            groups.log.clear()
            assert groups.log.waited_s == 0
            for kind in kinds:
                if kind == "all_to_all":
                    groups.tp.all_to_all(torch.ones(groups.tp.size), ones, ones)
                else:
                    getattr(groups.tp, kind)(x.clone())
            tally = groups.log.tallies.get("tp.0", Tally())
            return tally.count, tally.digest, groups.log.waited_s

        return work

    every = ("all_reduce", "all_gather", "gather", "broadcast", "all_to_all")
    results = ranks(joined(*every))
    if ranks.mesh.size == 1:
        assert results == [(0, 0, 0.0)]
        return
    assert {(count, digest) for count, digest, _ in results} == {(5, results[0][1])}
    assert all(waited_s > 0 for _, _, waited_s in results)
    swapped, fewer = ("all_gather", "all_reduce", *every[2:]), every[:4]
    seen = [ranks(joined(*kinds))[0][:2] for kinds in (every, swapped, fewer)]
    assert seen[0] == results[0][:2]
    assert [count for count, _ in seen] == [5, 5, 4]
    assert len({digest for _, digest in seen}) == 3
    assert ranks(joined())[0] == (0, 0, 0.0)


def test_a_group_has_a_tally_where_it_has_peers() -> None:
    with_world, without = Ranks(Mesh(dp=2, tp=2, ep=4)), Ranks(Mesh(dp=2, tp=2))
    assert [sorted(g.log.tallies) for g in with_world.groups] == [["tp.0", "world"]] * 2 + [["tp.1", "world"]] * 2
    assert [sorted(g.log.tallies) for g in without.groups] == [["tp.0"]] * 2 + [["tp.1"]] * 2
    assert [g.world.size for g in without.groups] == [1] * 4
    assert [g.world.rank for g in with_world.groups] == [0, 1, 2, 3]
    assert [g.tp.rank for g in with_world.groups] == [0, 1, 0, 1]
    for some in (with_world, without):
        some.close()


CALLS: dict[str, tuple[int, Callable[[Group], object]]] = {
    "all_reduce": (0, lambda group: group.all_reduce(torch.ones(4))),
    "all_gather": (0, lambda group: group.all_gather(torch.ones(4))),
    "gather": (0, lambda group: group.gather(torch.ones(4))),
    "broadcast": (1, lambda group: group.broadcast(torch.ones(4))),
    "all_to_all": (0, lambda group: group.all_to_all(torch.ones(4), [2, 2], [2, 2])),
}
"""By name: the rank that is left waiting, and what it waits in."""


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("leaves", [True, False], ids=["peer leaves", "peer is silent"])
def test_without_its_peer_a_collective_raises_within_the_timeout(kind: str, leaves: bool) -> None:
    waiting, call = CALLS[kind]
    ranks = Ranks(Mesh(tp=2), timeout_s=TIMEOUT_S)
    ranks(lambda groups: groups.tp.all_reduce(torch.ones(1)))
    groups = ranks.groups[waiting]
    silent = ranks.groups[1 - waiting]
    ranks.groups = []
    if leaves:
        del silent
    began = time.perf_counter()
    with pytest.raises(CollectiveError, match=f"^{kind} number 2 of group tp.0: .+"):
        call(groups.tp)
    assert time.perf_counter() - began < TIMEOUT_S + SLACK_S
    ranks.close()


def test_ranks_that_join_different_collectives_raise_rather_than_hang() -> None:
    ranks = Ranks(Mesh(tp=2), timeout_s=TIMEOUT_S)

    def work(groups: RankGroups) -> None:
        if groups.rank == 0:
            groups.tp.all_reduce(torch.ones(4))
        groups.tp.all_to_all(torch.ones(4), [2, 2], [2, 2])

    began = time.perf_counter()
    with pytest.raises(CollectiveError):
        ranks(work)
    assert time.perf_counter() - began < 2 * TIMEOUT_S + SLACK_S
    # Whoever comes after them is not affected.
    assert [int(x) for x in ranks(lambda groups: groups.tp.all_reduce(torch.ones(1)))] == [2, 2]
    ranks.close()


def test_two_sets_of_groups_in_one_process_do_not_mix() -> None:
    sets = [Ranks(Mesh(dp=2, tp=2, ep=4)) for _ in range(2)]

    def work(tag: int) -> Callable[[RankGroups], list[tuple[Tensor, Tensor]]]:
        def joined(groups: RankGroups) -> list[tuple[Tensor, Tensor]]:
            mine = torch.tensor([100 * tag + groups.rank])
            return [(groups.tp.all_gather(mine + 10 * i), groups.world.all_gather(mine + 10 * i)) for i in range(3)]

        return joined

    with ThreadPoolExecutor(2) as pool:
        results = [f.result() for f in [pool.submit(ranks, work(tag)) for tag, ranks in enumerate(sets)]]
    for tag, by_rank in enumerate(results):
        for rank, seen in enumerate(by_rank):
            first = rank // 2 * 2
            for i, (tp, world) in enumerate(seen):
                assert tp.flatten().tolist() == [100 * tag + 10 * i + peer for peer in (first, first + 1)]
                assert world.flatten().tolist() == [100 * tag + 10 * i + peer for peer in range(4)]
    for ranks in sets:
        ranks.close()


def test_a_rank_alone_needs_no_group() -> None:
    group = solo()
    x = torch.arange(3)
    assert group.leads
    assert group.all_reduce(x) is group.broadcast(x) is group.all_to_all(x, [3], [3]) is x
    assert torch.equal(group.all_gather(x), x[None])
    assert exchange_counts(group, torch.tensor([3])) == [3]


def test_ranks_meet_at_a_store_that_the_first_one_keeps() -> None:
    mesh = Mesh(tp=2, ep=2)
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listen_fd = listener.detach()

    def meet(rank: int) -> Tensor:
        store = open_store(address, listen_fd=listen_fd if rank == 0 else None)
        wait_for_all(store, mesh, rank)
        groups = join_groups(mesh, rank, store, carrier="gloo", bind_host="127.0.0.1", timeout_s=20.0)
        gathered = groups.tp.all_gather(torch.tensor([rank])) + groups.world.all_gather(torch.tensor([rank]))
        wait_for_all(store, mesh, rank)
        return gathered

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(meet, rank) for rank in (1, 0)]]
    assert [x.flatten().tolist() for x in results] == [[0, 2], [0, 2]]


def test_a_store_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CollectiveError, match=f"the store of the group at 127.0.0.1:{port} is not reached"):
        open_store(f"127.0.0.1:{port}", listen_fd=None)


def test_a_rank_that_never_comes_ends_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT_S", 0.3)
    store = rendezvous.c10d.HashStore()
    with pytest.raises(CollectiveError, match="rank 1 waited in vain for the others"):
        wait_for_all(store, Mesh(tp=2), 1)


def test_a_rank_that_comes_but_does_not_join_ends_the_meeting() -> None:
    store = rendezvous.c10d.HashStore()
    began = time.perf_counter()
    with pytest.raises(CollectiveError, match=r"group tp\.0 of ranks \[0, 1\] did not come together"):
        join_groups(Mesh(tp=2), 0, store, carrier="gloo", bind_host="127.0.0.1", timeout_s=0.5)
    assert time.perf_counter() - began < 0.5 + SLACK_S
