"""Many streams at once through the smg gateway: no error, and nothing that stays behind.

Starts the bundled model in this process, smg in front of it, and callers in a process of their own. Each caller asks
for a stream of its own as soon as it has had the last one; of twenty, one leaves before the end. After a first stretch,
which is not looked at, memory is sampled once a second; when the last stream has ended, the server is looked at once
more. What must be as it was before: pages, slots and the accounts made of them, the books of host and rank, file
descriptors, tasks of the event loop, and objects of our own classes. What must not grow: resident memory of server,
rank and gateway, by a line through the samples.

    python docs/benchmarks/gateway_load.py [--streams 256] [--seconds 300] [--warm-up 60] [--gamma 2]

Needs smg (the project's `dev` extra). Ends with 1 where something is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.load import load_settings
from runtime.bench.counters import MemoryUse
from runtime.front.client import OutriderClient
from runtime.serve import Deployment
from runtime.statistics import OVERHEAD_BOUNDS_S, EngineStatistics

CALLERS = Path(__file__).with_name("gateway_callers.py")
MIB = 2**20
QUIET_BYTES = 8 * MIB
"""Growth of resident memory that allocators may take, however small the process is."""
STRETCHES = 30
"""Of the measured time, in which memory is looked at."""
MAX_NEW_OBJECTS = 8
"""Of one of our classes, beyond those of before: caches may still have been filling up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """warm_up_s: of load that is not looked at. max_tokens: of one stream at most. max_running: streams that run at
    once; others wait in the queue. quiet: share of resident memory that allocators may take over the measured time."""

    streams: int = 256
    max_tokens: int = 48
    seconds: float = 300.0
    warm_up_s: float = 60.0
    gamma: int = 2
    max_running: int = 256
    quiet: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the server holds while it is idle."""

    accounts: MemoryUse
    descriptors: int
    tasks: Counter[str]
    objects: Counter[str]
    violations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Resident memory of one process over the measured time: its mean, and the growth of a line through the samples
    with its standard error, in bytes."""

    mean: float
    growth: float
    error: float

    def is_quiet(self, share: float) -> bool:
        """What the line rises by is no more than noise, or than allocators take."""
        return self.growth - 3 * self.error <= 0 or self.growth <= max(share * self.mean, QUIET_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """What the callers had: see gateway_callers.py."""

    ended: int
    left: int
    tokens: int
    errors: list[str]
    first_s: list[float]
    gap_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Of the measured time. Sums over steps in seconds; overhead: by bucket, as operators see it."""

    steps: int
    rounds: int
    emitted: int
    step_s: float
    overhead_s: float
    overheads: tuple[int, ...]

    @classmethod
    def between(cls, first: EngineStatistics, last: EngineStatistics) -> Steps:
        return cls(
            steps=last.steps - first.steps,
            rounds=last.rounds - first.rounds,
            emitted=last.emitted - first.emitted,
            step_s=last.execute_s + last.host_s - first.execute_s - first.host_s,
            overhead_s=last.overhead_s - first.overhead_s,
            overheads=tuple(
                b - a for a, b in zip(first.step_overhead_s.counts, last.step_overhead_s.counts, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    plan: Plan
    called: Called
    before: Standing
    after: Standing
    memory: dict[str, Line]
    steps: Steps
    took_s: float

    def problems(self) -> list[str]:
        """What is not as it must be, a line each."""
        before, after = self.before, self.after
        found = [f"a stream failed: {error}" for error in self.called.errors]
        found += [f"the books: {violation}" for violation in after.violations]
        if after.accounts != before.accounts:
            found.append(f"the accounts were {before.accounts} and are {after.accounts}")
        if after.descriptors > before.descriptors:
            found.append(f"{before.descriptors} file descriptors were open, and {after.descriptors} are")
        found += [f"{more} tasks more: {name}" for name, more in (after.tasks - before.tasks).items()]
        new = after.objects - before.objects
        found += [f"{more} objects more: {name}" for name, more in new.items() if more > MAX_NEW_OBJECTS]
        found += [
            f"the memory of the {name} grows by {line.growth / MIB:.1f} MiB"
            for name, line in self.memory.items()
            if not line.is_quiet(self.plan.quiet)
        ]
        return found


async def measure(plan: Plan, folder: Path) -> Findings:
    """folder: where the gateway may write its log."""
    settings = {
        "cluster.launcher": "process",
        "server.port": 0,
        "metrics.port": "none",
        "cache.max_running": plan.max_running,
        "cache.memory_mib": 1024,
        "speculation.policy": "fixed",
        "speculation.gamma": plan.gamma,
        "logs.slow_step_ms": 60_000.0,
    }
    deployment = Deployment(load_settings(None, settings))
    try:
        await deployment.start(lambda rank, stage, done, total: None)
        async with (
            OutriderClient(deployment.address) as client,
            gateway(deployment.address, folder) as (port, gateway_pid),
        ):
            # A first burst, so that what is made once is there.
            async with callers(port, 16, plan.max_tokens) as end:
                await asyncio.sleep(2.0)
                await end()
            before = await stand(deployment, client)
            pids = {"server": os.getpid(), "rank": deployment.supervisor.launched[0].pid, "gateway": gateway_pid}
            async with callers(port, plan.streams, plan.max_tokens) as end:
                await asyncio.sleep(plan.warm_up_s)
                first, began_s = deployment.statistics(), time.monotonic()
                memory = await watch_memory(pids, plan.seconds)
                steps, took_s = Steps.between(first, deployment.statistics()), time.monotonic() - began_s
                del first  # what is kept here would be found there
                called = await end()
            after = await stand(deployment, client)
    finally:
        await deployment.stop(0)
    return Findings(plan=plan, called=called, before=before, after=after, memory=memory, steps=steps, took_s=took_s)


async def stand(deployment: Deployment, client: OutriderClient) -> Standing:
    """Once nothing runs any more; raises TimeoutError where something still does."""
    status = await client.get_status()
    report = await client.check_integrity()
    async with asyncio.timeout(60):
        while (now := deployment.statistics()).running or now.waiting:
            await asyncio.sleep(0.05)
        # Calls end a moment after their requests, and the gateway asks for health and load now and then.
        while any(map(is_call, asyncio.all_tasks())):
            await asyncio.sleep(0.01)
    gc.collect()
    return Standing(
        accounts=MemoryUse.of(status),
        descriptors=len(os.listdir("/proc/self/fd")),
        tasks=Counter(map(name_of, asyncio.all_tasks())),
        objects=Counter(
            f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, gc.get_objects()) if is_ours(kind)
        ),
        violations=(*report.violations, *deployment.check_books()),
    )


def is_call(task: asyncio.Task[Any]) -> bool:
    """One that gRPC has made for a call of a client."""
    return name_of(task) == "_schedule_rpc_coro"


def name_of(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task))


def is_ours(kind: type) -> bool:
    # Some classes of libraries have another thing than a name there.
    return str(kind.__module__).partition(".")[0] in ("runtime", "workers", "state", "parallel")


async def watch_memory(pids: dict[str, int], seconds: float) -> dict[str, Line]:
    times: list[float] = []
    samples: dict[str, list[int]] = {name: [] for name in pids}
    end_s = time.monotonic() + seconds
    while (now_s := time.monotonic()) < end_s:
        times.append(now_s)
        for name, pid in pids.items():
            samples[name].append(resident_bytes(pid))
        await asyncio.sleep(min(1.0, seconds / 10))
    return {name: line_of(times, sizes) for name, sizes in samples.items()}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def line_of(times: Sequence[float], sizes: Sequence[int]) -> Line:
    """Least squares through the least sample of each stretch: what a step takes and gives back comes on top of what
    stays. The error takes stretches for independent, which makes it small: growth has a bound of its own."""
    each = max(1, len(times) // STRETCHES)
    times = times[: len(times) // each * each : each]
    sizes = [min(sizes[first : first + each]) for first in range(0, len(times) * each, each)]
    slope, cut = statistics.linear_regression(times, sizes)
    length = times[-1] - times[0]
    rest = sum((size - cut - slope * at) ** 2 for at, size in zip(times, sizes, strict=True))
    spread = sum((at - statistics.fmean(times)) ** 2 for at in times)
    error = math.sqrt(rest / max(1, len(times) - 2) / spread)
    return Line(mean=statistics.fmean(sizes), growth=slope * length, error=error * length)


@contextlib.asynccontextmanager
async def gateway(address: str, folder: Path) -> AsyncIterator[tuple[int, int]]:
    """smg on free ports; the one where it is reached, and its process."""
    port, metrics_port = free_port(), free_port()
    with (folder / "smg.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "smg"),
            *("launch", "--worker-urls", f"grpc://{address}", "--policy", "round_robin", "--log-level", "warn"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            stdout=log,
            stderr=log,
        )
    try:
        await until_listed(f"http://127.0.0.1:{port}/v1")
        yield port, process.pid
    finally:
        process.kill()
        await process.wait()


async def until_listed(url: str) -> None:
    """Waits until the gateway has found the model."""

    def is_listed() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=5) as reply:
            return bool(json.load(reply)["data"])
        return False

    async with asyncio.timeout(30):
        while not await asyncio.to_thread(is_listed):
            await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.asynccontextmanager
async def callers(port: int, streams: int, max_tokens: int) -> AsyncIterator[Callable[[], Awaitable[Called]]]:
    """Callers at work in a process of their own; what is handed out has them finish, and tells what they had."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(str(CALLERS), "127.0.0.1", str(port), str(streams), str(max_tokens)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def end() -> Called:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        told = await process.stdout.read()
        await process.wait()
        return Called(**json.loads(told))

    try:
        await process.stdout.readline()  # they have begun
        yield end
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def report(found: Findings) -> Table:
    """Figures of the measured time."""
    steps, called = found.steps, found.called
    num_steps = max(1, steps.steps)
    table = Table(title=f"{found.plan.streams} streams through smg for {found.took_s:.0f} s", show_header=False)
    rows = [
        ("streams that ended, that were left, that failed", f"{called.ended}, {called.left}, {len(called.errors)}"),
        ("tokens per second", f"{steps.emitted / found.took_s:.0f}"),
        ("steps, sequences in one", f"{steps.steps}, {steps.rounds / num_steps:.0f}"),
        ("step, mean", ms(steps.step_s / num_steps)),
        ("engine overhead per step, mean", ms(steps.overhead_s / num_steps)),
        *((f"engine overhead per step, p{q}", ms(quantile(q / 100, steps.overheads))) for q in (50, 90, 99)),
        *((f"first chunk at the client, p{q}", ms(exact(q / 100, called.first_s))) for q in (50, 99)),
        *((f"between chunks at the client, p{q}", ms(exact(q / 100, called.gap_s))) for q in (50, 99)),
    ]
    for name, line in found.memory.items():
        grows = f"{line.growth / MIB:+.2f} ± {line.error / MIB:.2f} MiB over it"
        rows.append((f"memory of the {name}", f"{line.mean / MIB:.1f} MiB, {grows}"))
    rows.append(("file descriptors, tasks", f"{found.after.descriptors}, {found.after.tasks.total()}, as before"))
    for row in rows:
        table.add_row(*row)
    return table


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def quantile(share: float, counts: Sequence[int]) -> float:
    """Of a histogram, evenly within a bucket, as Prometheus takes it; the last bound for what lies above."""
    wanted, below, low = share * sum(counts), 0, 0.0
    for bound, count in zip(OVERHEAD_BOUNDS_S, counts, strict=False):
        if count and below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return OVERHEAD_BOUNDS_S[-1]


def exact(share: float, values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Plan()
    parser.add_argument("--streams", type=int, default=usual.streams, help="at once")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="that are measured")
    parser.add_argument("--warm-up", type=float, default=usual.warm_up_s, help="seconds of load before them")
    parser.add_argument("--gamma", type=int, default=usual.gamma, help="draft length")
    args = parser.parse_args()
    plan = Plan(streams=args.streams, seconds=args.seconds, warm_up_s=args.warm_up, gamma=args.gamma)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(plan, Path(folder)))
    out = Console(width=120)
    out.print(report(found))
    for problem in found.problems():
        out.print(problem, highlight=False)
    sys.exit(bool(found.problems()))


if __name__ == "__main__":
    main()
