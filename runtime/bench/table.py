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
    """What clients see. ratio: to the first policy under the same load."""
    table = _table(
        "what clients see; latencies in ms, p50 / p99",
        ("load", "policy", "tokens/s", "ratio", "first token", "token gap", "request", "requests/s", "in limits/s"),
    )
    baselines: dict[str, float] = {}
    for group in report.groups:
        load, rates = load_text(group.load), group.figures.rates
        baseline = baselines.setdefault(load, rates.tokens_per_s)
        latencies = group.figures.latencies
        table.add_row(
            load,
            group.policy,
            f"{rates.tokens_per_s:.0f}{_by_repeat(group)}",
            f"{rates.tokens_per_s / baseline:.2f}" if baseline else NONE,
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
            "full",
            "1+ΣP",
            "by α",
            "α",
            "draft",
            "verify",
            "state",
            "host+link",
            "step +",
            "MiB",
        ),
    )
    for group in report.groups:
        figures = group.figures
        lengths, split = group.lengths, figures.time_per_token
        parts = () if split is None else (split.draft_ms, split.verify_ms, split.state_ms, split.host_and_link_ms)
        table.add_row(
            load_text(group.load),
            group.policy,
            _figure(figures.tokens_per_pass),
            *(_formulas(lengths) if lengths else [NONE] * 4),
            *([f"{part:.2f}" for part in parts] or [NONE] * 4),
            _figure(figures.overhead_per_step_ms),
            f"{figures.memory.total_bytes / 2**20:.0f}",
        )
    return table


def remarks(report: Report) -> list[str]:
    """What the tables need said, and what went wrong, a line each."""
    lines = [
        f"in limits: {limits_text(report.plan.limits)}; step +: a step's time beyond its slowest rank, in ms; "
        "MiB: peak by the allocator's accounts, sampled",
        "per pass: over all decode passes; full: tokens per round that verified γ drafts and that its request's limit "
        "could not cut, the rounds of which the formulas 1+ΣP and by α speak",
        "verify: from the plan's arrival at the rank to the end of verification, the target's pass included; state: "
        "committing; draft: drafting and reporting; prefill is in every part",
    ]
    if any(not device.startswith("cpu") for device in report.identity.devices):
        lines.append(
            f"ranks are on {', '.join(dict.fromkeys(report.identity.devices))}: draft, verify and state are times of "
            "launching work there, and only their sum is the time it took"
        )
    if any(group.lengths and group.lengths.rate_misleads for group in report.groups):
        lines.append(
            "!: one average acceptance rate α misleads here by more than 3 %: drafts at different positions and in "
            "different texts do not stand equally often, and (1-α^(γ+1))/(1-α) takes them to"
        )
    return [*lines, *(line for group in report.groups for line in _group_remarks(group))]


def _group_remarks(group: Group) -> list[str]:
    """What went wrong under one policy and load."""
    where, figures, lines = f"{load_text(group.load)}, {group.policy}", group.figures, []
    if figures.failures:
        lines.append(
            f"failed, {where}: {_codes(figures.failures)} of {figures.requests} requests; latencies and rates lack them"
        )
    if figures.failures_before:
        lines.append(
            f"failed before, {where}: {_codes(figures.failures_before)} of the requests that report their rounds or "
            "warm up; tokens per round and comparisons lack them"
        )
    lines += [f"  {code}: {text}" for code, text in figures.failure_texts.items() if text]
    if figures.measured_anew:
        lines.append(
            f"measured anew, {where}: {figures.measured_anew} measurements in which the server lost its ranks count "
            "nowhere"
        )
    if figures.tokens_of_others > 0 and not figures.failures:
        lines.append(
            f"others, {where}: the server emitted {figures.tokens_of_others} tokens that no request of ours "
            "received; its times per token and per step are of all traffic"
        )
    return lines


def verdict(comparison: Comparison) -> str:
    """Whether outputs agree, in one line."""
    where = f"{load_text(comparison.load)}, {comparison.policy} beside {comparison.baseline}"
    if not comparison.compared:
        return f"{where}: nothing compared, all {comparison.failed} prompts failed under one of them"
    text = f"{where}: {comparison.identical} of {comparison.compared} prompts identical"
    if comparison.differences:
        text += f"; of {len(comparison.differences)} others {comparison.ties} look like ties"
    if comparison.failed:
        text += f"; {comparison.failed} more failed under one of them and are not compared"
    return text


def comparison_lines(comparison: Comparison, dtype: str) -> list[str]:
    """Whether outputs agree, and where they do not."""
    lines = [f"greedy output, {verdict(comparison)}"]
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


def has_failures(report: Report) -> bool:
    """Whether any request failed, in a cell or before it."""
    return any(group.figures.failures or group.figures.failures_before for group in report.groups)


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


def _codes(failures: dict[str, int]) -> str:
    return ", ".join(f"{number} {code}" for code, number in failures.items())


def _formulas(lengths: Lengths) -> list[str]:
    mark = "!" if lengths.rate_misleads else ""
    counted = _figure(lengths.tokens_per_full_round)
    return [counted, _figure(lengths.by_survival), _figure(lengths.by_rate) + mark, _figure(lengths.acceptance_rate)]


def _by_repeat(group: Group) -> str:
    """The least and the most of the repeats, so that noise shows."""
    found = group.tokens_per_s_by_repeat
    return f" ({min(found):.0f}–{max(found):.0f})" if len(found) > 1 else ""


def _pair(spread: Spread) -> str:
    return NONE if spread.p50 is None or spread.p99 is None else f"{spread.p50:.1f} / {spread.p99:.1f}"


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
