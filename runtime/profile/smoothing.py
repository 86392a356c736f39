"""What to believe of measured costs that fall where more is done. Pure; knows no document."""

from __future__ import annotations

import numpy as np

from runtime.verification.costs import Floats

NOISE_IQRS = 3.0
"""A fall within so many interquartile ranges is noise."""


def monotone(ms_N: Floats, iqr_N: Floats) -> Floats:
    """Costs by number of rows, none below the one before it.

    A fall within the noise is none: what follows is raised to what came before. A larger one is real, and then it is
    what came before that is lowered: a pass can be padded up to the cheaper size (arXiv 2607.05147 plans with such
    jagged curves).
    """
    lowered = ms_N.copy()
    for i in range(len(ms_N)):
        noise_N = NOISE_IQRS * np.maximum(iqr_N[i], iqr_N[i + 1 :])
        real = ms_N[i + 1 :][ms_N[i] - ms_N[i + 1 :] > noise_N]
        lowered[i] = min(ms_N[i], real.min(initial=np.inf))
    return np.maximum.accumulate(lowered)
