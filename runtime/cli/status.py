"""`outrider status`: what each server is, holds and has done, as panels or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from runtime.cli.console import run, show, write
from runtime.cli.options import DEFAULT_TIMEOUT_S, Addresses, Json, Timeout
from runtime.cli.phrases import (
    NONE,
    acceptance,
    by_position,
    describe_policy,
    duration,
    mebibytes,
    optional,
    policy_lines,
    profile_state,
    ratio,
    server_state,
    setter_line,
    use,
)
from runtime.cli.policy_shadow import describe_shadow
from runtime.cli.replicas import answers_of, ask_once, finish, json_of, print_failures

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2


def status(addresses: Addresses, as_json: Json = False, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> None:
    """Show what servers are, hold and have done since they started.

    Tokens per pass are tokens emitted over passes that sampled, the first of a request among them, which verifies no
    draft. --json prints messages of operator.proto with the names used there; 64-bit numbers are strings in it.
    """
    run(_status(addresses, as_json, timeout_s))


async def _status(addresses: list[str], as_json: bool, timeout_s: float) -> None:
    outcomes = await ask_once(addresses, timeout_s, lambda client: client.get_status())
    if as_json:
        write(json_of(outcomes))
    else:
        for answer in answers_of(outcomes):
            show(status_panel(answer.address, answer.value))
    finish(print_failures(outcomes))


def status_panel(address: str, status: operator_pb2.GetStatusResponse) -> Panel:
    """All of one server."""
    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(status):
        grid.add_row(f"[bold]{name}[/]", escape(value))
    parts: list[RenderableType] = [grid]
    if status.ranks:
        parts += ["", ranks_table(status)]
    if status.batches:
        parts += ["", pools_table(status)]
    return Panel(Group(*parts), title=escape(address), title_align="left", expand=False)


def _facts(status: operator_pb2.GetStatusResponse) -> Iterator[tuple[str, str]]:
    model, counters = status.model, status.counters
    yield "state", server_state(status.state)
    if status.outage:
        yield "outage", status.outage
    size = f"{model.num_parameters / 1e6:.2f} M parameters"
    yield "model", f"{model.name}: {model.model_type}, {size}, {model.dtype}, {model.numerics} numerics"
    yield "limits", f"context {model.context_length} tokens, drafts up to {model.gamma_max}"
    yield "layout", f"dp {model.dp} x tp {model.tp}, ep {model.ep}"
    yield (
        "policy",
        "\n".join([describe_policy(status.policy), *setter_line(status.policy), *policy_lines(status.policy)]),
    )
    if status.HasField("speculation"):
        yield from _speculation(status.speculation)
    running = sum(batch.running for batch in status.batches)
    yield "requests", f"{running} running, {use(status.waiting, status.max_waiting)} waiting"
    yield "step", f"{status.step}, epoch {status.epoch}, {counters.restarts} restarts"
    yield "uptime", duration(status.uptime_s)
    yield (
        "so far",
        f"{counters.submitted} requests taken, {counters.finished} finished, {counters.aborted} aborted, "
        f"{counters.failed} failed; {counters.refused} refused",
    )
    errors = sorted((-count, name) for name, count in counters.errors.items() if count)
    if errors:
        yield "errors", ", ".join(f"{name} {-count}" for count, name in errors)
    if counters.rank_losses:
        yield "outages", f"ranks lost {counters.rank_losses} times, {duration(counters.outage_s)} without them"
    yield "tokens", f"{counters.prompt_tokens} read, {counters.emitted} emitted in {counters.rounds} passes"
    yield "tokens per pass", optional(ratio(counters.emitted, counters.rounds), ".2f")
    yield "acceptance", by_position(acceptance(counters.accepted_by_position, counters.drafted_by_position))
    yield "versions", ", ".join(f"{name} {version}" for name, version in sorted(status.versions.items()))


def _speculation(speculation: operator_pb2.SpeculationStatus) -> Iterator[tuple[str, str]]:
    """What the planner does, and how true its predictions are."""
    drafting = f"gamma {speculation.gamma}, budget {speculation.budget} in the newest step; "
    drafting += f"{speculation.zero_budget_steps} steps without budget, {speculation.explored_steps} to learn"
    if speculation.predicted_steps:
        predicted_s, measured_s, error_s = (
            total_s / speculation.predicted_steps
            for total_s in (speculation.predicted_sum_s, speculation.measured_sum_s, speculation.error_sum_s)
        )
        drafting += f"; {1000 * predicted_s:.2f} ms per step predicted, {1000 * measured_s:.2f} measured, mean error "
        drafting += f"{1000 * error_s:.2f}"
    yield "drafting", drafting
    yield "profile", f"{profile_state(speculation.profile)}: {speculation.profile_detail}"
    if speculation.survival_by_position:
        yield "survival", by_position(speculation.survival_by_position)
    if speculation.shadow.HasField("policy"):
        yield "shadow", describe_shadow(speculation.shadow)


def ranks_table(status: operator_pb2.GetStatusResponse) -> Table:
    """Where each rank runs and what it holds of the parameters."""
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "place", "address", "device", "parameters"):
        table.add_column(heading, justify="right" if heading in ("rank", "parameters") else "left")
    for rank in status.ranks:
        table.add_row(
            str(rank.rank),
            *(escape(text) or NONE for text in (rank.name, rank.address, rank.device)),
            mebibytes(rank.parameter_bytes),
        )
    return table


def pools_table(status: operator_pb2.GetStatusResponse) -> Table:
    """What each data-parallel rank holds: a row for its slots and one per cache group."""
    table = Table(box=None, pad_edge=False)
    for heading in ("dp rank", "running", "pool", "in use", "each", "in all"):
        table.add_column(heading, justify="left" if heading == "pool" else "right")
    for number, batch in enumerate(status.batches):
        pools = [("slots", batch.slots_used, batch.slots_total, batch.slot_bytes)]
        pools += [(f"pages: {pool.group}", pool.pages_used, pool.pages_total, pool.page_bytes) for pool in batch.pools]
        for row, (name, used, total, size_bytes) in enumerate(pools):
            first = (str(number), str(batch.running)) if row == 0 else ("", "")
            each, in_all = f"{size_bytes / 1024:.4g} KiB", mebibytes(total * size_bytes)
            table.add_row(*first, escape(name), use(used, total), each, in_all)
        table.add_row("", "", "records of a step", "", "", mebibytes(batch.record_bytes))
    return table
