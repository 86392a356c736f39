"""`outrider demo`: everything on this machine, one streamed completion, and speculation settings compared."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from configs.load import load_settings, settings_file
from runtime.bench.comparison import PolicyRun, first_difference
from runtime.bench.completion import complete, generate_request
from runtime.bench.workload import Prompt, heldout
from runtime.cli.console import OUT, guarded, run, write
from runtime.cli.options import UINT32_MAX
from runtime.cli.serve import StopSignals, first_of
from runtime.cli.startup import StartupProgress, accounting_table, model_line, summary_panel

if TYPE_CHECKING:
    from configs.schema import ServeSettings
    from runtime.front.client import OutriderClient
    from runtime.serve import Deployment

STREAMED_PROMPT = "def read_config(path):\n"
COMPARED_GAMMAS = (None, 2, 4)
"""None is policy off, the baseline; the others are fixed draft lengths."""


def demo(
    prompts: Annotated[int, typer.Option(min=1, max=256, help="Held-out prompts in the comparison.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=2, max=UINT32_MAX, help="Tokens per completion.")] = 96,
    launcher: Annotated[str, typer.Option(help="ray or process.")] = "ray",
) -> None:
    """Start Ray, a worker and the gRPC front here, stream a completion, compare off, γ=2 and γ=4."""
    with guarded():
        settings = load_settings(settings_file("demo"), {"cluster.launcher": launcher})
    run(_demo(settings, prompts, max_tokens))


async def _demo(settings: ServeSettings, num_prompts: int, max_tokens: int) -> None:
    import asyncio

    from runtime.serve import Deployment

    signals = StopSignals()
    deployment = Deployment(settings)
    try:
        await first_of(asyncio.create_task(_show(deployment, settings, num_prompts, max_tokens)), signals.asked)
    finally:
        await deployment.stop(0)


async def _show(deployment: Deployment, settings: ServeSettings, num_prompts: int, max_tokens: int) -> None:
    from runtime.front.client import OutriderClient

    began = time.perf_counter()
    with StartupProgress(settings.parallel) as progress:
        await deployment.start(progress)
    rows = [
        ("model", f"{settings.model.served_name}: {model_line(deployment.description)}"),
        *deployment.facts(),
        ("cold start", f"{time.perf_counter() - began:.1f} s, {deployment.description.load_s:.1f} s of it loading"),
    ]
    OUT.print(summary_panel("outrider demo", rows))
    OUT.print(accounting_table(deployment.ranks))
    async with OutriderClient(deployment.address) as client:
        OUT.print("\n[bold]one completion over gRPC[/], seeded, temperature 0.7")
        write(STREAMED_PROMPT)
        async for frame in client.generate(
            generate_request(STREAMED_PROMPT, max_tokens, report_rounds=False, temperature=0.7)
        ):
            write(frame.text)
        prompts = heldout()[:num_prompts]
        OUT.print(f"\n\n[bold]speculation compared[/]: {num_prompts} held-out prompts, {max_tokens} greedy tokens each")
        runs = [await _run_policy(client, gamma, prompts, max_tokens) for gamma in COMPARED_GAMMAS]
    OUT.print(comparison_table(runs))
    for line in difference_lines(runs, deployment.description.dtype):
        OUT.print(escape(line))
    OUT.print(
        "\nnext: [bold]outrider serve[/], and in another terminal "
        "[bold]outrider generate 'def main(' --address 127.0.0.1:50051[/]"
        "\n(in a clone, first: source .venv/bin/activate)"
    )


async def _run_policy(client: OutriderClient, gamma: int | None, prompts: list[Prompt], max_tokens: int) -> PolicyRun:
    """Switches the live policy, then completes the prompts one after the other."""
    await client.set_policy(gamma)
    requests = [generate_request(prompt.content, max_tokens, report_rounds=True) for prompt in prompts]
    completions = [await complete(client, request) for request in requests]
    return PolicyRun(policy="off" if gamma is None else f"γ={gamma}", completions=tuple(completions))


def comparison_table(runs: list[PolicyRun]) -> Table:
    """One row per policy; the first run is the baseline that outputs are compared with."""
    table = Table(box=None, pad_edge=False)
    for heading in ("policy", "tokens/s", "tokens per pass", "acceptance by position", "identical output"):
        table.add_column(heading, justify="left" if heading in ("policy", "identical output") else "right")
    for number, policy_run in enumerate(runs):
        per_pass = policy_run.tokens_per_pass
        table.add_row(
            policy_run.policy,
            f"{policy_run.tokens_per_s:.1f}",
            "–" if per_pass is None else f"{per_pass:.2f}",
            " ".join(f"{rate:.2f}" for rate in policy_run.acceptance_by_position) or "–",
            "baseline" if number == 0 else "no" if first_difference(runs[0], policy_run) else "yes",
        )
    return table


def difference_lines(runs: list[PolicyRun], dtype: str) -> list[str]:
    """One line per run whose output is not the first one's. dtype: that of weights and activations."""
    differences = [(other.policy, first_difference(runs[0], other)) for other in runs[1:]]
    return [f"{policy} differs at {found.explain(dtype)}" for policy, found in differences if found is not None]
