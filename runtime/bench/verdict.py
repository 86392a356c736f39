"""Whether a dynamic policy keeps up with the best of the others, load by load, in one run. Pure.

Of closed loops alone: an open one that is not overloaded emits what arrives, whatever the policy.

Repeats are interleaved by policy, so speeds of one repeat are compared with each other: its ratio is the dynamic
policy's tokens per second over those of the best other one, which is the one of the largest median over all repeats. As
the best is chosen in hindsight, and by the same repeats, the comparison is hard on the dynamic policy. The bound is the
5 % quantile of the median ratio over resamples of the repeats (one-sided, percentile bootstrap).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import median

from runtime.bench import document
from runtime.bench.document import Cell, Group, LoadName
from runtime.bench.percentiles import percentile

FLOOR = 0.95
"""The bound is to be this much everywhere, and NEAR in MOST of all loads."""
NEAR = 0.98
MOST = 0.9
RESAMPLES = 2000
RISK = 0.05

Speeds = dict[tuple[LoadName, str], dict[int, float]]
"""Tokens per second by load, policy and repeat."""


def lower_bound(ratios: Sequence[float]) -> float:
    """Below which the median ratio lies with a probability of RISK. The same for the same ratios; at least one."""
    source = random.Random(0)
    medians = sorted(median(source.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return percentile(medians, RISK)


def verdict_of(groups: Sequence[Group], cells: Sequence[Cell]) -> document.Verdict | None:
    """None where no closed loop has both a dynamic policy and another one. cells: those that the groups are of."""
    speeds: Speeds = {}
    for cell in cells:
        by_repeat = speeds.setdefault((cell.load, cell.policy), {})
        by_repeat[cell.repeat] = cell.figures.rates.tokens_per_s
    by_load: dict[LoadName, list[Group]] = {}
    for group in groups:
        if group.load.concurrency is None:
            continue
        by_load.setdefault(group.load, []).append(group)
    trials = [
        trial
        for members in by_load.values()
        for dynamic in members
        if is_dynamic(dynamic)
        if (trial := _trial(dynamic, [group for group in members if not is_dynamic(group)], speeds)) is not None
    ]
    if not trials:
        return None
    near = sum(trial.bound >= NEAR for trial in trials) / len(trials)
    least = min(trial.bound for trial in trials)
    races = [trial.ahead_of_longest for trial in trials if trial.longest_loses]
    return document.Verdict(
        trials=trials,
        least_bound=least,
        share_near=near,
        floor_is_kept=least >= FLOOR,
        most_are_near=near >= MOST,
        longest_lost=len(races),
        ahead_where_longest_lost=sum(races),
    )


def is_dynamic(group: Group) -> bool:
    return group.policy.startswith("dynamic")


def _trial(dynamic: Group, others: Sequence[Group], speeds: Speeds) -> document.Trial | None:
    """None where there is nothing to compare with, or nothing was generated."""
    load, own = dynamic.load, speeds[dynamic.load, dynamic.policy]
    if not others or not all(speed > 0 for group in others for speed in speeds[load, group.policy].values()):
        return None
    medians = {group.policy: median(speeds[load, group.policy].values()) for group in others}
    best = max(others, key=lambda group: medians[group.policy])
    ratios = _ratios(own, speeds[load, best.policy])
    if not ratios:
        return None
    fixed = [group for group in others if group.policy.startswith("fixed:")]
    longest = max(fixed, key=lambda group: int(group.policy.partition(":")[2]), default=None)
    work = dynamic.figures.work
    steps = sum(work.steps_by_gamma)
    return document.Trial(
        load=load,
        policy=dynamic.policy,
        best=best.policy,
        ratios=ratios,
        ratio=median(ratios),
        bound=lower_bound(ratios),
        longest_loses=longest is not None and medians[longest.policy] < medians.get("off", 0.0),
        ahead_of_longest=longest is not None and _is_ahead(own, speeds[load, longest.policy]),
        gamma_mean=work.gamma_mean,
        tokens_per_pass=dynamic.figures.tokens_per_pass,
        best_tokens_per_pass=best.figures.tokens_per_pass,
        predicted_ms=work.predicted_ms,
        measured_ms=work.measured_ms,
        explored_share=work.explored_steps / steps if steps else None,
        fallback=work.fallback,
    )


def _ratios(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """By repeat, rising; of a run that ended early, of the repeats that both have."""
    return [one[repeat] / other[repeat] for repeat in sorted(one.keys() & other.keys())]


def _is_ahead(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    ratios = _ratios(one, other)
    return bool(ratios) and median(ratios) > 1
