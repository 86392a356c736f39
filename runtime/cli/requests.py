"""`outrider requests` and `outrider abort`: the live requests of servers, and their end by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from runtime.cli.console import EXIT_REFUSED, EXIT_USAGE, OUT, complain, fail, natural_width, run, show, write
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Json, Timeout, checked_text
from runtime.cli.phrases import NONE, duration, optional, ratio, request_state
from runtime.cli.replicas import Answer, answers_of, ask_once, finish, json_of, labelled, print_failures

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

MAX_LISTED = 1000
"""As operator.proto says."""


def requests(
    addresses: Addresses,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MAX_LISTED, help="Most requests of each server; the server's if left out.")
    ] = None,
    as_json: Json = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List live requests: running ones in order of arrival, then waiting ones in the order they will be served.

    Output is tokens so far and at most; per pass: of them per pass of the target; accepted: of the tokens drafted.
    --json prints messages of operator.proto with the names used there; 64-bit numbers are strings in it.
    """
    run(_requests(addresses, limit, as_json, timeout_s))


async def _requests(addresses: list[str], limit: int | None, as_json: bool, timeout_s: float) -> None:
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.list_requests(limit))
    if as_json:
        write(json_of(outcomes))
    else:
        for answer in answers_of(outcomes):
            listed, total = len(answer.value.requests), answer.value.total
            number = f"{total} live" if listed == total else f"{listed} of {total} live"
            OUT.print(labelled(answer.address, number, len(outcomes)), markup=False, soft_wrap=True)
            if listed:
                show(requests_table(answer.value.requests, OUT.width if OUT.is_terminal else None))
    finish(print_failures(outcomes))


_FIGURES: tuple[tuple[str, Callable[[operator_pb2.RequestStatus], str]], ...] = (
    ("dp rank", lambda one: str(one.dp_rank) if one.HasField("dp_rank") else NONE),
    ("priority", lambda one: str(one.priority)),
    ("prompt", lambda one: str(one.usage.prompt_tokens)),
    ("output", lambda one: f"{one.usage.completion_tokens} / {one.max_tokens}"),
    ("per pass", lambda one: optional(ratio(one.usage.completion_tokens, one.usage.rounds), ".2f")),
    ("accepted", lambda one: optional(ratio(one.usage.accepted, one.usage.drafted), ".0%")),
    ("age", lambda one: duration(one.age_s)),
    ("waited", lambda one: duration(one.waited_s)),
)
_LEFT_OUT_FIRST = ("priority", "dp rank", "waited", "prompt", "accepted", "per pass", "output", "age")
"""Where the terminal is narrow. Ids stay whole: they are what `abort` takes."""


def requests_table(listed: Sequence[operator_pb2.RequestStatus], width: int | None) -> Table:
    """One row per request, and as many figures as fit into the width; None holds all of them."""
    for num_left_out in range(len(_LEFT_OUT_FIRST) + 1):
        figures = [figure for figure in _FIGURES if figure[0] not in _LEFT_OUT_FIRST[:num_left_out]]
        table = Table(box=None, pad_edge=False)
        table.add_column("request", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for heading, _ in figures:
            table.add_column(heading, justify="right", no_wrap=True)
        for one in listed:
            table.add_row(escape(one.request_id), request_state(one.state), *(say(one) for _, say in figures))
        if width is None or natural_width(table) <= width:
            break
    return table


def abort(
    request_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Requests, as `outrider requests` lists.")],
    addresses: Addresses,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """End requests by id; their streams end with ABORTED.

    Exit code 5 where an id is live on none of the servers.
    """
    ids = list(dict.fromkeys(checked_text(request_id, "a request id") for request_id in request_ids))
    if "" in ids:
        fail("a request id is empty; `outrider requests` lists those that are live", EXIT_USAGE)
    run(_abort(ids, addresses, timeout_s))


async def _abort(ids: list[str], addresses: list[str], timeout_s: float) -> None:
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.abort(ids))
    answers = answers_of(outcomes)
    unknown = False
    for request_id, places in places_of(ids, answers).items():
        if places:
            where = f" on {', '.join(places)}" if len(outcomes) > 1 else ""
            OUT.print(f"{request_id}: aborted{where}", markup=False, soft_wrap=True)
        elif answers:
            unknown = True
            among = " on any server that answered" if len(outcomes) > 1 else ""
            complain(f"{request_id}: not live{among}; it has ended, or never was")
    # A server that did not answer may have had what the others do not know.
    finish(print_failures(outcomes) or (EXIT_REFUSED if unknown else 0))


def places_of(ids: Sequence[str], answers: Sequence[Answer[operator_pb2.AbortResponse]]) -> dict[str, list[str]]:
    """Per id the addresses of the servers that ended it."""
    return {
        request_id: [answer.address for answer in answers if request_id in answer.value.aborted] for request_id in ids
    }
