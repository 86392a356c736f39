"""Where a step's time goes inside a rank: py-spy's samples of the worker under load, by phase and by function of ours.

py-spy is not among our packages: `pip install py-spy`; the kernel may want root for it. It samples the threads that are
busy. A sample counts for the deepest frame that is ours, so that what torch does is told under the function that asked
for it, and for the phase of the step whose code is on the stack.

    python docs/benchmarks/profile_step.py [--streams 16] [--gamma 4] [--seconds 15] [--py-spy py-spy]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.load import demo_checkpoint, load_settings
from runtime.bench.completion import complete, generate_request
from runtime.front.client import OutriderClient
from runtime.serve import Deployment

OURS = re.compile(r"^([\w.<>]+) \((?:.*/)?((?:workers|state|parallel)/[\w/]+\.py):(\d+)\)$")
STEP = "workers/step.py:Worker._execute"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--gamma", type=int, default=4, help="0 is off")
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96, help="per request")
    parser.add_argument("--py-spy", default="py-spy", metavar="PROGRAM")
    parser.add_argument("--top", type=int, default=24, help="rows of the table by function")
    args = parser.parse_args()
    settings = {
        "cluster.launcher": "process",
        "server.port": 0,
        "metrics.port": "none",
        "cache.max_running": args.streams,
    }
    deployment = Deployment(load_settings(None, settings))
    try:
        await deployment.start(lambda rank, stage, done, total: None)
        async with OutriderClient(deployment.address) as client:
            await client.set_policy(args.gamma or None)
            load = [asyncio.create_task(stream(client, index, args.tokens)) for index in range(args.streams)]
            stacks = await record(args.py_spy, pid_of(deployment), args.seconds)
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    finally:
        await deployment.stop(0)
    report(stacks, args)


async def stream(client: OutriderClient, first: int, tokens: int) -> None:
    lines = (demo_checkpoint() / "heldout.jsonl").read_text().splitlines()
    for index in range(first, 10**9):
        prompt = json.loads(lines[index * 7 % len(lines)])["prompt"]
        await complete(client, generate_request(prompt, tokens, report_rounds=False))


def pid_of(deployment: Deployment) -> int:
    """The launcher names a child process after its pid."""
    (name,) = (launched.name for launched in deployment.supervisor.launched)
    return int(re.findall(r"\d+", name)[-1])


async def record(program: str, pid: int, seconds: int) -> dict[str, int]:
    """Samples by stack, the outermost frame first."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks.txt"
        spy = await asyncio.create_subprocess_exec(
            *(program, "record", "--pid", str(pid), "--duration", str(seconds), "--rate", "200"),
            *("--format", "raw", "--output", str(out)),
            stdout=asyncio.subprocess.DEVNULL,
        )
        if await spy.wait():
            raise SystemExit("py-spy failed; its words are above")
        lines = [line.rpartition(" ") for line in out.read_text().splitlines()]
    return {stack: int(count) for stack, _, count in lines}


def frames_of(stack: str) -> Iterator[tuple[str, str, str]]:
    """Function, file and line of the frames that are ours, the outermost first."""
    for frame in stack.split(";"):
        if found := OURS.match(frame.strip()):
            yield found[1], found[2], found[3]


def report(stacks: dict[str, int], args: argparse.Namespace) -> None:
    phases: collections.Counter[str] = collections.Counter()
    functions: collections.Counter[str] = collections.Counter()
    for stack, count in stacks.items():
        frames = list(frames_of(stack))
        phase = phase_of(frames)
        if phase is not None:
            phases[phase] += count
            name, file, _ = frames[-1]
            functions[f"{file}:{name}"] += count
    total = phases.total()
    out = Console(width=120)
    title = f"{args.streams} streams, {f'γ={args.gamma}' if args.gamma else 'off'}; {total} samples in steps"
    for what, counts in (("phase", phases), ("deepest function of ours", functions)):
        table = Table(title=title)
        table.add_column(what)
        table.add_column("share", justify="right")
        for name, count in counts.most_common(args.top):
            table.add_row(name, f"{count / total:.1%}")
        out.print(table)


def phase_of(frames: list[tuple[str, str, str]]) -> str | None:
    """What the step was doing: the function of ours that its own code had called; None outside a step."""
    names = [f"{file}:{name}" for name, file, _ in frames]
    if STEP not in names:
        return None
    inside = [name for name in names[names.index(STEP) + 1 :] if not name.startswith("workers/step.py:Worker._draft")]
    return inside[0] if inside else STEP


if __name__ == "__main__":
    asyncio.run(main())
