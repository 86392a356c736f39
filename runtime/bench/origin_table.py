"""What predictions, constraints and looking back bring, side by side: tokens per pass, and drafts by where they came
from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from runtime.bench.document import Group, LoadName, Report
from runtime.bench.drafting import DraftUse
from runtime.bench.report import load_text
from runtime.bench.table import NONE, figure, make_table


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginRow:
    """A policy under a load beside the first variant of that load under the same policy.

    per_pass, speed: of tokens per pass and tokens per second, over those of that variant; None where it is that, or has
    none.
    """

    group: Group
    per_pass: float | None
    speed: float | None


def origin_rows(report: Report) -> list[OriginRow]:
    """Variants of a load and policy together; () where nothing but prompts was ever sent."""
    plan = report.plan
    if not (plan.predictions or plan.constraints or any(group.load.variant for group in report.groups)):
        return []
    families: dict[tuple[LoadName, str], list[Group]] = {}
    for group in report.groups:
        families.setdefault((group.load.model_copy(update={"variant": None}), group.policy), []).append(group)
    return [_row(group, family) for family in families.values() for group in family]


def origin_table(report: Report) -> Table:
    """One without rows says that nothing but prompts was ever sent."""
    table = make_table(
        "what requests bring; drafts as drafted / verified / stood",
        (
            "load",
            "policy",
            "per pass",
            "×",
            "tokens/s",
            "× speed",
            "drafter",
            "prediction",
            "ngram",
            "forbidden",
            "ended",
        ),
    )
    for row in origin_rows(report):
        figures = row.group.figures
        origins = figures.origins
        table.add_row(
            load_text(row.group.load),
            row.group.policy,
            figure(figures.tokens_per_pass),
            figure(row.per_pass),
            f"{figures.rates.tokens_per_s:.0f}",
            figure(row.speed),
            *(use_text(use) for use in (origins.drafter, origins.prediction, origins.ngram)),
            str(origins.forbidden),
            ended_text(figures.finishes),
        )
    return table


def origin_lines(report: Report) -> list[str]:
    """What the table needs said."""
    rows, plan = origin_rows(report), report.plan
    if not rows:
        return []
    lines = [
        "×: beside the first variant under the same load and policy; forbidden: verified drafts at and behind the "
        "first one of a round that the constraint forbids"
    ]
    if plan.edit_every is not None:
        how = f"with an edit every {plan.edit_every} tokens on average" if plan.edit_every else "as it was"
        lines.append(
            f"predictions: what the model says, recorded before, {how}: the edited-file case with the new "
            "file given and the old one made of it, since a small model follows no instruction"
        )
    return lines


def ended_text(finishes: dict[str, int]) -> str:
    """Why requests ended, the most frequent reason first."""
    order = sorted(finishes.items(), key=lambda item: -item[1])
    return ", ".join(f"{number} {reason.lower()}" for reason, number in order) or NONE


def _row(group: Group, family: Sequence[Group]) -> OriginRow:
    first = family[0]
    if group is first:
        return OriginRow(group=group, per_pass=None, speed=None)
    return OriginRow(
        group=group,
        per_pass=_ratio(group.figures.tokens_per_pass, first.figures.tokens_per_pass),
        speed=_ratio(group.figures.rates.tokens_per_s, first.figures.rates.tokens_per_s),
    )


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def use_text(use: DraftUse) -> str:
    return f"{use.drafted} / {use.admitted} / {use.accepted}" if use.drafted else NONE
