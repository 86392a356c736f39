"""`outrider bench`: options, a server of its own or a running one, progress, and what becomes of the report. Knows no
figures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from runtime.bench.asked import Asked
from runtime.bench.extras import Variant, parse_variants
from runtime.bench.load import Load, parse_concurrencies, parse_policies, parse_rates
from runtime.bench.workload import Workload
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

DEFAULT_POLICIES = ["off", "fixed:2", "fixed:4"]
DEFAULT_CONCURRENCIES = ["1", "4", "16"]
MAX_TOKENS, MAX_TOKENS_OF_FILES = 48, 128
EDIT_EVERY = 16


def bench(
    checkpoint: Checkpoint = None,
    address: Address = None,
    config: Config = None,
    assignments: Assignments = None,
    launcher: Launcher = None,
    workload: Annotated[
        Workload,
        typer.Option(
            help="code: held-out text of the demo's corpus. random: random ids; drafts fail most with --temperature 1. "
            "code-edit: what is answered is recorded, edited, and sent along as a prediction. json-schema: answers "
            "must meet one of a few schemas. chat: conversations of several turns."
        ),
    ] = "code",
    prompts: Prompts = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="With --address and --workload random: directory of the served model's tokenizer."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, max=UINT32_MAX, help="Cut prompts to this; length of random ones (32).")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, max=UINT32_MAX, help="Tokens per completion.", show_default="48; 128 for code-edit and json-schema"
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="V[,V...]",
            help="Cells side by side: requests with or without the prediction and the constraint that prompts bring, "
            "and with+ngram or without+ngram.",
            show_default="with",
        ),
    ] = None,
    ngram: Annotated[
        bool, typer.Option("--ngram", help="Look for drafts in prompt and output too, in every variant.")
    ] = False,
    edit_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=UINT32_MAX,
            metavar="N",
            help="Of code-edit: a span of tokens is replaced, inserted, deleted or moved every N tokens on average; 0 "
            "edits nothing.",
            show_default="16",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Go on past the end of a sequence: equal lengths.")
    ] = True,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Requests per cell: the same prompts in each.",
            show_default="the largest concurrency, at least 8; of open loops alone 16",
        ),
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]", help="Closed loop: clients at a time; may be repeated.", show_default="1,4,16"
        ),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(metavar="R[,R...]", help="Open loop: requests per second, Poisson; may be repeated."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P[,P...]",
            help="off, fixed:N or dynamic, which takes bounds: dynamic:min=1:max=4:itl=30 (drafts per round, and ms "
            "between deliveries). May be repeated; others are compared with the first.",
            show_default="off,fixed:2,fixed:4",
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, help="Requests before a cell that do not count; a whole load before its first repeat."
        ),
    ] = 2,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Times that each cell is measured, in turns.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Of arrivals, random prompts, edits and sampling.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; outputs are compared then.")] = 0.0,
    ttft_limit_ms: Annotated[float | None, typer.Option(min=0, help="Longest time to first token in limits.")] = 1000.0,
    itl_limit_ms: Annotated[
        float | None, typer.Option(min=0, help="Largest mean gap between a request's tokens in limits.")
    ] = 50.0,
    latency_limit_ms: Annotated[float | None, typer.Option(min=0, help="Longest request in limits.")] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Measure speed and speculation by policy and load, on a server of its own or a running one.

    Cells (policy, load) are measured in turns, several times. Ctrl-C keeps the cells that are done. A cell in
    which ranks were lost is measured anew. Ends with 1 where a request failed or a file could not be written.
    """
    check_server(address, checkpoint, config, assignments, launcher)
    if tokenizer is not None and (address is None or workload != "random" or prompts is not None):
        fail("--tokenizer goes with --address and --workload random; leave it out", EXIT_USAGE)
    if prompts is not None and workload != "code":
        fail("--prompts takes the place of --workload; give one of them", EXIT_USAGE)
    edits = workload == "code-edit"
    if edit_every is not None and not edits:
        fail("--edit-every goes with --workload code-edit; leave it out", EXIT_USAGE)
    limits = {"--ttft-limit-ms": ttft_limit_ms, "--itl-limit-ms": itl_limit_ms, "--latency-limit-ms": latency_limit_ms}
    for option, value in {"--temperature": temperature, **limits}.items():
        if value is not None and not math.isfinite(value):
            fail(f"{option} {value}: give a number", EXIT_USAGE)
    with guarded():
        from runtime.bench.document import Limits

        outputs = Outputs(json=json_file, html=html_file)
        outputs.check()
        loads: list[Load] = [*parse_concurrencies(concurrency or []), *parse_rates(rate or [])]
        loads = _with_variants(loads or [*parse_concurrencies(DEFAULT_CONCURRENCIES)], variant, ngram=ngram)
        policies = parse_policies(policy or DEFAULT_POLICIES)
        settings = None
        if address is None:
            flags = {"checkpoint": checkpoint, "launcher": launcher}
            settings = own_settings(config, assignments or [], flags, policies)
        asked = Asked(
            settings=settings,
            workload=workload,
            prompts=prompts,
            tokenizer=tokenizer,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens or (MAX_TOKENS_OF_FILES if workload in ("code-edit", "json-schema") else MAX_TOKENS),
            ignore_eos=ignore_eos,
            requests=requests,
            loads=tuple(loads),
            policies=tuple(policies),
            warmup=warmup,
            repeats=repeats,
            seed=seed,
            temperature=temperature,
            limits=Limits(first_token_ms=ttft_limit_ms, token_gap_ms=itl_limit_ms, request_ms=latency_limit_ms),
            records=edits,
            edit_every=(EDIT_EVERY if edit_every is None else edit_every) if edits else None,
        )
    run(bench_run(asked, outputs, address))


def _with_variants(loads: list[Load], texts: list[str] | None, *, ngram: bool) -> list[Load]:
    """Each load once for each variant; as they are where none is asked for. Raises SettingsError."""
    if not (texts or ngram):
        return loads
    variants = parse_variants(texts or [str(Variant(brings=True))])
    wanted = dict.fromkeys(replace(one, ngram=True) if ngram else one for one in variants)
    return [replace(load, variant=one) for load in loads for one in wanted]
