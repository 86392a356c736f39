"""Mean and percentiles of observations. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the observations lie, 0 to 1, between the two nearest in proportion.

    values: rising; at least one. The same as numpy's default.
    """
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)
