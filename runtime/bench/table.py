"""The report on a terminal. Pure: from a report to rich tables and lines."""

from __future__ import annotations

from rich.table import Table

from runtime.bench.comparison import Difference
from runtime.bench.document import Comparison, Group, Limits, Report, Spread
from runtime.bench.drafting import Lengths
from runtime.bench.report import load_text

MAX_DIFFERENCES = 5
"""Lines per comparison; the files hold all."""
NONE = "–"


def speed_table(report: Report) -> Table:
    """What clients see. ratio: to the first policy under the same load."""
    table = make_table(
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
    table = make_table(
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
            figure(figures.tokens_per_pass),
            *(_formulas(lengths) if lengths else [NONE] * 4),
            *([f"{part:.2f}" for part in parts] or [NONE] * 4),
            figure(figures.overhead_per_step_ms),
            f"{figures.memory.total_bytes / 2**20:.0f}",
        )
    return table


def work_table(report: Report) -> Table:
    """What was drafted and verified, and how long that was expected to take. One without rows says that no policy
    drafts."""
    table = make_table(
        "drafting and verification; ms of a step, predicted and as it was",
        (
            "load",
            "policy",
            "γ mean",
            "K/step",
            "drafted",
            "verified",
            "stood",
            "rolled back",
            "K=0",
            "explored",
            "expected",
            "was",
            "off by",
        ),
    )
    for group in report.groups:
        work = group.figures.work
        if not work.drafted and not (work.gamma_mean or work.zero_budget_steps):
            continue
        steps = sum(work.steps_by_gamma)
        table.add_row(
            load_text(group.load),
            group.policy,
            figure(work.gamma_mean),
            figure(work.budget_per_step),
            str(work.drafted),
            _share(work.admitted, work.drafted),
            _share(work.accepted, work.admitted),
            str(work.rollback_tokens),
            _share(work.zero_budget_steps, steps),
            _share(work.explored_steps, steps),
            figure(work.predicted_ms),
            figure(work.measured_ms),
            _share(work.error_ms or 0.0, work.measured_ms or 0.0),
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
    if any(group.load.acceptance is not None for group in report.groups):
        lines.append(
            "α beside a load: drafts of an oracle, which stand with that probability on average; the drafter's passes "
            "are made and paid for, and verification is the real one"
        )
    if work_table(report).row_count:
        lines.append(
            "γ mean: drafts drawn for each sequence in a step; K/step: draft rows that a step might verify; verified: "
            "share of the drafts that waited; stood: share of those verified; K=0: steps in which drafts waited and "
            "none was verified; off by: mean |expected - was|"
        )
    if any(group.policy.startswith("dynamic") for group in report.groups):
        lines.append(f"dynamic plans with the profile {report.identity.profile}")
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
    if figures.work.fallback:
        lines.append(f"fell back, {where}: ran as a fixed draft length at the end of a cell: {figures.work.fallback}")
    if figures.recording and figures.recording.identical < figures.recording.compared:
        apart = figures.recording.compared - figures.recording.identical
        lines.append(
            f"apart from the recording, {where}: {apart} of {figures.recording.compared} outputs; "
            f"{figures.recording.followed_share or 0.0:.1%} of all tokens came before they parted"
        )
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


def make_table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_name = column in ("load", "policy")
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    return table


def _codes(failures: dict[str, int]) -> str:
    return ", ".join(f"{number} {code}" for code, number in failures.items())


def _formulas(lengths: Lengths) -> list[str]:
    mark = "!" if lengths.rate_misleads else ""
    counted = figure(lengths.tokens_per_full_round)
    return [counted, figure(lengths.by_survival), figure(lengths.by_rate) + mark, figure(lengths.acceptance_rate)]


def _by_repeat(group: Group) -> str:
    """The least and the most of the repeats, so that noise shows."""
    found = group.tokens_per_s_by_repeat
    return f" ({min(found):.0f}–{max(found):.0f})" if len(found) > 1 else ""


def _pair(spread: Spread) -> str:
    return NONE if spread.p50 is None or spread.p99 is None else f"{spread.p50:.1f} / {spread.p99:.1f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else NONE


def figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
