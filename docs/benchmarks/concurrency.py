"""Tokens per second by policy and concurrency on the bundled model, over gRPC, and where the time of a step goes.

One deployment serves all: policies are switched live and the repeats of all cells are interleaved, so that a noisy
moment hits none of them alone. Greedy decoding of held-out prompts, end-of-sequence ignored, default numerics.

    python docs/benchmarks/concurrency.py [--tokens 64] [--repeats 3] [--concurrency 1 4 16] [--gamma 1 2 4]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.load import demo_checkpoint, load_settings
from outrider.v1 import inference_pb2, types_pb2
from runtime.front.client import OutriderClient
from runtime.serve import Deployment
from runtime.statistics import EngineStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One repeat of one policy at one concurrency. Milliseconds are per step."""

    tokens_per_s: float
    tokens_per_pass: float
    step_ms: float
    target_ms: float
    draft_ms: float
    other_ms: float
    host_ms: float


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    lines = (demo_checkpoint() / "heldout.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: max(args.concurrency)]]
    settings = {
        "cluster.launcher": "process",
        "server.port": 0,
        "cache.max_model_len": 512,
        "cache.max_running": max(args.concurrency),
    }
    deployment = Deployment(load_settings(None, settings))
    try:
        await deployment.start(lambda rank, stage, done, total: None)
        async with OutriderClient(deployment.address) as client:
            cells = list(itertools.product([None, *args.gamma], args.concurrency))
            found: dict[tuple[int | None, int], list[Cell]] = {cell: [] for cell in cells}
            await measure(deployment, client, prompts, None, max(args.concurrency), args.tokens)
            for _, cell in track(list(itertools.product(range(args.repeats), cells)), description="measuring"):
                found[cell].append(await measure(deployment, client, prompts, *cell, args.tokens))
    finally:
        await deployment.stop(0)
    Console(width=110).print(table(found))


async def measure(
    deployment: Deployment, client: OutriderClient, prompts: list[str], gamma: int | None, concurrency: int, tokens: int
) -> Cell:
    await client.set_policy(gamma)
    before = deployment.statistics()
    began = time.perf_counter()
    await asyncio.gather(*(stream(client, prompt, tokens) for prompt in prompts[:concurrency]))
    return cell(before, deployment.statistics(), concurrency * tokens, time.perf_counter() - began)


async def stream(client: OutriderClient, prompt: str, tokens: int) -> None:
    stopping = types_pb2.Stopping(max_tokens=tokens, ignore_eos=True)
    sampling = types_pb2.Sampling(temperature=0)
    async for _ in client.generate(inference_pb2.GenerateRequest(text=prompt, sampling=sampling, stopping=stopping)):
        pass


def cell(before: EngineStatistics, after: EngineStatistics, tokens: int, seconds: float) -> Cell:
    steps = after.steps - before.steps

    def per_step(name: str) -> float:
        return (getattr(after.timings, name) - getattr(before.timings, name)) / steps * 1e3

    return Cell(
        tokens_per_s=tokens / seconds,
        tokens_per_pass=(after.emitted - before.emitted) / (after.rounds - before.rounds),
        step_ms=seconds / steps * 1e3,
        target_ms=per_step("target_s"),
        draft_ms=per_step("draft_s"),
        other_ms=per_step("verify_s") + per_step("commit_s"),
        host_ms=seconds / steps * 1e3 - per_step("total_s"),
    )


def table(found: dict[tuple[int | None, int], list[Cell]]) -> Table:
    out = Table(title="medians of repeats; ms per step; ratio against off at the same concurrency")
    for column in (
        "policy",
        "streams",
        "tokens/s",
        "ratio",
        "tokens/pass",
        "step",
        "target",
        "draft",
        "verify+commit",
        "rest",
    ):
        out.add_column(column, justify="left" if column == "policy" else "right")
    for (gamma, concurrency), cells in found.items():

        def median(name: str, cells: list[Cell] = cells) -> float:
            return statistics.median(getattr(c, name) for c in cells)

        ratio = median("tokens_per_s") / statistics.median(c.tokens_per_s for c in found[None, concurrency])
        figures = [median(name) for name in ("step_ms", "target_ms", "draft_ms", "other_ms", "host_ms")]
        out.add_row(
            "off" if gamma is None else f"γ={gamma}",
            str(concurrency),
            f"{median('tokens_per_s'):.0f}",
            f"{ratio:.2f}",
            f"{median('tokens_per_pass'):.2f}",
            *(f"{figure:.1f}" for figure in figures),
        )
    return out


if __name__ == "__main__":
    asyncio.run(main())
