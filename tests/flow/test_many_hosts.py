"""Several hosts: a Ray head and two worker nodes, each with a network of its own; ranks meet across them.

The hosts are network namespaces, joined by a bridge; root makes them, and the test takes them away again. Nothing in
them reaches beyond the bridge.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flow.house import House, heldout, request
from oracles.days import by_day, on_turn

ROOT = Path(__file__).parents[2]
RAY_PORT, FRONT_PORT = 6399, 50099
PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"),
]


class Hosts:
    """Host 0 has address .1 and the bridge, hosts 1 and 2 have .2 and .3."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tag = f"ort{os.getpid() % 100000}"
        self._net = f"10.231.{os.getpid() % 250 + 1}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._token = secrets.token_hex(16)

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def build(self) -> None:
        for host in range(3):
            _ip("netns", "add", self._name(host))
            _ip("-n", self._name(host), "link", "set", "lo", "up")
        _ip("-n", self._name(0), "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._name(0), "addr", "add", f"{self.address(0)}/24", "dev", "bridge")
        _ip("-n", self._name(0), "link", "set", "bridge", "up")
        for host in (1, 2):
            port, end = f"{self._tag}p{host}", f"{self._tag}e{host}"
            _ip(
                "link",
                "add",
                port,
                "netns",
                self._name(0),
                "type",
                "veth",
                "peer",
                "name",
                end,
                "netns",
                self._name(host),
            )
            _ip("-n", self._name(0), "link", "set", port, "master", "bridge", "up")
            _ip("-n", self._name(host), "addr", "add", f"{self.address(host)}/24", "dev", end)
            _ip("-n", self._name(host), "link", "set", end, "up")

    def destroy(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for host in range(3):
            name = self._name(host)
            # Whatever still runs in a namespace of ours was started by us.
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def start(self, host: int, log: str, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / log).open("wb") as output:
            process = subprocess.Popen(
                self._on(host, *command),
                stdout=output,
                stderr=output,
                env=self._env(),
                start_new_session=True,
                cwd=ROOT,
            )
        self._processes.append(process)
        return process

    def run(self, host: int, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            self._on(host, *command), capture_output=True, text=True, env=self._env(), timeout=PATIENCE_S, cwd=ROOT
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def text_of(self, log: str) -> str:
        return (self._folder / log).read_text(errors="replace")

    def _name(self, host: int) -> str:
        return f"{self._tag}-{host}"

    def _on(self, host: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self._name(host), *command]

    def _env(self) -> dict[str, str]:
        # This process may have a Ray of its own, whose settings are none of theirs.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {
            **inherited,
            "RAY_USAGE_STATS_ENABLED": "0",
            # A head that others may join asks for a token.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
            "COLUMNS": "200",
        }


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _ray(*arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", "ray.scripts.scripts", *arguments


def _outrider(*arguments: str) -> tuple[str, ...]:
    return sys.executable, "-c", "from runtime.cli.main import main; main()", *arguments


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.build()
        head = f"{hosts.address(0)}:{RAY_PORT}"
        at = f"--node-ip-address={hosts.address(0)}"
        hosts.start(0, "0.log", *_ray("start", "--head", at, f"--port={RAY_PORT}", "--num-cpus=0", *QUIET))
        _wait(lambda: "Active" in hosts.run(0, *_ray("status", "--address", head), check=False))
        for host in (1, 2):
            at = f"--node-ip-address={hosts.address(host)}"
            hosts.start(host, f"{host}.log", *_ray("start", f"--address={head}", at, "--num-cpus=1", *QUIET[:1]))
            # One after the other: the hosts share a file system, and two nodes that start at once take the same names.
            joined = f"/{host}.0 CPU"
            _wait(lambda joined=joined: joined in hosts.run(0, *_ray("status", "--address", head), check=False))
        yield hosts
    finally:
        hosts.destroy()


QUIET = ("--block", "--include-dashboard=false", "--disable-usage-stats")


def _wait(is_so: object) -> None:
    assert callable(is_so)
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.2)  # other processes tell nothing when they are ready


@on_turn(0, of=4)
@pytest.mark.parametrize("layout", by_day({"tp2": ("--tp", "2"), "dp2_ep2": ("--dp", "2", "--ep", "2")}))
def test_ranks_on_two_hosts_serve_as_one(hosts: Hosts, house: House, layout: tuple[str, ...], tmp_path: Path) -> None:
    prompt = heldout(1, 90)[0]
    expected = house.run(house.generate(request(prompt, 24, ignore_eos=True))).text
    front = hosts.address(0)
    log = f"serve{layout[0]}.log"
    serving = hosts.start(
        *(0, log, *_outrider("serve", *layout, "--ray-address", f"{front}:{RAY_PORT}", "--host", front)),
        *("--port", str(FRONT_PORT), "--set", f"state_dir={tmp_path}"),
    )
    _wait(lambda: "ready: " in hosts.text_of(log) or serving.poll() is not None)
    assert serving.poll() is None, hosts.text_of(log)
    address = f"{front}:{FRONT_PORT}"
    options = ("--address", address, "--max-tokens", "24", "--temperature", "0", "--ignore-eos")
    assert expected.strip() in hosts.run(0, *_outrider("generate", prompt, *options))
    ranks = set(re.findall(rf"({re.escape(hosts.address(1))}|{re.escape(hosts.address(2))}):\d+", hosts.text_of(log)))
    assert ranks == {hosts.address(1), hosts.address(2)}, hosts.text_of(log)
    serving.send_signal(signal.SIGINT)
    assert serving.wait(30) == 0, hosts.text_of(log)
    # The cluster has its resources back for the next one.
    head = f"{front}:{RAY_PORT}"
    _wait(lambda: "0.0/2.0 CPU" in hosts.run(0, *_ray("status", "--address", head), check=False))
