"""Goodness of fit of token counts against exact laws. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from scipy.stats import chi2

MIN_EXPECTED = 5.0


def g_test(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """p-value of the likelihood-ratio test. Cells that expect fewer than MIN_EXPECTED are pooled."""
    total = sum(counts.values())
    cells = [(counts.get(cell, 0), p * total) for cell, p in law.items() if p * total >= MIN_EXPECTED]
    observed, expected = np.array([o for o, _ in cells], float), np.array([e for _, e in cells], float)
    rest_observed, rest_expected = total - observed.sum(), total - expected.sum()
    if rest_expected >= MIN_EXPECTED:
        observed, expected = np.append(observed, rest_observed), np.append(expected, rest_expected)
    elif rest_observed > 10 * MIN_EXPECTED:
        return 0.0  # tokens that the law hardly allows
    else:
        expected *= observed.sum() / expected.sum()
    seen = observed > 0
    statistic = 2 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    return float(chi2.sf(statistic, len(observed) - 1))


def table_p_values(
    streams: Sequence[Sequence[int]], law: Mapping[tuple[int, ...], float], first: int, last: int
) -> dict[str, float]:
    """p-values of the frequencies of tokens first..last (from 0) and of their bigrams; law: of whole streams."""
    found = {}
    for start, stop in [(k, k + 1) for k in range(first, last + 1)] + [(k, k + 2) for k in range(first, last)]:
        marginal: Counter[Hashable] = Counter()
        for stream, p in law.items():
            marginal[stream[start:stop]] += p  # type: ignore[assignment]
        counts: Counter[Hashable] = Counter(tuple(stream[start:stop]) for stream in streams)
        found[f"tokens {start + 1}..{stop}"] = g_test(counts, marginal)
    return found


def pair_p_values(
    pairs: Sequence[Sequence[Sequence[int]]], law: Mapping[tuple[int, ...], float], first: int, last: int
) -> dict[str, float]:
    """p-values of how often tokens first..last (from 0) of one stream stand beside those of another that knows nothing
    of it, at the same place and at the next. law: of each stream."""
    found = {}
    for mine in range(first, last + 1):
        for theirs in range(mine, min(mine + 2, last + 2)):
            table = _product(_marginal(law, mine), _marginal(law, theirs))
            counts: Counter[Hashable] = Counter((one[mine], other[theirs]) for one, other in pairs)
            found[f"token {mine + 1} beside token {theirs + 1}"] = g_test(counts, table)
    return found


def _marginal(law: Mapping[tuple[int, ...], float], place: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for stream, mass in law.items():
        found[stream[place]] = found.get(stream[place], 0.0) + mass
    return found


def _product(one: Mapping[int, float], other: Mapping[int, float]) -> dict[tuple[int, int], float]:
    return {(a, b): p * q for a, p in one.items() for b, q in other.items()}


def holm_rejects(p_values: Mapping[str, float], alpha: float) -> list[str]:
    """Tables rejected at family-wise level alpha (Holm's step-down)."""
    rejected = []
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    for i, (name, p) in enumerate(ordered):
        if p > alpha / (len(ordered) - i):
            break
        rejected.append(name)
    return rejected
