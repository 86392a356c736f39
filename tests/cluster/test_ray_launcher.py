"""Groups of ranks as Ray actors: the same life as child processes, with Ray to place, start and name them. The
supervisor is the real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import echo_worker
from fakes.supervised import begun, is_gone, stopped

from configs.schema import ClusterSettings, ModelSettings, ParallelSettings, ServeSettings
from parallel.mesh import Mesh
from runtime.cluster.ray_launcher import RayLauncher
from runtime.cluster.supervisor import GroupSupervisor
from workers.channel import LOOPBACK
from workers.plan import RanksDisagree, StepPlan, StepTimeout, WorkerLost

TESTS = Path(__file__).parents[1]

PAIR, APART = Mesh(tp=2), Mesh(dp=2)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(autouse=True)
def _fakes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def supervisor_of(state_dir: Path, load: str = "well", mesh: Mesh = PAIR, **cluster: object) -> GroupSupervisor:
    settings = ServeSettings(
        model=ModelSettings.model_validate({"path": load, "numerics": "reference", "device": "cpu"}),
        parallel=ParallelSettings(dp=mesh.dp, tp=mesh.tp, ep=mesh.ep),
        cluster=ClusterSettings.model_validate(cluster),
        state_dir=state_dir,
    )
    return GroupSupervisor(settings, RayLauncher(settings.cluster, state_dir, factory=echo_worker.FACTORY))


def plan(step_id: int, epoch: int, uid: int, rank: int) -> StepPlan:
    return echo_worker.plan(step_id, epoch, echo_worker.at_rank(uid, rank))


def placement_groups() -> list[dict[str, Any]]:
    """Those that are there, in the words of Ray's table."""
    from ray.util.placement_group import placement_group_table

    return [table for table in placement_group_table().values() if table["state"] != "REMOVED"]


def test_actors_serve_and_are_replaced_as_one_when_any_dies_or_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(tmp_path, step_timeout_s=1, worker_threads=2)) as (supervisor, first):
            assert first.epoch == 1
            assert all(launched.address.startswith(LOOPBACK) for launched in supervisor.launched)
            pids = [launched.pid for launched in supervisor.launched]
            assert pids == [echo_worker.pid_of(description) for description in first.ranks]
            result = await first.link.execute(echo_worker.plan(1, 1))
            threads = 2
            assert result.batches[0].emitted == ((2, 1, 1, threads), (5, 9, 1, threads))
            assert dict(first.description.accounting)["MKL_CBWR"] == "COMPATIBLE"

            os.kill(pids[1], signal.SIGKILL)
            assert "rank 1 (dp 0, tp 1): Ray actor rank-1-epoch-1" in await asyncio.wait_for(first.lost, 2)
            with pytest.raises(WorkerLost):
                await first.link.execute(echo_worker.plan(2, 1))

            second = await supervisor.restart("killed")
            assert all(map(is_gone, pids))
            pids = [launched.pid for launched in supervisor.launched]
            with pytest.raises(StepTimeout, match="rank 0"):
                await asyncio.wait_for(second.link.execute(plan(1, 2, echo_worker.UID_STOPS, 0)), 5)
            third = await supervisor.restart("hung")
            assert all(map(is_gone, pids))
            with pytest.raises(RanksDisagree):
                await third.link.execute(plan(1, 3, echo_worker.UID_COMMITS_OTHERWISE, 1))
            pids = [launched.pid for launched in supervisor.launched]
        assert all(map(is_gone, pids))

    asyncio.run(run())


def test_an_actor_that_dies_while_loading_leaves_its_last_words(tmp_path: Path) -> None:
    async def run() -> None:
        async with stopped(supervisor_of(tmp_path, "death@1")) as supervisor:
            with pytest.raises(WorkerLost) as caught:
                await supervisor.start(lambda *_: None)
            text = str(caught.value)
            # Its last word on the stage may die with it.
            assert re.match(r"rank 1 \(dp 0, tp 1\) failed at stage '\w+': Ray actor rank-1-epoch-1, process ", text)
            assert f"last words of the worker\n({tmp_path}/logs/worker-" in text
            assert "-rank1-epoch1.log)" in text

    asyncio.run(run())


