"""What a switch from off to γ costs: acceptance in the first rounds, against streams that speculated all along.

While speculation is off the drafter does not run; the last `speculation.hidden_window` hidden states of the target wait
for it. After a switch it knows these and what follows, and its attention skips what lies before, so that it guesses
worse until it has seen enough. Both kinds of streams say the same tokens (greedy decoding, the bundled model); a round
is compared with the rounds of the other kind that begin within the same stretch of output.

    python docs/benchmarks/switching.py [--gamma 4] [--before 64] [--after 160] [--streams 16] [--batches 6]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.load import demo_checkpoint, load_settings
from runtime.bench.completion import complete, generate_request, rounds_of
from runtime.front.client import OutriderClient
from runtime.request import Round
from runtime.serve import Deployment

STRETCH = 8
"""Output tokens per row of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """One round that drafted: the output position it began at, and how many of its drafts stood."""

    position: int
    accepted: int


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--before", type=int, default=64, help="tokens of plain decoding before the switch")
    parser.add_argument("--after", type=int, default=160, help="tokens after it")
    parser.add_argument("--streams", type=int, default=16, help="streams at once")
    parser.add_argument("--batches", type=int, default=6, help="how often")
    args = parser.parse_args()
    lines = (demo_checkpoint() / "heldout.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: args.streams * args.batches]]
    settings = {
        "cluster.launcher": "process",
        "server.port": 0,
        "metrics.port": "none",
        "cache.max_running": args.streams,
    }
    deployment = Deployment(load_settings(None, settings))
    steady: list[list[Drafted]] = []
    switched: list[list[Drafted]] = []
    try:
        await deployment.start(lambda rank, stage, done, total: None)
        async with OutriderClient(deployment.address) as client:
            for first in track(range(0, len(prompts), args.streams), "measuring"):
                batch = prompts[first : first + args.streams]
                steady += await speculating_throughout(client, batch, args)
                switched += await switched_on(client, batch, args)
    finally:
        await deployment.stop(0)
    report(steady, switched, args)


async def speculating_throughout(
    client: OutriderClient, prompts: Sequence[str], args: argparse.Namespace
) -> list[list[Drafted]]:
    await client.set_policy(args.gamma)
    requests = [generate_request(prompt, args.before + args.after) for prompt in prompts]
    return [list(drafted(done.rounds)) for done in await asyncio.gather(*(complete(client, r) for r in requests))]


async def switched_on(client: OutriderClient, prompts: Sequence[str], args: argparse.Namespace) -> list[list[Drafted]]:
    """All streams decode plainly; when the last of them has `before` tokens speculation starts for all."""
    await client.set_policy(None)
    arrived = asyncio.Barrier(len(prompts) + 1)

    async def stream(prompt: str) -> list[Drafted]:
        rounds: list[Round] = []
        is_there, num_tokens = False, 0
        async for frame in client.generate(generate_request(prompt, args.before + args.after)):
            rounds += rounds_of(frame)
            num_tokens += len(frame.token_ids)
            if num_tokens >= args.before and not is_there:
                is_there = True
                waiting.append(asyncio.create_task(arrived.wait()))
        return list(drafted(rounds))

    waiting: list[asyncio.Task[int]] = []
    streams = [asyncio.create_task(stream(prompt)) for prompt in prompts]
    await arrived.wait()
    await client.set_policy(args.gamma)
    return await asyncio.gather(*streams)


def drafted(rounds: Sequence[Round]) -> Iterator[Drafted]:
    position = 0
    for one in rounds:
        # A round that the end of the stream cut short says nothing of the drafts behind the cut.
        if one.drafted and len(one.emitted) == one.accepted + 1:
            yield Drafted(position=position, accepted=one.accepted)
        position += len(one.emitted)


def report(steady: list[list[Drafted]], switched: list[list[Drafted]], args: argparse.Namespace) -> None:
    table = Table(title=f"off to γ={args.gamma}: tokens per pass and acceptance of the first draft, ± standard error")
    for column in ("tokens after the switch", "rounds", "steady", "switched", "ratio", "1st, steady", "1st, switched"):
        table.add_column(column, justify="right")
    # Streams are switched in the same step, each at its own position; its first round that drafted tells which.
    starts = [rounds[0].position for rounds in switched if rounds]
    for stretch in range(0, args.after - STRETCH, STRETCH):
        after, always = [], []
        for start, late, early in zip(starts, switched, steady, strict=True):
            low, high = start + stretch, start + stretch + STRETCH
            after += [one.accepted for one in late if low <= one.position < high]
            always += [one.accepted for one in early if low <= one.position < high]
        if not after or not always:
            break
        table.add_row(
            f"{stretch}..{stretch + STRETCH - 1}",
            str(len(after)),
            mean_of([1.0 + n for n in always]),
            mean_of([1.0 + n for n in after]),
            f"{(1 + sum(after) / len(after)) / (1 + sum(always) / len(always)):.3f}",
            mean_of([float(n >= 1) for n in always]),
            mean_of([float(n >= 1) for n in after]),
        )
    Console(width=140).print(table)


def mean_of(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1) / len(values))
    return f"{mean:.2f} ± {spread:.2f}"


if __name__ == "__main__":
    asyncio.run(main())
