"""Where one policy becomes faster than another as load rises. Pure; knows no report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Crossover:
    """place: on the axis, where `after` overtakes `before`."""

    place: float
    before: str
    after: str


def fastest(speeds: Mapping[str, Sequence[float]]) -> list[str]:
    """The policy of the largest speed at each place; of equals the first. speeds: of each policy, by place."""
    return [max(speeds, key=lambda policy: speeds[policy][index]) for index in range(_num_places(speeds))]


def crossovers(places: Sequence[float], speeds: Mapping[str, Sequence[float]]) -> list[Crossover]:
    """Where the fastest policy changes between two neighbouring places, by straight lines between those.

    places: rising. speeds: of each policy, at each place.
    """
    best = fastest(speeds)
    found = []
    for index, (before, after) in enumerate(pairwise(best)):
        if before == after:
            continue
        lead, deficit = (speeds[before][i] - speeds[after][i] for i in (index, index + 1))
        share = lead / (lead - deficit) if lead != deficit else 0.5
        found.append(Crossover(places[index] + share * (places[index + 1] - places[index]), before=before, after=after))
    return found


def _num_places(speeds: Mapping[str, Sequence[float]]) -> int:
    return min((len(values) for values in speeds.values()), default=0)
