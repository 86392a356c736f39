"""The report on a terminal. Pure: from a report to rich tables and lines."""

from __future__ import annotations

from rich.table import Table

from runtime.bench.comparison import Difference
from runtime.bench.document import Comparison, Group, Lengths, Limits, Report, Spread
from runtime.bench.report import load_text

MAX_DIFFERENCES = 5
"""Lines per comparison; the files hold all."""
NONE = "–"


def speed_table(report: Report) -> Table:
    """What clients see."""
    table = _table(
        "what clients see; latencies in ms, p50 / p99",
        ("load", "policy", "tokens/s", "ratio", "first token", "token gap", "request", "requests/s", "in limits/s"),
    )
    baselines: dict[str, float] = {}
    for group in report.groups:
        load, rates = load_text(group.load), group.figures.rates
        ratio = rates.tokens_per_s / baselines.setdefault(load, rates.tokens_per_s) if rates.tokens_per_s else 0.0
        latencies = group.figures.latencies
        table.add_row(
            load,
            group.policy,
            f"{rates.tokens_per_s:.0f}{_by_repeat(group)}",
            f"{ratio:.2f}",
            *(_pair(part) for part in (latencies.first_token_ms, latencies.token_gap_ms, latencies.request_ms)),
            f"{rates.requests_per_s:.2f}",
            f"{rates.requests_within_limits_per_s:.2f}",
        )
    return table


def cost_table(report: Report) -> Table:
    """What a token costs, and how many a pass brings."""
    table = _table(
        "tokens per pass, counted and by formula; ms per committed token",
        (
            "load",
            "policy",
            "per pass",
            "1+ΣP",
            "by α",
            "α",
            "draft",
            "verify",
            "state",
            "rest",
            "host+link",
            "step +",
            "MiB",
        ),
    )
    for group in report.groups:
        figures = group.figures
        lengths, split = group.lengths, figures.time_per_token
        parts = (
            ()
            if split is None
            else (split.draft_ms, split.verify_ms, split.state_ms, split.rank_rest_ms, split.host_and_link_ms)
        )
        table.add_row(
            load_text(group.load),
            group.policy,
            _figure(figures.tokens_per_pass),
            *(_formulas(lengths) if lengths else [NONE] * 3),
            *([f"{part:.2f}" for part in parts] or [NONE] * 5),
            _figure(figures.overhead_per_step_ms),
            f"{figures.memory.total_bytes / 2**20:.0f}",
        )
    return table


def remarks(report: Report) -> list[str]:
    """What the tables need said, and what went wrong, a line each."""
    lines = [
        f"in limits: {limits_text(report.plan.limits)}; step +: a step's time beyond its slowest rank, in ms; "
        "MiB: peak by the allocator's accounts, sampled"
    ]
    if any(group.lengths and group.lengths.rate_misleads for group in report.groups):
        lines.append(
            "!: one average acceptance rate α misleads here by more than 3 %: drafts at different positions and in "
            "different texts do not stand equally often, and (1-α^(γ+1))/(1-α) takes them to"
        )
    for group in report.groups:
        where = f"{load_text(group.load)}, {group.policy}"
        figures = group.figures
        if figures.failures:
            codes = ", ".join(f"{number} {code}" for code, number in figures.failures.items())
            lines.append(f"failed, {where}: {codes} of {figures.requests} requests; latencies and rates lack them")
        if figures.restarts:
            lines.append(f"restarts, {where}: the ranks were lost and started anew {figures.restarts} times")
        if figures.tokens_of_others > 0 and not figures.failures:
            lines.append(
                f"others, {where}: the server emitted {figures.tokens_of_others} tokens that no request of ours "
                "received; its times per token and per step are of all traffic"
            )
    return lines


def comparison_lines(comparison: Comparison, dtype: str) -> list[str]:
    """Whether outputs agree, and where they do not."""
    where = f"{load_text(comparison.load)}, {comparison.policy} beside {comparison.baseline}"
    lines = [f"greedy output, {where}: {comparison.identical} of {comparison.compared} prompts identical"]
    if comparison.differences:
        lines[0] += f"; of {len(comparison.differences)} others {comparison.ties} look like ties"
    for found in comparison.differences[:MAX_DIFFERENCES]:
        difference = Difference(
            prompt=found.prompt,
            position=found.position,
            expected=found.expected,
            found=found.found,
            margin=found.logit_gap,
        )
        lines.append(f"  {difference.explain(dtype)}")
    if len(comparison.differences) > MAX_DIFFERENCES:
        lines.append(f"  and {len(comparison.differences) - MAX_DIFFERENCES} more: --json has all")
    return lines


def limits_text(limits: Limits) -> str:
    parts = [
        f"{words} within {limit:g} ms"
        for words, limit in (
            ("first token", limits.first_token_ms),
            ("mean token gap", limits.token_gap_ms),
            ("request", limits.request_ms),
        )
        if limit is not None
    ]
    return ", ".join(parts) or "no limits given"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_name = column in ("load", "policy")
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    return table


def _formulas(lengths: Lengths) -> list[str]:
    mark = "!" if lengths.rate_misleads else ""
    return [_figure(lengths.by_survival), _figure(lengths.by_rate) + mark, _figure(lengths.acceptance_rate)]


def _by_repeat(group: Group) -> str:
    """The least and the most of the repeats, so that noise shows."""
    found = group.tokens_per_s_by_repeat
    return f" ({min(found):.0f}–{max(found):.0f})" if len(found) > 1 else ""


def _pair(spread: Spread) -> str:
    return NONE if spread.p50 is None or spread.p99 is None else f"{spread.p50:.1f} / {spread.p99:.1f}"


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