def test_a_port_that_an_actor_cannot_have_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with stopped(supervisor_of(tmp_path, worker_port_min=23_480, worker_port_max=23_481)) as supervisor:
            with pytest.raises(
                WorkerLost, match=r"rank \d .* 'launch': .* OSError: cannot listen on .*; .*widen cluster"
            ):
                await supervisor.start(lambda *_: None)

    asyncio.run(run())


def test_two_deployments_share_a_cluster_and_leave_nothing_there(tmp_path: Path) -> None:
    from ray.util import list_named_actors

    async def run() -> None:
        async with begun(supervisor_of(tmp_path)) as (_, one), begun(supervisor_of(tmp_path, mesh=APART)) as (_, two):
            for group in (one, two):
                await group.link.execute(echo_worker.plan(1, 1, dp=group.mesh.dp))
            actors = list_named_actors(all_namespaces=True)
            assert sorted(actor["name"] for actor in actors) == ["rank-0-epoch-1"] * 2 + ["rank-1-epoch-1"] * 2
            assert len({actor["namespace"] for actor in actors}) == 2
            assert all(actor["namespace"].startswith("outrider-") for actor in actors)
            groups = placement_groups()
            names = sorted(group["name"].rpartition("-")[2] for group in groups)
            assert names == ["dp0", "dp0", "dp1"]
            assert {group["strategy"] for group in groups} == {"STRICT_PACK"}
            bundles = [bundle for group in groups for bundle in group["bundles"].values()]
            assert bundles == [{"CPU": 1.0}] * 4

    asyncio.run(run())
    assert placement_groups() == []
    assert list_named_actors(all_namespaces=True) == []


def test_placement_is_kept_over_lives_and_renewed_when_it_is_lost(tmp_path: Path) -> None:
    from ray.util.placement_group import get_placement_group, remove_placement_group

    async def run() -> None:
        async with begun(supervisor_of(tmp_path)) as (supervisor, _):
            (first,) = placement_groups()
            await supervisor.restart("a test")
            (second,) = placement_groups()
            assert second["placement_group_id"] == first["placement_group_id"]
            remove_placement_group(get_placement_group(first["name"]))  # what the loss of its node comes to
            group = await supervisor.restart("its place is gone")
            await group.link.execute(echo_worker.plan(1, group.epoch))
            (third,) = placement_groups()
            assert third["placement_group_id"] != first["placement_group_id"]

    asyncio.run(run())


def test_ranks_without_a_place_say_what_was_asked_and_what_there_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with stopped(supervisor_of(tmp_path, worker_threads=3, start_timeout_s=8)) as supervisor:
            with pytest.raises(
                WorkerLost,
                match=r"at stage .launch.: Ray found no place for the ranks in 4 s\. Demand: 2 × \{CPU: 3\}, those of "
                r"each data-parallel rank \(2\) on one node\. Usage: node 127\.0\.0\.1: 0/4 CPU used\. ",
            ):
                await asyncio.wait_for(supervisor.start(lambda *_: None), 9)
            assert placement_groups() == []

    asyncio.run(run())


def test_a_start_that_is_cancelled_leaves_no_actor(tmp_path: Path) -> None:
    from ray.util import list_named_actors

    async def run() -> None:
        async with stopped(supervisor_of(tmp_path, "hang@1")) as supervisor:
            hanging = asyncio.Event()
            start = asyncio.create_task(
                supervisor.start(lambda rank, stage, *_: hanging.set() if (rank, stage) == (1, "weights") else None)
            )
            await hanging.wait()
            pids = [launched.pid for launched in supervisor.launched]
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
            assert all(map(is_gone, pids))

    asyncio.run(run())
    assert list_named_actors(all_namespaces=True) == []


def test_the_local_ray_runs_no_api_server_which_would_ask_clouds_about_this_machine() -> None:
    import ray

    session = Path(ray.get_runtime_context().worker.node.get_session_dir_path()).name
    commands = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            commands.append((entry / "cmdline").read_bytes().decode(errors="replace"))
    ours = [command for command in commands if session in command]
    assert any("gcs_server" in command for command in ours)
    assert [command for command in ours if "dashboard/dashboard.py" in command] == []
