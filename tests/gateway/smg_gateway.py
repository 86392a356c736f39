"""The real gateway in front of deployments: the `smg` binary on a free port, and the `openai` client on it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

SMG = Path(sys.executable).parent / "smg"
STARTED_WITHIN_S = 30.0
FLAGS = (
    *("--policy", "round_robin", "--log-level", "warn"),
    # Sees within a second that a replica wants no more; by default it is three probes, a minute apart.
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--worker-startup-check-interval", "1", "--load-monitor-interval", "1"),
    # What one test breaks would else be kept from the next one.
    "--disable-circuit-breaker",
)


@dataclass(frozen=True, slots=True)
class Smg:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def workers(self) -> list[dict[str, Any]]:
        """What it knows of the replicas."""
        with urllib.request.urlopen(f"{self.url}/workers", timeout=5) as reply:
            workers: list[dict[str, Any]] = json.load(reply)["workers"]
        return workers

    def until_healthy(self, addresses: Sequence[str]) -> None:
        """Waits until it sends requests to these replicas and to no others."""
        wanted = {f"grpc://{address}" for address in addresses}
        deadline_s = time.monotonic() + STARTED_WITHIN_S
        seen: object = None
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                seen = {worker["url"] for worker in self.workers() if worker["is_healthy"]}
                if seen == wanted:
                    return
            time.sleep(0.02)
        raise AssertionError(f"healthy are {seen}, not {wanted}: {self.log.read_text()}")


@contextlib.contextmanager
def open_smg(addresses: Sequence[str], folder: Path, *flags: str) -> Iterator[Smg]:
    """A gateway that has found all replicas. folder: for its log. flags: besides `FLAGS`, or in their place."""
    port, metrics_port = _free_port(), _free_port()
    command = [str(SMG), "launch", "--worker-urls", *(f"grpc://{address}" for address in addresses)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), *FLAGS, *flags]
    log = folder / f"smg-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            smg = Smg(f"http://127.0.0.1:{port}", process, log)
            smg.until_healthy(addresses)
            smg.client().models.list()
            yield smg
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
