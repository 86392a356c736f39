"""`outrider bench replay`: options, and what they ask for. Knows no figures."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from runtime.bench.asked import Asked
from runtime.bench.load import (
    Closed,
    Load,
    Open,
    Share,
    parse_acceptances,
    parse_concurrencies,
    parse_policies,
    parse_shares,
)
from runtime.cli.bench_files import Outputs
from runtime.cli.bench_options import (
    Address,
    Assignments,
    Checkpoint,
    Config,
    HtmlFile,
    JsonFile,
    Launcher,
    Prompts,
    check_server,
    own_settings,
)
from runtime.cli.bench_run import bench_run
from runtime.cli.console import EXIT_USAGE, fail, guarded, run
from runtime.cli.options import UINT32_MAX

POLICIES = ["off,fixed:1,fixed:2,fixed:3,fixed:4,fixed:5,dynamic"]
QUICK_POLICIES = ["off,fixed:2,fixed:5,dynamic"]
ACCEPTANCES, QUICK_ACCEPTANCES = ["own,0.3,0.6,0.9"], ["0.3,0.9"]
CONCURRENCIES, QUICK_CONCURRENCIES = ["1,4,16,64"], ["1,16"]
RATES = ["0.5x"]
REPEATS, QUICK_REPEATS = 5, 2
MAX_TOKENS, QUICK_MAX_TOKENS = 48, 24


def replay(
    checkpoint: Checkpoint = None,
    address: Address = None,
    config: Config = None,
    assignments: Assignments = None,
    launcher: Launcher = None,
    workload: Annotated[
        Literal["code", "json-schema", "chat"], typer.Option(help="As for bench; what code-edit asks, bench measures.")
    ] = "code",
    prompts: Prompts = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, max=UINT32_MAX, help="Tokens per completion.", show_default="48; 24 with --quick"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Requests per cell.",
            show_default="the load's concurrency, at least 8; of an open loop 16",
        ),
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]", help="Closed loop: clients at a time; may be repeated.", show_default="1,4,16,64"
        ),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="R[,R...]",
            help="Open loop: requests per second, Poisson; 0.5x is half of what plain decoding reaches, recording.",
            show_default="0.5x; none with --quick, or where --concurrency is given",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P[,P...]",
            help="off, fixed:N or dynamic, as for bench.",
            show_default="off, fixed:1 to fixed:5, dynamic",
        ),
    ] = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A[,A...]",
            help="Probabilities with which drafts of the oracle stand; own: the checkpoint's own drafts.",
            show_default="own,0.3,0.6,0.9",
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, max=10_000, help="As for bench.")] = 2,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Times that each cell is measured, in turns.", show_default="5"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of arrivals and of the oracle's drafts.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer of everything that is not given: minutes.")] = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Replay the same prompts under plain decoding, fixed drafts and dynamic, and say where dynamic keeps up.

    First the model's own greedy answers are recorded. Then they are decoded again under every policy and load: with
    the checkpoint's own drafts, and with an oracle's, which stand with a probability of your choice while the drafter's
    passes are still made and paid for, and verification is the real one. Ctrl-C keeps the cells that are done.
    """
    check_server(address, checkpoint, config, assignments, launcher)
    if prompts is not None and workload != "code":
        fail("--prompts takes the place of --workload; give one of them", EXIT_USAGE)
    with guarded():
        from runtime.bench.document import Limits

        outputs = Outputs(json=json_file, html=html_file)
        outputs.check()
        policies = parse_policies(policy or (QUICK_POLICIES if quick else POLICIES))
        acceptances = parse_acceptances(acceptance or (QUICK_ACCEPTANCES if quick else ACCEPTANCES))
        settings = None
        if address is None:
            flags = {"checkpoint": checkpoint, "launcher": launcher}
            oracle = any(one is not None for one in acceptances)
            settings = own_settings(config, assignments or [], flags, policies, oracle=oracle)
        asked = Asked(
            settings=settings,
            workload=workload,
            prompts=prompts,
            tokenizer=None,
            prompt_tokens=None,
            max_tokens=max_tokens or (QUICK_MAX_TOKENS if quick else MAX_TOKENS),
            ignore_eos=True,
            requests=requests,
            loads=tuple(_loads(concurrency, rate, acceptances, quick=quick)),
            policies=tuple(policies),
            warmup=warmup,
            repeats=repeats or (QUICK_REPEATS if quick else REPEATS),
            seed=seed,
            temperature=0.0,
            limits=Limits(first_token_ms=1000.0, token_gap_ms=50.0, request_ms=None),
            records=True,
            fits_load=True,
        )
    run(bench_run(asked, outputs, address))


def _loads(
    concurrency: list[str] | None, rate: list[str] | None, acceptances: list[float | None], *, quick: bool
) -> list[Load | Share]:
    """Each load once for each acceptance. Raises SettingsError."""
    if concurrency is None and rate is None:
        concurrency, rate = (QUICK_CONCURRENCIES, None) if quick else (CONCURRENCIES, RATES)
    plain = [*parse_concurrencies(concurrency or []), *parse_shares(rate or [])]
    return [_with(load, acceptance) for acceptance in acceptances for load in plain]


def _with(load: Load | Share, acceptance: float | None) -> Load | Share:
    match load:
        case Closed(concurrency=concurrency):
            return Closed(concurrency, acceptance)
        case Open(rate=rate):
            return Open(rate, acceptance)
        case Share(share=share):
            return Share(share, acceptance)
