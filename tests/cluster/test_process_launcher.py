"""A rank as a child process: its environment, its log, its ports, and that it never outlives the runtime."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import echo_worker
from fakes.supervised import ranks

import runtime
from configs.schema import ClusterSettings
from runtime.cluster.launcher import LOGS_KEPT, RankDied, log_path, worker_environment
from runtime.cluster.process_launcher import ProcessLauncher, gpu_environment
from workers.plan import LoadError

TESTS = Path(__file__).parents[1]
CHECKOUT = Path(runtime.__file__).parents[1]


@pytest.fixture(autouse=True)
def _fakes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def test_a_process_says_where_it_serves_and_where_its_store_is(tmp_path: Path) -> None:
    async def run() -> None:
        launcher = ProcessLauncher(ClusterSettings(), tmp_path, factory=echo_worker.FACTORY)
        alone, first = await asyncio.gather(
            launcher.launch(echo_worker.settings(), 1, echo_worker.TERMS),
            launcher.launch(echo_worker.settings(size=2), 1, echo_worker.TERMS),
        )
        assert alone.store is None
        assert first.store is not None
        assert first.host == "127.0.0.1"
        listening = [address.rpartition(":")[2] for address in (alone.address, first.address, first.store.address)]
        assert len(set(listening)) == 3
        for port in listening:
            _, writer = await asyncio.open_connection("127.0.0.1", int(port))
            writer.close()
        await asyncio.gather(alone.kill(), first.kill())
        for port in listening:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", int(port))

    before = ranks()
    asyncio.run(run())
    assert ranks() == before


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        first = await ProcessLauncher(ClusterSettings(), tmp_path).launch(echo_worker.settings(), 1, echo_worker.TERMS)
        port = int(first.address.rpartition(":")[2])
        taken = ClusterSettings(worker_port_min=port, worker_port_max=port)
        with pytest.raises(RankDied, match=f"exited with status 1 before it served(.|\n)*port {port}: taken"):
            await ProcessLauncher(taken, tmp_path).launch(echo_worker.settings(), 1, echo_worker.TERMS)
        await first.kill()

    asyncio.run(run())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_worker_outlives_a_runtime_that_is_killed(tmp_path: Path, is_stopped: bool) -> None:
    program = f"""
import asyncio
from pathlib import Path
from configs.schema import ClusterSettings
from fakes import echo_worker
from runtime.cluster.process_launcher import ProcessLauncher

async def main():
    launcher = ProcessLauncher(ClusterSettings(), Path({str(tmp_path)!r}), factory=echo_worker.FACTORY)
    worker = await launcher.launch(echo_worker.settings(), 1, echo_worker.TERMS)
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
        if is_stopped:
            signal.pidfd_send_signal(worker, signal.SIGSTOP)
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
    other = log_path(tmp_path, echo_worker.settings(rank=1), 1)
    other.write_text("of another rank, which has its own to keep")
    # Another server in the same folder counts its epochs from 1 too.
    latest = log_path(tmp_path, echo_worker.settings(), 1)
    assert latest not in written
    assert sorted(latest.parent.iterdir()) == [*written[-LOGS_KEPT:], other]
    assert "-rank1-epoch1" in other.name


def test_the_environment_of_a_rank() -> None:
    settings = echo_worker.settings(threads=2)
    plain = worker_environment(settings, {})
    assert plain["OMP_NUM_THREADS"] == plain["MKL_NUM_THREADS"] == "2"
    assert "MKL_CBWR" not in plain
    reference = worker_environment(echo_worker.settings(numerics="reference"), {"MKL_CBWR": "AVX2", "PYTHONPATH": "/x"})
    assert reference["MKL_CBWR"] == "AVX2"
    assert reference["PYTHONPATH"].endswith(f"{os.pathsep}/x")
    assert str(CHECKOUT) in reference["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize(
    ("rank", "size", "device", "inherited", "num_gpus", "given"),
    [
        (0, 1, "auto", {}, 8, None),
        (1, 2, "cpu", {}, 8, None),
        (1, 2, "auto", {}, 0, None),
        (1, 2, "auto", {"CUDA_VISIBLE_DEVICES": ""}, 8, None),
        (1, 2, "auto", {}, 8, "1"),
        (1, 2, "cuda", {"CUDA_VISIBLE_DEVICES": "5,7"}, 8, "7"),
    ],
)
def test_a_rank_of_several_sees_a_gpu_of_its_own(
    rank: int, size: int, device: str, inherited: dict[str, str], num_gpus: int, given: str | None
) -> None:
    settings = echo_worker.settings(rank=rank, size=size, device=device)
    assert gpu_environment(settings, inherited, num_gpus).get("CUDA_VISIBLE_DEVICES") == given


def test_too_few_gpus_are_an_error_and_not_a_mixture() -> None:
    settings = echo_worker.settings(size=2, device="auto")
    with pytest.raises(
        LoadError, match=r"2 ranks need a GPU each, and this process may use 1; lower parallel\.tp or dp"
    ):
        gpu_environment(settings, {}, 1)
