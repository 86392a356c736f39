"""The server with Ray as its launcher, from start to a stop signal: whom it calls, and what it prints."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.servers import printed_until_ready

ROOT = Path(__file__).parents[2]
LIMIT_S = 120

pytestmark = pytest.mark.ray

# -D: the traced command keeps the number of the process we started, so that signals reach it.
STRACE = ["strace", "-D", "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,execve", "-s", "4096"]


@dataclass
class Life:
    """What is left of a server: its exit code, what it printed, its system calls (empty without strace)."""

    code: int
    out: str
    err: str
    calls: str


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A server is started, becomes ready and is ended by SIGTERM."""
    folder = tmp_path_factory.mktemp("ray")
    calls = folder / "calls"
    path = os.pathsep.join(str(ROOT / part) for part in (".", "proto", "tests"))
    command = [sys.executable, "-m", "fakes.outrider_counting", "serve", "--launcher", "ray", "--port", "0"]
    with subprocess.Popen(
        [*STRACE, "-o", str(calls), *command] if can_trace(folder) else command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            printed, _ = printed_until_ready(process)
            process.terminate()
            out, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            process.kill()
            raise
    return Life(process.returncode, printed + out, err, calls.read_text() if calls.exists() else "")


def can_trace(folder: Path) -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run([*STRACE, "-o", str(folder / "trial"), "true"], capture_output=True).returncode == 0


def test_a_stop_signal_is_no_crash(life: Life) -> None:
    assert life.code == 0, life.err
    assert "ready: " in life.out
    said = re.sub(r"(?m)^(launch|import|weights|warm-up)\n", "", life.err).splitlines()
    levels = {json.loads(line)["level"] for line in said}
    assert levels <= {"info"}, life.err
    assert not [name for line in said for name in json.loads(line) if name.startswith("_")], "fields of Ray's own"


def test_nobody_outside_the_machine_is_called(life: Life) -> None:
    if not life.calls:
        pytest.skip("strace is not here, or may not trace")
    assert "gcs_server" in life.calls, "the trace covers Ray's daemons"
    called = re.findall(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"', life.calls)
    assert len(called) > 10
    assert sorted({address for address in called if not is_loopback(address)}) == []


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
