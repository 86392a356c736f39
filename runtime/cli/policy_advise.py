"""`outrider policy advise`: what each draft length would bring on running servers, and which to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from configs.load import SettingsError
from runtime.cli.bench_files import Outputs, write_file
from runtime.cli.console import EXIT_NO, EXIT_USAGE, OUT, fail, run, show
from runtime.cli.options import DEFAULT_TIMEOUT_S, UINT32_MAX, Addresses, Timeout
from runtime.cli.phrases import by_position
from runtime.cli.replicas import answers_of, ask_once, finish, labelled, print_failures

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

MAX_SEQUENCES = 4096


def advise(
    addresses: Addresses,
    sequences: Annotated[
        int | None, typer.Option(min=1, max=MAX_SEQUENCES, help="Sequences to advise for; those that run if unset.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, max=UINT32_MAX, help="Their mean length in tokens; as they run if unset.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots; needs outrider[bench].")
    ] = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Say what each draft length would bring, by the hardware profile and the survival of drafts so far.

    Tokens are those committed per sequence and step: by the estimated survival of each position, and, beside it, by the
    geometric formula at one rate of acceptance.
    """
    try:
        Outputs(json=None, html=html).check()
    except SettingsError as error:
        fail(str(error), EXIT_USAGE)
    run(_advise(addresses, timeout_s, sequences, context, html))


async def _advise(
    addresses: list[str], timeout_s: float, sequences: int | None, context: int | None, html: Path | None
) -> None:
    outcomes = await ask_once(
        addresses, timeout_s, lambda client: client.advise(num_sequences=sequences, context=context)
    )
    for answer in answers_of(outcomes):
        OUT.print(labelled(answer.address, title_of(answer.value), len(outcomes)), markup=False, soft_wrap=True)
        show(advice_table(answer.value))
        OUT.print(answer.value.sentence, markup=False, soft_wrap=True)
    codes = [print_failures(outcomes)]
    advice = [(answer.address, title_of(answer.value), answer.value) for answer in answers_of(outcomes)]
    if html is not None and advice:

        def as_page() -> str:
            from runtime.bench.advice_page import page

            return page(advice)

        codes.append(0 if write_file("--html", html, as_page) else EXIT_NO)
    finish(*codes)


def title_of(reply: operator_pb2.AdvisePolicyResponse) -> str:
    """For which load, and what is known of the drafts."""
    return (
        f"{reply.num_sequences} sequences of {reply.context} tokens; acceptance {reply.acceptance:.2f}, survival by "
        f"position {by_position(reply.survival_by_position)}"
    )


def advice_table(reply: operator_pb2.AdvisePolicyResponse) -> Table:
    """A row per draft length; the best one is marked."""
    table = Table(box=None, pad_edge=False)
    for heading in ("gamma", "budget", "tokens", "geometric", "step ms", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for one in reply.advice:
        is_best = one.gamma == reply.best_gamma
        table.add_row(
            str(one.gamma),
            str(one.budget),
            f"{one.tokens:.2f}",
            f"{one.geometric_tokens:.2f}",
            f"{1000 * one.step_s:.2f}",
            f"{one.tokens_per_s:.1f}",
            "best" if is_best else "",
            style="bold" if is_best else None,
        )
    return table
