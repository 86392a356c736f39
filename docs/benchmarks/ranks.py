"""What a step costs on one rank and on two: compute, collectives, dispatch and combine, links, host, expert imbalance.

One deployment per layout, started one after the other and measured in turns, so that a noisy moment hits none of them
alone. Greedy decoding of held-out prompts on the bundled model, over gRPC, end-of-sequence ignored, default numerics;
where a layout's text parts from that of one rank, the place and the logit gap are printed. Milliseconds per step; ranks
of one machine share its cores, so more ranks than cores only cost.

    python docs/benchmarks/ranks.py [--tokens 48] [--repeats 3] [--streams 1 16] [--gamma 0 2]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.load import load_settings
from parallel.mesh import Mesh
from runtime.bench.comparison import PolicyRun, first_difference
from runtime.bench.completion import Completion, complete, generate_request
from runtime.bench.workload import Prompt, heldout
from runtime.front.client import OutriderClient
from runtime.serve import Deployment
from runtime.statistics import EngineStatistics

LAYOUTS = (Mesh(), Mesh(tp=2), Mesh(tp=2, ep=2), Mesh(dp=2, ep=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One repeat. Milliseconds per step, of the slowest rank: compute is its time outside collectives, links the time
    from the plan's hand-over to its result beyond that rank's, host the engine's own. Dispatch and combine hold
    collectives too."""

    tokens_per_s: float
    step_ms: float
    compute_ms: float
    collective_ms: float
    dispatch_ms: float
    combine_ms: float
    link_ms: float
    host_ms: float
    imbalance: float


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--gamma", type=int, nargs="+", default=[0, 2])
    args = parser.parse_args()
    prompts = heldout()[: max(args.streams)]
    async with contextlib.AsyncExitStack() as stack:
        houses = {}
        for mesh in track(LAYOUTS, description="starting"):
            houses[mesh] = await start(stack, mesh, max(args.streams))
        cells = list(itertools.product(args.streams, args.gamma, LAYOUTS))
        found: dict[tuple[int, int, Mesh], list[Cell]] = {cell: [] for cell in cells}
        for mesh in LAYOUTS:
            await measure(*houses[mesh], prompts, max(args.streams), 0, args.tokens)
        for _, (streams, gamma, mesh) in track(list(itertools.product(range(args.repeats), cells)), "measuring"):
            found[streams, gamma, mesh].append(await measure(*houses[mesh], prompts, streams, gamma, args.tokens))
        texts = {mesh: await greedy_run(houses[mesh][1], prompts, args.tokens) for mesh in LAYOUTS}
    out = Console(width=140)
    out.print(table(found))
    for mesh in LAYOUTS[1:]:
        difference = first_difference(texts[LAYOUTS[0]], texts[mesh])
        told = "the same tokens as one rank" if difference is None else difference.explain("float32")
        out.print(f"{mesh}: {told}", highlight=False)


async def start(stack: contextlib.AsyncExitStack, mesh: Mesh, streams: int) -> tuple[Deployment, OutriderClient]:
    settings = {
        "cluster.launcher": "process",
        "server.port": 0,
        "metrics.port": "none",
        "cache.max_model_len": 512,
        "cache.max_running": streams,
        "parallel.tp": mesh.tp,
        "parallel.dp": mesh.dp,
        "parallel.ep": mesh.ep,
    }
    deployment = Deployment(load_settings(None, settings))
    stack.push_async_callback(deployment.stop, 0)
    await deployment.start(lambda rank, stage, done, total: None)
    return deployment, await stack.enter_async_context(OutriderClient(deployment.address))


async def measure(
    deployment: Deployment, client: OutriderClient, prompts: list[Prompt], streams: int, gamma: int, tokens: int
) -> Cell:
    await client.set_policy(gamma or None)
    before, began = deployment.statistics(), time.perf_counter()
    await complete_all(client, prompts[:streams], tokens, report_rounds=False)
    return cell(before, deployment.statistics(), streams * tokens, time.perf_counter() - began)


async def greedy_run(client: OutriderClient, prompts: list[Prompt], tokens: int) -> PolicyRun:
    """All prompts at once, with the logit gaps of their tokens."""
    await client.set_policy(None)
    return PolicyRun(policy="off", completions=tuple(await complete_all(client, prompts, tokens, report_rounds=True)))


async def complete_all(
    client: OutriderClient, prompts: list[Prompt], tokens: int, *, report_rounds: bool
) -> list[Completion]:
    requests = (generate_request(prompt.content, tokens, report_rounds=report_rounds) for prompt in prompts)
    return await asyncio.gather(*(complete(client, request) for request in requests))


def cell(before: EngineStatistics, after: EngineStatistics, tokens: int, seconds: float) -> Cell:
    steps = after.steps - before.steps

    def per_step(name: str) -> float:
        return (getattr(after.timings, name) - getattr(before.timings, name)) / steps * 1e3

    expert_steps = after.expert_steps - before.expert_steps
    imbalance = (after.expert_imbalance_sum - before.expert_imbalance_sum) / expert_steps if expert_steps else 1.0
    return Cell(
        tokens_per_s=tokens / seconds,
        step_ms=seconds / steps * 1e3,
        compute_ms=per_step("total_s") - per_step("collective_s"),
        collective_ms=per_step("collective_s"),
        dispatch_ms=per_step("dispatch_s"),
        combine_ms=per_step("combine_s"),
        link_ms=(after.execute_s - before.execute_s) / steps * 1e3 - per_step("total_s"),
        host_ms=(after.host_s - before.host_s) / steps * 1e3,
        imbalance=imbalance,
    )


def table(found: dict[tuple[int, int, Mesh], list[Cell]]) -> Table:
    out = Table(title="medians of repeats; ms per step; ratio of tokens/s against one rank, same streams and policy")
    columns = ("compute", "collectives", "dispatch", "combine", "link", "host")
    for column in ("streams", "policy", "layout", "tokens/s", "ratio", "step", *columns, "max/mean experts"):
        out.add_column(column, justify="left" if column in ("policy", "layout") else "right")
    for (streams, gamma, mesh), cells in found.items():

        def median(name: str, cells: list[Cell] = cells) -> float:
            return statistics.median(getattr(c, name) for c in cells)

        one = statistics.median(c.tokens_per_s for c in found[streams, gamma, LAYOUTS[0]])
        names = ("step_ms", "compute_ms", "collective_ms", "dispatch_ms", "combine_ms", "link_ms", "host_ms")
        out.add_row(
            str(streams),
            f"γ={gamma}" if gamma else "off",
            str(mesh),
            f"{median('tokens_per_s'):.0f}",
            f"{median('tokens_per_s') / one:.2f}",
            *(f"{median(name):.2f}" for name in names),
            f"{median('imbalance'):.2f}",
        )
    return out


if __name__ == "__main__":
    asyncio.run(main())
