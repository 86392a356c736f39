"""A rank as a child process: started, watched, killed, replaced, never left behind. The supervisor is the real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import echo_worker
from fakes.supervised import begun, is_gone

import runtime
from configs.schema import ClusterSettings, ModelSettings, ServeSettings
from runtime.cluster.launcher import LOGS_KEPT, log_path, worker_environment
from runtime.cluster.process_launcher import ProcessLauncher
from runtime.cluster.supervisor import WorkerSupervisor
from workers.plan import LoadError, StepTimeout, WorkerLost

TESTS = Path(__file__).parents[1]
CHECKOUT = Path(runtime.__file__).parents[1]


@pytest.fixture(autouse=True)
def _fakes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def serve_settings(state_dir: Path, load: str = "well", **cluster: object) -> ServeSettings:
    return ServeSettings(
        model=ModelSettings.model_validate({"path": load, "numerics": "reference"}),
        cluster=ClusterSettings.model_validate({"launcher": "process", "worker_threads": 3, **cluster}),
        state_dir=state_dir,
    )


def supervisor_of(settings: ServeSettings) -> WorkerSupervisor:
    launcher = ProcessLauncher(settings.cluster, settings.state_dir, factory=echo_worker.FACTORY)
    return WorkerSupervisor(settings, launcher)


def ranks() -> set[int]:
    """Child processes of ours that are ranks; tests that ran before may have left some in use."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"workers.main" in (process / "cmdline").read_bytes():
                    found.add(int(process.name))
    return found


def test_a_worker_serves_in_a_process_of_its_own_and_leaves_with_the_supervisor(tmp_path: Path) -> None:
    async def run() -> int:
        async with begun(supervisor_of(serve_settings(tmp_path))) as (_, worker):
            pid = echo_worker.pid_of(worker.description)
            assert pid != os.getpid()
            assert worker.epoch == 1
            assert not worker.lost.done()
            result = await worker.link.execute(echo_worker.plan(1, 1))
            threads = 3
            assert result.emitted == ((2, 1, 1, threads), (5, 9, 1, threads))
            assert dict(worker.description.accounting)["MKL_CBWR"] == "COMPATIBLE"
        return pid

    assert is_gone(asyncio.run(run()))


def test_killed_in_the_middle_of_a_step_it_is_lost_at_once_and_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(serve_settings(tmp_path))) as (supervisor, worker):
            await worker.link.execute(echo_worker.plan(1, worker.epoch))
            with pytest.raises(WorkerLost):
                await asyncio.wait_for(worker.link.execute(echo_worker.plan(2, worker.epoch, echo_worker.UID_DIES)), 2)
            assert "was killed by SIGKILL" in await asyncio.wait_for(worker.lost, 2)
            second = await supervisor.restart("killed")
            assert second.epoch == 2
            assert echo_worker.pid_of(second.description) != echo_worker.pid_of(worker.description)
            assert (await second.link.execute(echo_worker.plan(1, 2))).epoch == 2
            assert not second.lost.done()

    asyncio.run(run())


def test_stopped_in_the_middle_of_a_step_it_times_out_and_is_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(serve_settings(tmp_path, step_timeout_s=0.5))) as (supervisor, worker):
            with pytest.raises(StepTimeout, match=r"after 0\.5 s"):
                await asyncio.wait_for(worker.link.execute(echo_worker.plan(1, 1, echo_worker.UID_STOPS)), 3)
            second = await supervisor.restart("hung")
            assert is_gone(echo_worker.pid_of(worker.description))
            await second.link.execute(echo_worker.plan(1, 2))

    asyncio.run(run())


def test_a_worker_that_dies_while_idle_is_noticed(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(serve_settings(tmp_path))) as (_, worker):
            pid = echo_worker.pid_of(worker.description)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.wait_for(worker.lost, 2) == f"process {pid} was killed by SIGKILL"
            with pytest.raises(WorkerLost):
                await worker.link.execute(echo_worker.plan(1, 1))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("load", "error", "text"),
    [
        ("badly", LoadError, "loading failed at stage 'weights': " + echo_worker.LOAD_ERROR),
        ("crash", WorkerLost, "the worker failed at stage 'import': RuntimeError: the library threw"),
        ("death", WorkerLost, "was killed by SIGKILL; its log ends:\nlast words of the worker"),
        ("hang", WorkerLost, "the worker's start took more than 2 s, at stage 'weights'"),
    ],
)
def test_a_failed_start_names_stage_and_reason_and_leaves_nothing(
    tmp_path: Path, load: str, error: type[Exception], text: str
) -> None:
    async def run() -> None:
        timeout_s = 2 if load == "hang" else 60
        supervisor = supervisor_of(serve_settings(tmp_path, load, start_timeout_s=timeout_s))
        with pytest.raises(error) as caught:
            await supervisor.start(lambda *_: None)
        assert text in str(caught.value)
        await supervisor.stop()

    before = ranks()
    asyncio.run(run())
    assert ranks() == before


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(serve_settings(tmp_path / "first"))) as (_, worker):
            port = int(worker.link.address.rpartition(":")[2])
            taken = serve_settings(tmp_path / "second", worker_port_min=port, worker_port_max=port)
            with pytest.raises(WorkerLost, match=f"exited with status 1 before it served(.|\n)*port {port}: taken"):
                await supervisor_of(taken).start(lambda *_: None)

    asyncio.run(run())


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = supervisor_of(serve_settings(tmp_path, "hang"))
        hanging = asyncio.Event()

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "weights":
                hanging.set()

        start = asyncio.create_task(supervisor.start(progress))
        await hanging.wait()
        assert len(ranks() - before) == 1
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert ranks() == before
        await supervisor.stop()

    before = ranks()
    asyncio.run(run())


def test_no_worker_outlives_a_runtime_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from configs.schema import ClusterSettings
from fakes import echo_worker
from fakes.supervised import begun, is_gone
from runtime.cluster.process_launcher import ProcessLauncher

async def main():
    launcher = ProcessLauncher(ClusterSettings(), Path({str(tmp_path)!r}), factory=echo_worker.FACTORY)
    worker = await launcher.launch(echo_worker.settings(), 1)
    print(worker.pid, flush=True)
    await worker.wait_dead()

asyncio.run(main())
"""
    path = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "proto", TESTS)))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([worker], [], [], 5)
    os.close(worker)
    assert ended


def test_each_rank_has_a_log_of_its_own_and_the_oldest_go(tmp_path: Path) -> None:
    written = []
    for epoch in range(1, LOGS_KEPT + 4):
        written.append(log_path(tmp_path, echo_worker.settings(), epoch))
        written[-1].write_text("words")
    assert len(set(written)) == len(written)
    # Another server in the same folder counts its epochs from 1 too.
    latest = log_path(tmp_path, echo_worker.settings(), 1)
    assert latest not in written
    assert sorted(latest.parent.iterdir()) == written[-LOGS_KEPT:]


def test_the_environment_of_a_rank() -> None:
    settings = echo_worker.settings(threads=2)
    plain = worker_environment(settings, {})
    assert plain["OMP_NUM_THREADS"] == plain["MKL_NUM_THREADS"] == "2"
    assert "MKL_CBWR" not in plain
    reference = worker_environment(echo_worker.settings(numerics="reference"), {"MKL_CBWR": "AVX2", "PYTHONPATH": "/x"})
    assert reference["MKL_CBWR"] == "AVX2"
    assert reference["PYTHONPATH"].endswith(f"{os.pathsep}/x")
    assert str(CHECKOUT) in reference["PYTHONPATH"].split(os.pathsep)
