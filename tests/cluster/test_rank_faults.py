"""Groups of ranks as child processes: started, watched, ended and replaced as a whole, whatever one of them does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import echo_worker
from fakes.supervised import Proxied, begun, is_gone, ranks

from configs.schema import ClusterSettings, ModelSettings, ParallelSettings, ServeSettings
from parallel.mesh import Mesh
from runtime.cluster.launcher import Launcher, RankDied
from runtime.cluster.process_launcher import ProcessLauncher
from runtime.cluster.supervisor import GroupSupervisor, RunningGroup
from workers.client import LinkBroken
from workers.plan import LoadError, RanksDisagree, StepTimeout, WorkerError, WorkerLost

TESTS = Path(__file__).parents[1]

ONE, PAIR, APART, FOUR = Mesh(), Mesh(tp=2), Mesh(dp=2), Mesh(dp=2, tp=2, ep=4)

STEP_TIMEOUT_S = 1.0


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fakes are found by the ranks, and no rank is left, whatever happened to it."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    before = ranks()
    yield
    assert ranks() == before


def settings_for(state_dir: Path, mesh: Mesh, load: str = "well", **cluster: object) -> ServeSettings:
    return ServeSettings(
        model=ModelSettings.model_validate({"path": load, "numerics": "reference", "device": "cpu"}),
        parallel=ParallelSettings(dp=mesh.dp, tp=mesh.tp, ep=mesh.ep),
        cluster=ClusterSettings.model_validate(
            {"launcher": "process", "worker_threads": 3, "step_timeout_s": STEP_TIMEOUT_S, **cluster}
        ),
        state_dir=state_dir,
    )


def supervisor_of(settings: ServeSettings, launcher: Launcher | None = None) -> GroupSupervisor:
    children = ProcessLauncher(settings.cluster, settings.state_dir, factory=echo_worker.FACTORY)
    return GroupSupervisor(settings, launcher or children)


async def step(group: RunningGroup, step_id: int, uid: int | None = None) -> object:
    plan = echo_worker.plan(step_id, group.epoch, uid, dp=group.mesh.dp)
    return await asyncio.wait_for(group.link.execute(plan), 20)


def pids(group: RunningGroup) -> list[int]:
    return [echo_worker.pid_of(description) for description in group.ranks]


@pytest.mark.parametrize("mesh", [ONE, PAIR, FOUR], ids=str)
def test_a_group_serves_in_processes_of_its_own_and_leaves_with_the_supervisor(tmp_path: Path, mesh: Mesh) -> None:
    frames: dict[int, list[str]] = defaultdict(list)

    async def run() -> None:
        supervisor = supervisor_of(settings_for(tmp_path, mesh))
        group = await supervisor.start(lambda rank, stage, done, total: frames[rank].append(stage))
        assert (group.mesh, group.epoch, group.lost.done()) == (mesh, 1, False)
        assert [launched.pid for launched in supervisor.launched] == pids(group)
        assert len({os.getpid(), *pids(group)}) == mesh.size + 1
        assert [description.rank for description in group.ranks] == list(range(mesh.size))
        result = await group.link.execute(echo_worker.plan(1, 1, dp=mesh.dp))
        threads = 3
        assert result.batches[0].emitted == ((2, 1, 1, threads), (5, 9, 1, threads))
        assert [batch.emitted for batch in result.batches[1:]] == [()] * (mesh.dp - 1)
        assert len(result.timings) == mesh.size
        assert dict(group.description.accounting)["MKL_CBWR"] == "COMPATIBLE"
        addresses = [launched.address for launched in supervisor.launched]
        addresses += [launched.store.address for launched in supervisor.launched if launched.store is not None]
        assert len(set(addresses)) == mesh.size + (mesh.size > 1)
        await supervisor.stop()
        assert all(map(is_gone, pids(group)))
        for address in addresses:
            host, _, port = address.rpartition(":")
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host, int(port))

    asyncio.run(run())
    launch, load = ["launch", "launch"], ["import", "config", "weights", "pools"]
    assert frames == dict.fromkeys(range(mesh.size), launch + load)
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert sorted(name[name.index("-rank") :] for name in logs) == [f"-rank{r}-epoch1.log" for r in range(mesh.size)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("uid", "kind", "text", "bound_s"),
    [
        (echo_worker.UID_DIES, RankDied, "process {pid} was killed by SIGKILL", 1.0),
        (echo_worker.UID_RAISES, WorkerLost, "ArithmeticError: the matrix said no", 1.5),
        (echo_worker.UID_STOPS, StepTimeout, "step {step} has no result after 1 s", STEP_TIMEOUT_S + 1.0),
    ],
    ids=["dies", "raises", "stops"],
)
def test_the_fault_of_one_rank_in_a_step_ends_the_group_twice_in_a_row(
    tmp_path: Path, rank: int, uid: int, kind: type[WorkerError], text: str, bound_s: float
) -> None:
    async def run() -> None:
        async with begun(supervisor_of(settings_for(tmp_path, PAIR))) as (supervisor, group):
            for life in (1, 2):
                assert group.epoch == life
                await step(group, 1)
                begin = time.monotonic()
                with pytest.raises(WorkerError) as caught:
                    await step(group, 2, echo_worker.at_rank(uid, rank))
                assert time.monotonic() - begin < bound_s
                assert type(caught.value) is kind
                reason = f"rank {rank} (dp 0, tp {rank}): " + text.format(pid=pids(group)[rank], step=2)
                assert str(caught.value) == reason
                assert await asyncio.wait_for(group.lost, 1) == reason
                with pytest.raises(kind):
                    await step(group, 3)
                last, group = group, await supervisor.restart(reason)
                assert all(map(is_gone, pids(last)))
            await step(group, 1)
            assert not group.lost.done()

    asyncio.run(run())


@pytest.mark.parametrize("uid", [echo_worker.UID_COMMITS_OTHERWISE, echo_worker.UID_JOINS_ONCE_MORE])
def test_ranks_that_disagree_are_lost(tmp_path: Path, uid: int) -> None:
    async def run() -> None:
        async with begun(supervisor_of(settings_for(tmp_path, FOUR))) as (supervisor, group):
            with pytest.raises(RanksDisagree, match=r"^step 1: .*rank 0 \(dp 0, tp 0\) .*rank 1 \(dp 0, tp 1\)"):
                await step(group, 1, echo_worker.at_rank(uid, 1))
            assert "step 1" in await asyncio.wait_for(group.lost, 1)
            await step(await supervisor.restart("they disagree"), 1)

    asyncio.run(run())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_between_steps_is_noticed(tmp_path: Path, rank: int) -> None:
    async def run() -> None:
        async with begun(supervisor_of(settings_for(tmp_path, APART))) as (supervisor, group):
            await step(group, 1)
            os.kill(pids(group)[rank], signal.SIGKILL)
            reason = await asyncio.wait_for(group.lost, 1)
            assert reason == f"rank {rank} (dp {rank}, tp 0): process {pids(group)[rank]} was killed by SIGKILL"
            with pytest.raises(RankDied):
                await step(group, 2)
            await step(await supervisor.restart(reason), 1)

    asyncio.run(run())


@pytest.mark.full
def test_a_rank_that_stands_still_between_steps_is_noticed_by_its_link(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(settings_for(tmp_path, PAIR))) as (supervisor, group):
            os.kill(pids(group)[1], signal.SIGSTOP)
            assert re.match(r"rank 1 \(dp 0, tp 1\): the link to .* broke: ", await asyncio.wait_for(group.lost, 17))
            await step(await supervisor.restart("it stands still"), 1)

    asyncio.run(run())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_that_is_cut_ends_the_group(tmp_path: Path, rank: int) -> None:
    async def run() -> None:
        settings = settings_for(tmp_path, PAIR)
        proxied = Proxied(ProcessLauncher(settings.cluster, tmp_path, factory=echo_worker.FACTORY))
        async with begun(supervisor_of(settings, proxied)) as (supervisor, group):
            running = asyncio.create_task(step(group, 1, echo_worker.at_rank(echo_worker.UID_WAITS, 1 - rank)))
            await asyncio.wait([running], timeout=0.1)
            proxied.cut(rank)
            with pytest.raises(LinkBroken, match=rf"^rank {rank} \(dp 0, tp {rank}\): the link to "):
                await running
            assert await asyncio.wait_for(group.lost, 1)
            await step(await supervisor.restart("the link was cut"), 1)
        assert all(map(is_gone, pids(group)))

    asyncio.run(run())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("load", "kind", "text"),
    [
        ("badly", LoadError, "failed at stage 'weights': " + echo_worker.LOAD_ERROR),
        ("crash", WorkerLost, "failed at stage 'import': RuntimeError: the library threw"),
        ("death", WorkerLost, "was killed by SIGKILL; its log ends:\nlast words of the worker\n({log})"),
        ("hang", WorkerLost, "the start took more than 3 s; not ready: "),
    ],
)
def test_a_start_that_one_rank_spoils_names_it_and_leaves_nothing(
    tmp_path: Path, rank: int, load: str, kind: type[Exception], text: str
) -> None:
    async def run() -> None:
        timeout_s = 3 if load == "hang" else 60
        supervisor = supervisor_of(settings_for(tmp_path, PAIR, f"{load}@{rank}", start_timeout_s=timeout_s))
        for _ in range(2):  # the next attempt fares no better and no worse
            begin = time.monotonic()
            with pytest.raises(WorkerError) as caught:
                await supervisor.start(lambda *_: None)
            assert time.monotonic() - begin < 10
            assert type(caught.value) is kind
            log = max((tmp_path / "logs").glob(f"*-rank{rank}-*"))
            assert text.format(log=log) in str(caught.value)
            assert f"rank {rank} (dp 0, tp {rank}) " in str(caught.value)
            assert supervisor.launched == ()
        if load == "hang":  # the other one waits for it, one stage on
            stages = ["'weights'", "'weights'"]
            for other, stage in enumerate(stages):
                assert f"rank {other} (dp 0, tp {other}) at stage {stage}" in str(caught.value)
        await supervisor.stop()

    asyncio.run(run())


def test_ranks_that_loaded_different_things_do_not_start(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = supervisor_of(settings_for(tmp_path, PAIR, "other@1"))
        with pytest.raises(LoadError, match=r"^rank 1 \(dp 0, tp 1\) has vocab_size 31, rank 0 \(dp 0, tp 0\) has 32;"):
            await supervisor.start(lambda *_: None)
        await supervisor.stop()

    asyncio.run(run())


def test_a_group_has_the_slots_and_pages_of_its_poorest_rank(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(settings_for(tmp_path, PAIR, "few@1"))) as (_, group):
            assert (group.description.num_slots, group.description.num_pages) == (3, (7, 2))
            assert [each.num_slots for each in group.ranks] == [4, 3]

    asyncio.run(run())


def test_ranks_share_a_port_range(tmp_path: Path) -> None:
    async def run() -> None:
        first, last = 23_400, 23_460
        settings = settings_for(tmp_path, PAIR, worker_port_min=first, worker_port_max=last)
        async with begun(supervisor_of(settings)) as (supervisor, _), begun(supervisor_of(settings)) as (second, _):
            everyone = [*supervisor.launched, *second.launched]
            stores = [launched.store.address for launched in everyone if launched.store is not None]
            ports = [int(address.rpartition(":")[2]) for address in [*(each.address for each in everyone), *stores]]
            assert len(set(ports)) == 6
            assert all(first <= port <= last for port in ports)

    asyncio.run(run())


def test_a_port_range_that_is_too_small_says_what_to_widen(tmp_path: Path) -> None:
    async def run() -> None:
        settings = settings_for(tmp_path, PAIR, worker_port_min=23_470, worker_port_max=23_471)
        supervisor = supervisor_of(settings)
        with pytest.raises(WorkerLost, match=r"rank \d .* at stage 'launch'(.|\n)*widen cluster\.worker_port_min"):
            await supervisor.start(lambda *_: None)
        await supervisor.stop()

    asyncio.run(run())


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = supervisor_of(settings_for(tmp_path, PAIR, "hang@1"))
        hanging = asyncio.Event()

        def progress(rank: int, stage: str, done: int, total: int) -> None:
            if (rank, stage) == (1, "weights"):
                hanging.set()

        start = asyncio.create_task(supervisor.start(progress))
        await hanging.wait()
        assert len(ranks() - before) == 2
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert ranks() == before
        await supervisor.stop()

    before = ranks()
    asyncio.run(run())


def test_a_life_that_is_lost_tells_the_last_words_of_who_died(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with begun(supervisor_of(settings_for(tmp_path, PAIR))) as (supervisor, group):
            with pytest.raises(RankDied):
                await step(group, 1, echo_worker.at_rank(echo_worker.UID_DIES, 1))
            await group.lost
            await supervisor.restart("it died")

    asyncio.run(run())
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "rank 1 (dp 0, tp 1): process" in errors[0]
    assert "-rank1-epoch1.log" in errors[0]


def test_no_rank_outlives_its_kill_and_what_cannot_be_killed_is_tried_again(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = supervisor_of(settings_for(tmp_path, PAIR))
        await supervisor.start(lambda *_: None)
        stubborn = supervisor.launched[0]
        kill = stubborn.kill

        async def refuse() -> None:
            raise WorkerError("process 1 is still there")

        stubborn.kill = refuse  # type: ignore[method-assign]
        with pytest.raises(WorkerError, match="still there"):
            await supervisor.stop()
        assert is_gone(supervisor.launched[0].pid) is False
        assert len(supervisor.launched) == 1
        stubborn.kill = kill  # type: ignore[method-assign]
        with contextlib.suppress(WorkerError):
            await supervisor.stop()
        assert supervisor.launched == ()

    asyncio.run(run())
