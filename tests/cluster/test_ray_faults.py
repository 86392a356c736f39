"""A Ray that is lost: daemons killed, a cluster gone and back. The runtime survives, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import echo_worker
from oracles.days import by_day, on_turn

import runtime
from configs.schema import ClusterSettings
from runtime.cluster.ray_launcher import RayLauncher
from runtime.cluster.ray_session import RaySession
from workers.plan import WorkerLost

TESTS = Path(__file__).parents[1]
CHECKOUT = Path(runtime.__file__).parents[1]


def run_fake(*arguments: str, timeout_s: float, orphaned: bool = False) -> dict[str, Any]:
    """The object that `fakes.ray_faults` prints, the time that its process took to end after that (end_s), and how many
    lines it wrote to its standard output (num_lines). orphaned: its parent is process 1, or who takes that one's place.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "proto", TESTS))),
        # Nodes on loopback, whatever addresses the machine has.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    command = [sys.executable, "-m", "fakes.ray_faults", *arguments]
    if orphaned:
        command = ["setsid", "--fork", *command]
    # The pipe is read to its end: an orphan is not waited for otherwise.
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, timeout=timeout_s, check=not orphaned
    )
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return {**found, "end_s": time.monotonic() - found["now_s"], "num_lines": len(lines)}


@on_turn(3, of=4)
@pytest.mark.ray
@pytest.mark.parametrize(
    "fault",
    by_day({f"{case}-{daemon}": (case, daemon) for case in ("kill", "hang") for daemon in ("raylet", "gcs_server")}),
)
def test_a_local_ray_that_loses_a_daemon_is_replaced_by_a_fresh_one(tmp_path: Path, fault: tuple[str, str]) -> None:
    case, daemon = fault
    assert shutil.which("setsid"), "util-linux is missing"
    found = run_fake(case, daemon, str(tmp_path), timeout_s=120, orphaned=True)
    assert found["num_processes"] >= 6  # two daemons, two ranks, and Ray's own helpers
    lost = f"Ray's {daemon} (process " if case == "kill" else " ended: its process is gone"
    assert lost in found["reason"]
    assert found["noticed_s"] < 1
    assert found["restarted_s"] < 40
    assert found["num_lines"] == 1, "Ray wrote to our standard output"
    assert found["is_fresh"]
    assert found["old_ranks_gone"]
    assert found["left_of_the_old"] == []
    assert found["left_of_the_new"] == []


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("daemon", ["gcs_server", "raylet"])
def test_an_orderly_end_does_not_wait_for_a_daemon_that_hangs(tmp_path: Path, daemon: str) -> None:
    found = run_fake("stop", daemon, str(tmp_path), timeout_s=120)
    first_s, second_s = found["stop_s"]
    assert first_s < 15
    assert second_s < 1
    assert found["end_s"] < 5
    assert found["left"] == []


@pytest.mark.full
@pytest.mark.ray
def test_a_cluster_that_hangs_is_left_in_time(tmp_path: Path) -> None:
    found = run_fake("leave", "23581", str(tmp_path), timeout_s=120)
    first_s, second_s = found["stop_s"]
    assert first_s < 15
    assert second_s < 1
    assert found["end_s"] < 5


@pytest.mark.full
@pytest.mark.ray
def test_a_cluster_that_is_lost_is_an_error_until_it_is_back(tmp_path: Path) -> None:
    port = 23_579  # no ephemeral one: who dials those while nobody listens may come to talk to itself
    found = run_fake("cluster", str(port), str(tmp_path), timeout_s=250)
    assert found["num_nodes"] == 2  # one data-parallel rank on each
    for rank, words in enumerate(found["logs"]):
        assert f"-rank{rank}-epoch1.log" in words
    assert found["lost_rank"].startswith("rank 1 (dp 1, tp 0): Ray actor rank-1-epoch-1, process ")
    assert found["noticed_s"] < 16
    assert len(found["errors"]) == 2
    assert all(f"no Ray cluster at 127.0.0.1:{port}: " in error for error in found["errors"])


def test_a_cluster_that_nothing_listens_for_is_an_error_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        launcher = RayLauncher(ClusterSettings(ray_address=address), tmp_path, factory=echo_worker.FACTORY)
        for epoch in (1, 2):
            with pytest.raises(WorkerLost, match=rf"^no Ray cluster at {address}: .*; check cluster\.ray_address"):
                await asyncio.wait_for(launcher.launch(echo_worker.settings(), epoch, echo_worker.TERMS), 5)
        await launcher.close()

    asyncio.run(run())


def test_a_call_that_ray_does_not_answer_ends_the_session_in_time() -> None:
    async def run() -> None:
        session = RaySession(ClusterSettings(), num_cpus=1, namespace="n")
        assert await session.call(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await session.call(lambda: 1 // 0)
        assert not session.lost.done()
        never = threading.Event()
        begin = time.monotonic()
        with pytest.raises(WorkerLost, match=r"^Ray did not answer within 0\.2 s"):
            await session.call(never.wait, limit_s=0.2)
        assert time.monotonic() - begin < 2
        with pytest.raises(WorkerLost, match="did not answer"):
            await session.call(lambda: 7)
        await session.leave()
        never.set()

    asyncio.run(run())
