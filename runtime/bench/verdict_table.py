"""The verdict on a dynamic policy in words: a table and lines for terminals and pages. Pure."""

from __future__ import annotations

from rich.table import Table

from runtime.bench.document import Trial, Verdict
from runtime.bench.report import load_text
from runtime.bench.table import figure, make_table
from runtime.bench.verdict import FLOOR, NEAR


def verdict_table(verdict: Verdict | None) -> Table:
    """A row for each load; none without a verdict."""
    table = make_table(
        "dynamic beside the best of the others; tokens per second, by repeat",
        ("load", "policy", "ratio", "95 % bound", "best other", "γ mean", "per pass", "best's", "expected", "was"),
    )
    for trial in verdict.trials if verdict else ():
        table.add_row(
            load_text(trial.load),
            trial.policy,
            f"{trial.ratio:.3f}",
            f"{trial.bound:.3f}",
            trial.best,
            figure(trial.gamma_mean),
            figure(trial.tokens_per_pass),
            figure(trial.best_tokens_per_pass),
            figure(trial.predicted_ms),
            figure(trial.measured_ms),
        )
    return table


def verdict_lines(verdict: Verdict | None) -> list[str]:
    """Whether the aims were met, and for each trial that missed one the figures that show why."""
    if verdict is None:
        return []
    missed = [trial for trial in verdict.trials if trial.bound < NEAR or _lost_to_longest(trial)]
    return [
        f"dynamic, {len(verdict.trials)} loads: the lower 95 % bound of its ratio to the best other policy is "
        f"{verdict.least_bound:.3f} or more, {_met(verdict.floor_is_kept)} {FLOOR:g} everywhere; it is {NEAR:g} or "
        f"more in {verdict.share_near:.0%} of them, {_met(verdict.most_are_near)} nine of ten",
        f"where the longest fixed drafts are slower than off ({verdict.longest_lost} loads), dynamic is faster than "
        f"they are in {verdict.ahead_where_longest_lost}",
        *map(miss_line, missed),
    ]


def miss_line(trial: Trial) -> str:
    """One load in which dynamic is behind, with what speaks for a cause."""
    parts = [
        f"γ {figure(trial.gamma_mean)} on average",
        f"{figure(trial.tokens_per_pass)} tokens per pass against {figure(trial.best_tokens_per_pass)}",
    ]
    if trial.predicted_ms and trial.measured_ms:
        off = trial.measured_ms / trial.predicted_ms - 1
        side = "over" if off > 0 else "under"
        parts.append(f"a step took {trial.measured_ms:.2f} ms, {abs(off):.0%} {side} expectation")
    if trial.explored_share:
        parts.append(f"{trial.explored_share:.1%} of its steps explored")
    if trial.fallback:
        parts.append(f"it fell back: {trial.fallback}")
    spread = f"{min(trial.ratios):.3f}–{max(trial.ratios):.3f} in {len(trial.ratios)} repeats"
    behind = "; slower than the longest fixed drafts, which lose to off" if _lost_to_longest(trial) else ""
    return (
        f"  missed, {load_text(trial.load)}, {trial.policy}: {trial.ratio:.3f} of {trial.best}, bound "
        f"{trial.bound:.3f} ({spread}){behind}: {', '.join(parts)}"
    )


def _lost_to_longest(trial: Trial) -> bool:
    return trial.longest_loses and not trial.ahead_of_longest


def _met(is_met: bool) -> str:
    return "which meets" if is_met else "which misses"
