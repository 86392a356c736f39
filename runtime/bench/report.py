"""Puts a report together from the cells that were measured. Pure; knows no client, no terminal and no files."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.bench import document
from runtime.bench.comparison import Difference, PolicyRun, differences, num_compared
from runtime.bench.extras import parse_variants
from runtime.bench.figures import CellRun, figures_of, lengths_of, series_of
from runtime.bench.load import Closed, Load, Open, Policy
from runtime.bench.verdict import verdict_of


def load_name(load: Load) -> document.LoadName:
    return document.LoadName(
        concurrency=load.concurrency if isinstance(load, Closed) else None,
        rate=load.rate if isinstance(load, Open) else None,
        acceptance=load.acceptance,
        variant=None if load.variant is None else str(load.variant),
    )


def load_of(name: document.LoadName) -> Load:
    variant = None if name.variant is None else parse_variants([name.variant])[0]
    if name.rate is not None:
        return Open(name.rate, name.acceptance, variant)
    assert name.concurrency is not None, "a load of neither kind"
    return Closed(name.concurrency, name.acceptance, variant)


def load_text(name: document.LoadName) -> str:
    """The load in words, as tables and pages show it."""
    return str(load_of(name))


def build_report(
    runs: Sequence[CellRun],
    *,
    plan: document.Plan,
    identity: document.Identity,
    cells_planned: int,
    started_at: str,
    duration_s: float,
) -> document.Report:
    """runs: in the order in which they were measured."""
    groups, cells = groups_of(runs, plan.limits), cells_of(runs, plan.limits)
    return document.Report(
        schema_version=document.SCHEMA_VERSION,
        started_at=started_at,
        duration_s=duration_s,
        complete=len(runs) == cells_planned,
        cells_planned=cells_planned,
        identity=identity,
        plan=plan,
        groups=groups,
        verdict=verdict_of(groups, cells) if plan.records else None,
        comparisons=_comparisons(runs, plan, identity.model.dtype) if plan.temperature == 0 else [],
        cells=cells,
    )


def cells_of(runs: Sequence[CellRun], limits: document.Limits) -> list[document.Cell]:
    return [
        document.Cell(
            repeat=run.slot.repeat,
            load=load_name(run.slot.load),
            policy=str(run.slot.policy),
            figures=figures_of([run], limits),
            series=series_of(run.moments),
        )
        for run in runs
    ]


def groups_of(runs: Sequence[CellRun], limits: document.Limits) -> list[document.Group]:
    """One per load and policy, in the order of the first repeat as planned: policies as they were given."""
    grouped: dict[tuple[Load, Policy], list[CellRun]] = {}
    for run in runs:
        grouped.setdefault((run.slot.load, run.slot.policy), []).append(run)
    return [
        document.Group(
            load=load_name(load),
            policy=str(policy),
            repeats=len(of_pair),
            tokens_per_s_by_repeat=[figures_of([run], limits).rates.tokens_per_s for run in of_pair],
            figures=figures_of(of_pair, limits),
            lengths=lengths_of(of_pair),
        )
        for (load, policy), of_pair in grouped.items()
    ]


def _comparisons(runs: Sequence[CellRun], plan: document.Plan, dtype: str) -> list[document.Comparison]:
    """Readings beside those of the first policy under the same load; each prompt once, however often it was sent."""
    first = [run for run in runs if run.readings]
    baselines: dict[Load, CellRun] = {}
    for run in first:
        baselines.setdefault(run.slot.load, run)
    return [
        _comparison(baselines[run.slot.load], run, plan.prompts, dtype)
        for run in first
        if run is not baselines[run.slot.load]
    ]


def _comparison(baseline: CellRun, other: CellRun, num_prompts: int, dtype: str) -> document.Comparison:
    one, another = (
        PolicyRun(
            policy=str(run.slot.policy),
            completions=tuple(record.completion for record in run.readings[:num_prompts]),
        )
        for run in (baseline, other)
    )
    found = differences(one, another)
    compared = num_compared(one, another)
    return document.Comparison(
        load=load_name(baseline.slot.load),
        baseline=one.policy,
        policy=another.policy,
        compared=compared,
        failed=len(one.completions) - compared,
        identical=compared - len(found),
        ties=sum(difference.is_tie(dtype) for difference in found),
        differences=[_token_difference(difference, dtype) for difference in found],
    )


def _token_difference(difference: Difference, dtype: str) -> document.TokenDifference:
    return document.TokenDifference(
        prompt=difference.prompt,
        position=difference.position,
        expected=difference.expected,
        found=difference.found,
        logit_gap=difference.margin,
        looks_like_a_tie=difference.is_tie(dtype),
    )
