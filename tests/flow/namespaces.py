"""Hosts for tests: network namespaces joined by a bridge, with a folder of Ray's own each, and what runs on them. Root
makes them, and takes them away again. Nothing in them reaches beyond the bridge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fakes.certificates import make_authority

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
RAY_PORT = 6399

HEAD, NODES, EDGE = 0, (1, 2), 3
"""The host of Ray's head and the front, those of the ranks, and the gateway's."""

CAN_BE_MADE = os.geteuid() == 0 and shutil.which("ip") is not None


class Hosts:
    """Host h has address .h+1; host 0 has the bridge.

    head: address of Ray's head. nodes: what joined the others to it; such a process ends when Ray gives its node up.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = ""
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._tag = f"ort{os.getpid() % 100000}"
        self._net = f"10.231.{os.getpid() % 250 + 1}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._token = secrets.token_hex(16)

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def build(self) -> None:
        for host in (HEAD, *NODES, EDGE):
            _ip("netns", "add", self._name(host))
            _ip("-n", self._name(host), "link", "set", "lo", "up")
            (self.folder / f"ray{host}").mkdir()
        Path("/tmp/ray").mkdir(exist_ok=True)
        _ip("-n", self._name(HEAD), "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._name(HEAD), "addr", "add", f"{self.address(HEAD)}/24", "dev", "bridge")
        _ip("-n", self._name(HEAD), "link", "set", "bridge", "up")
        for host in (*NODES, EDGE):
            port, end = f"{self._tag}p{host}", self._link(host)
            veth = ("type", "veth", "peer", "name", end, "netns", self._name(host))
            _ip("link", "add", port, "netns", self._name(HEAD), *veth)
            _ip("-n", self._name(HEAD), "link", "set", port, "master", "bridge", "up")
            _ip("-n", self._name(host), "addr", "add", f"{self.address(host)}/24", "dev", end)
            self.mend(host)

    def certify(self) -> None:
        """TLS files: `links` of all of Outrider, by its addresses and the name outrider; `client` of callers; `edge` of
        the gateway."""
        authority = make_authority(self.folder / "tls")
        authority.issue("links", "outrider", *(self.address(host) for host in (HEAD, *NODES)))
        authority.issue("client", "gateway")
        authority.issue("edge")

    def tls(self, name: str) -> Path:
        return self.folder / "tls" / f"{name}.pem"

    def destroy(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for host in (HEAD, *NODES, EDGE):
            name = self._name(host)
            # Whatever still runs in a namespace of ours was started by us.
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def cut(self, host: int) -> None:
        """Nothing reaches the host, nor leaves it, and nobody is told."""
        _ip("-n", self._name(host), "link", "set", self._link(host), "down")

    def mend(self, host: int) -> None:
        _ip("-n", self._name(host), "link", "set", self._link(host), "up")

    def start_ray(self) -> None:
        """A head without CPUs on host 0, then a node of one CPU on each of the others."""
        self.head = f"{self.address(HEAD)}:{RAY_PORT}"
        self.start(HEAD, "ray0.log", *_ray(self.address(HEAD), "--head", f"--port={RAY_PORT}", "--num-cpus=0"))
        self.until("Ray runtime started", "ray0.log")
        for host in NODES:
            self.start_node(host)
        for host, node in self.nodes.items():
            self.until("Ray runtime started", f"ray{host}.log", node)

    def start_node(self, host: int) -> None:
        """Joins a host to the head, once more where it has left."""
        command = _ray(self.address(host), f"--address={self.head}", "--num-cpus=1")
        self.nodes[host] = self.start(host, f"ray{host}.log", *command)

    def start(self, host: int, log: str, *command: str, cwd: Path = ROOT) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as output:
            process = subprocess.Popen(
                self._on(host, *command),
                stdout=output,
                stderr=output,
                env=self._env(),
                start_new_session=True,
                cwd=cwd,
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
        return (self.folder / log).read_text(errors="replace")

    def until(self, text: str, log: str, process: subprocess.Popen[bytes] | None = None) -> None:
        """Waits for a text in a log; `process`, where given, must not end before."""
        wait_for(lambda: text in self.text_of(log) or (process is not None and process.poll() is not None))
        assert text in self.text_of(log), self.text_of(log)

    def _name(self, host: int) -> str:
        return f"{self._tag}-{host}"

    def _link(self, host: int) -> str:
        return f"{self._tag}e{host}"

    def _on(self, host: int, *command: str) -> list[str]:
        # Every command gets a mount namespace, too, and in it the host's own folder of Ray's.
        private = 'mount --bind "$0" /tmp/ray && exec "$@"'
        return ["ip", "netns", "exec", self._name(host), "sh", "-c", private, str(self.folder / f"ray{host}"), *command]

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


def outrider(*arguments: str) -> tuple[str, ...]:
    return sys.executable, "-c", "from runtime.cli.main import main; main()", *arguments


def wait_for(is_so: Callable[[], bool], limit_s: float = PATIENCE_S) -> float:
    """Returns after how many seconds it was so."""
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() < begin + limit_s, f"it takes longer than {limit_s:g} s"
        time.sleep(0.1)  # other processes tell nothing when they are ready
    return time.monotonic() - begin


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _ray(address: str, *arguments: str) -> tuple[str, ...]:
    quiet = ("--block", "--disable-usage-stats", f"--node-ip-address={address}")
    no_dashboard = ("--include-dashboard=false",) if "--head" in arguments else ()
    return sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *quiet, *no_dashboard
