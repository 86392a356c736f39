"""`outrider simulate`: options, progress, and what becomes of the figures. Knows no figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.load import SettingsError
from configs.schema import GAMMA_LIMIT
from runtime.cli.bench_files import Outputs, write_file
from runtime.cli.console import ERR, EXIT_NO, EXIT_USAGE, OUT, fail, guarded, run, show

if TYPE_CHECKING:
    from runtime.simulate.acceptance import Acceptance
    from runtime.simulate.deployment import Deployment
    from runtime.simulate.study import Study
    from runtime.simulate.traffic import Lengths, Traffic

MAX_SEQUENCES = 4096
MAX_STEP_TOKENS = 8192


def simulate(
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A measured hardware profile, instead of a GPU and a model.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="h100, h200, b200 or gb300: costs by formula.")] = None,
    geometry: Annotated[str | None, typer.Option(help="deepseek-v3, qwen3-next or demo; with --gpu.")] = None,
    dp: Annotated[
        int | None, typer.Option(min=1, help="Data-parallel ranks.", show_default="1, or the profile's")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; with --gpu.")] = 1,
    ep: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks with whole experts: dp x tp, or 1; with --gpu.", show_default="dp x tp"),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any figure of the GPU, the model or the formulas; may be repeated."
        ),
    ] = None,
    pad_rows: Annotated[
        int,
        typer.Option(
            min=0, max=65536, help="With --gpu: passes are padded to multiples of this many rows; 0 for none."
        ),
    ] = 0,
    sequences: Annotated[
        str,
        typer.Option(metavar="N[,N...]", help="Sequences per data-parallel rank; with a rate, at most."),
    ] = "16,60",
    open_rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R...]", help="Open loop: requests per second in all, Poisson.", show_default=False),
    ] = None,
    context: Annotated[
        int,
        typer.Option(min=0, max=2**31, help="Tokens that sequences come with, computed elsewhere; theirs come on top."),
    ] = 4096,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N[-N]", help="Prompt tokens that the ranks compute; a range is drawn from evenly.")
    ] = "1",
    output_tokens: Annotated[str, typer.Option(metavar="N[-N]", help="Tokens per sequence.")] = "256",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P[,P...]",
            help="off, fixed:N, dynamic; may be repeated.",
            show_default="off,fixed:1,...,fixed:5,dynamic",
        ),
    ] = None,
    gamma_max: Annotated[int, typer.Option(min=1, max=GAMMA_LIMIT, help="Longest draft.")] = 5,
    acceptance: Annotated[
        str,
        typer.Option(metavar="A[,A...]", help="Share of first, second, ... drafts that stand behind those before."),
    ] = "0.8",
    decay: Annotated[
        float, typer.Option(help="Each draft beyond those named stands this much more rarely, as a share.")
    ] = 1.0,
    concentration: Annotated[
        float, typer.Option(help="How little chances of drafts scatter; inf makes all of a sequence's alike.")
    ] = 8.0,
    spread: Annotated[float, typer.Option(min=0, max=1, help="How far apart sequences lie; 0 makes all alike.")] = 0.5,
    score_noise: Annotated[
        float, typer.Option(min=0, max=100, help="How far a drafter's score is off the log-odds, standard deviation.")
    ] = 0.5,
    temperature: Annotated[float, typer.Option(min=0, help="Of all requests; 0 is greedy.")] = 1.0,
    noise: Annotated[float, typer.Option(min=0, max=1, help="Scatter of a step's time, of its logarithm.")] = 0.0,
    imbalance: Annotated[
        float, typer.Option(min=1, max=1000, help="Factor on every step, for what the costs leave out.")
    ] = 1.0,
    max_step_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="Most rows of a rank's pass.", show_default="8192, or the profile's"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a cell that count.", show_default="400 to 8000, by the load")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of a cell before them.")] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Of lengths, arrivals and chances.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots; needs outrider[bench].")
    ] = None,
) -> None:
    """Simulate policies on a deployment that is not there: the real planner, admission and scheduler in virtual time.

    Costs of steps come from a measured profile or, for a GPU and a model by name, from formulas; drafts stand by
    chance.
    """
    if (profile is None) == (gpu is None):
        fail("give either --profile FILE, or --gpu and --geometry", EXIT_USAGE)
    if gpu is not None and geometry is None:
        fail("--gpu goes with --geometry; name one, as in --geometry deepseek-v3", EXIT_USAGE)
    if profile is not None and (geometry is not None or tp != 1 or ep is not None or assignments or pad_rows):
        fail("--geometry, --tp, --ep, --set and --pad-rows go with --gpu; a profile has its own", EXIT_USAGE)
    with guarded():
        from runtime.bench.load import parse_policies
        from runtime.simulate.loop import Scenario
        from runtime.simulate.study import Study

        outputs = Outputs(json=json_file, html=html_file)
        outputs.check()
        rows = max_step_tokens or MAX_STEP_TOKENS
        if profile is not None:
            deployment = _measured(profile)
            rows = max_step_tokens or deployment.max_step_tokens or rows
        else:
            mesh = (dp or 1, tp, (dp or 1) * tp if ep is None else ep)
            tiers = tuple(range(pad_rows, rows + pad_rows, pad_rows)) if pad_rows else ()
            deployment = _by_formula(gpu, geometry, mesh, tiers, assignments or [], gamma_max=gamma_max)
        longest = min(gamma_max, deployment.gamma_max)
        policies = parse_policies(policy or ["off", *(f"fixed:{n}" for n in range(1, longest + 1)), "dynamic"])
        _check_limits([one.least_gamma_max for one in policies], longest, rows)
        loads = _loads(sequences, open_rate, prompt_tokens, output_tokens, temperature)
        base = Scenario(
            believed=deployment.costs,
            true=deployment.costs,
            dp=dp or deployment.dp,
            traffic=loads[0],
            acceptance=_acceptance(acceptance, decay, concentration, spread, score_noise),
            gamma_max=longest,
            max_step_tokens=rows,
            noise=noise,
            imbalance=imbalance,
            warmup=warmup,
            seed=seed,
        )
        study = Study(
            deployment=deployment, base=base, loads=loads, policies=tuple(policies), context=context, steps=steps
        )
    run(_simulate(study, outputs))


def _measured(path: Path) -> Deployment:
    from runtime.simulate.deployment import measured

    return measured(path)


def _by_formula(
    gpu: str | None,
    geometry: str | None,
    mesh: tuple[int, int, int],
    tiers: tuple[int, ...],
    assignments: list[str],
    *,
    gamma_max: int,
) -> Deployment:
    """mesh: dp, tp, ep. Raises SettingsError."""
    from runtime.simulate.deployment import by_formula

    assert gpu is not None
    assert geometry is not None
    dp, tp, ep = mesh
    return by_formula(
        gpu=gpu, geometry=geometry, dp=dp, tp=tp, ep=ep, gamma_max=gamma_max, tiers=tiers, changes=assignments
    )


def _check_limits(needed: list[int], longest: int, rows: int) -> None:
    """needed: draft lengths that policies take. Raises SettingsError."""
    if max(needed) > longest:
        raise SettingsError(f"--policy: one drafts {max(needed)}, and {longest} is the most here; raise --gamma-max")
    if rows < longest + 2:
        raise SettingsError(f"--max-step-tokens {rows}: verifying {longest} drafts takes {longest + 2}; raise it")


def _acceptance(rates: str, decay: float, concentration: float, spread: float, score_noise: float) -> Acceptance:
    """Raises SettingsError, which names the flag."""
    from runtime.simulate.acceptance import Acceptance

    try:
        return Acceptance(
            rates=tuple(_numbers("--acceptance", rates)),
            decay=decay,
            concentration=None if concentration == math.inf else concentration,
            spread=spread,
            score_noise=score_noise,
        )
    except ValueError as error:
        raise SettingsError("--" + str(error).replace("_", "-", 1)) from None


def _loads(sequences: str, rates: str | None, prompt: str, output: str, temperature: float) -> tuple[Traffic, ...]:
    """Raises SettingsError, which names the flag."""
    from runtime.bench.load import parse_rates
    from runtime.simulate.traffic import Traffic

    counts = [int(number) for number in _numbers("--sequences", sequences) if number.is_integer()]
    if len(counts) != sequences.count(",") + 1 or not all(1 <= count <= MAX_SEQUENCES for count in counts):
        raise SettingsError(f"--sequences {sequences!r}: give whole numbers from 1 to {MAX_SEQUENCES}, as in 16,60")
    lengths = _lengths("--prompt-tokens", prompt), _lengths("--output-tokens", output)
    arriving = [None] if rates is None else [one.rate for one in parse_rates([rates], option="--open-rate")]
    try:
        return tuple(
            Traffic(sequences=count, rate=rate, prompt=lengths[0], output=lengths[1], temperature=temperature)
            for count in dict.fromkeys(counts)
            for rate in arriving
        )
    except ValueError as error:
        raise SettingsError("--" + str(error).replace("_", "-", 1)) from None


def _lengths(option: str, text: str) -> Lengths:
    """N or N-N. Raises SettingsError."""
    from runtime.simulate.traffic import Lengths

    low, dash, high = text.partition("-")
    numbers = [low, high] if dash else [low, low]
    if not all(number.isascii() and number.isdecimal() and len(number) <= 9 for number in numbers):
        raise SettingsError(f"{option} {text!r}: give a number of tokens, or a range of them, as in 64-256")
    try:
        return Lengths(int(numbers[0]), int(numbers[1]))
    except ValueError as error:
        raise SettingsError(f"{option} {text!r}: {error}") from None


def _numbers(option: str, text: str) -> list[float]:
    """Numbers with commas between them. Raises SettingsError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(f"{option} {text!r}: give numbers with commas between them, as in 0.8,0.5") from None


async def _simulate(study: Study, outputs: Outputs) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from runtime.cli.startup import summary_panel
    from runtime.simulate.study import document, run_study
    from runtime.simulate.table import REMARKS, speed_table

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as bar:
        task = bar.add_task("", total=study.num_steps)
        cells = [
            cell
            async for cell in run_study(study, lambda text, done: bar.update(task, description=text, completed=done))
        ]
    OUT.print(summary_panel("simulation", study.facts))
    show(speed_table(cells))
    for line in (*REMARKS, *study.remarks):
        OUT.print(line, soft_wrap=True, markup=False)

    def as_json() -> str:
        return json.dumps(document(study, cells), indent=1, allow_nan=False) + "\n"

    def as_page() -> str:
        from runtime.simulate.page import page

        return page(study, cells)

    done = [write_file("--json", outputs.json, as_json), write_file("--html", outputs.html, as_page)]
    if not all(done):
        raise typer.Exit(EXIT_NO)
