"""What a step costs by a measured profile: looks up, between and beyond what was measured. Knows no step and no plan.

Looking up is for every step: `at` takes tens of microseconds, `step_ms` about ten, whatever was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtime.profile.document import Profile
from runtime.profile.tables import CostTables, build_tables, ceil_to_tiers
from runtime.verification.costs import CostCurve, Floats, Ints

LOADS_KEPT = 512
"""Loads whose curves stay at hand."""


@dataclass(slots=True)
class _Load:
    """Tables of one number of sequences; see CostTables. steps: curves of steps by (waiting, gamma), as they are used.

    more_2GC: of verify and of draft.
    """

    rows_U: Floats
    verify_GU: Floats
    draft_GU: Floats
    more_2GC: Floats
    steps: dict[tuple[int, int], Floats] = field(default_factory=dict)

    def step_U(self, waiting: int, gamma: int) -> Floats:
        found = self.steps.get((waiting, gamma))
        if found is None:
            found = self.steps[waiting, gamma] = self.verify_GU[waiting] + self.draft_GU[gamma]
        return found


@dataclass(frozen=True, slots=True)
class _Curve:
    """A `runtime.verification.costs.CostCurve`. more_2G: what the context adds to verify and to draft."""

    load: _Load
    more_2G: Floats
    tiers: tuple[int, ...]

    def step_ms(self, rows: Ints, *, waiting: int, gamma: int) -> Floats:
        """As in the protocol. Drafts longer than γ_max cost what that costs."""
        longest = self.more_2G.shape[1] - 1
        waiting, gamma = min(waiting, longest), min(gamma, longest)
        ms: Floats = np.interp(ceil_to_tiers(rows, self.tiers), self.load.rows_U, self.load.step_U(waiting, gamma))
        return np.asarray(ms + (self.more_2G[0, waiting] + self.more_2G[1, gamma]))


class ProfileCosts:
    """A `runtime.verification.costs.StepCosts` of one measured geometry."""

    def __init__(self, profile: Profile) -> None:
        self._tables = {sampled: build_tables(profile, sampled=sampled) for sampled in (False, True)}
        self._gamma_max = profile.identity.gamma_max
        self._tiers = profile.tiers
        self._loads: dict[tuple[int, bool], _Load] = {}

    @property
    def gamma_max(self) -> int:
        """Longest draft that is priced."""
        return self._gamma_max

    @property
    def tiers(self) -> tuple[int, ...]:
        """As in the protocol."""
        return self._tiers

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        """As in the protocol. Fewer sequences than were measured cost what those cost. sampled: whether any sequence
        draws its tokens."""
        load = self._loads.get((num_sequences, sampled))
        if load is None:
            if len(self._loads) == LOADS_KEPT:
                self._loads.clear()
            load = self._loads[num_sequences, sampled] = _make_load(self._tables[sampled], num_sequences)
        return _Curve(
            load=load,
            more_2G=_interpolate(load.more_2GC, self._tables[sampled].contexts_C, context),
            tiers=self._tiers,
        )


def _make_load(tables: CostTables, num_sequences: int) -> _Load:
    loads_L = tables.loads_L
    above = int(np.clip(np.searchsorted(loads_L, num_sequences), 1, len(loads_L) - 1))
    share = max(0.0, (num_sequences - loads_L[above - 1]) / (loads_L[above] - loads_L[above - 1]))

    def between(table_LGX: Floats) -> Floats:
        low_GX, high_GX = table_LGX[above - 1], table_LGX[above]
        value_GX = low_GX + share * (high_GX - low_GX)
        if share > 1:  # a line that falls would end below nothing
            value_GX = np.maximum.accumulate(np.maximum(value_GX, high_GX), axis=1)
        return np.asarray(value_GX)

    return _Load(
        rows_U=num_sequences * (1 + tables.extra_U),
        verify_GU=between(tables.verify_LGU),
        draft_GU=between(tables.draft_LGU),
        more_2GC=np.stack([between(tables.verify_more_LGC), between(tables.draft_more_LGC)]),
    )


def _interpolate(table: Floats, places_C: Floats, place: float) -> Floats:
    """The last axis at one place; the ends beyond it."""
    above = int(np.searchsorted(places_C, place))
    if above == 0:
        return np.asarray(table[..., 0])
    if above == len(places_C):
        return np.asarray(table[..., -1])
    share = (place - places_C[above - 1]) / (places_C[above] - places_C[above - 1])
    return np.asarray(table[..., above - 1] + share * (table[..., above] - table[..., above - 1]))
