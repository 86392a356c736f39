"""From measured cells to arrays that are quick to look up, made once. Pure; knows no step and no plan.

A step's cost is the sum of two parts, each a curve over rows at the shortest context that was measured, and of what a
longer context adds to them, whatever the rows:

    verify   the step without its draft part, by drafts that waited
    draft    by drafts drawn

Where nothing was measured:

    rows beyond a curve          cost what they cost on the longest draft's curve, then at larger loads, then its last
    drafts between two, beyond   in proportion; never less than the longest that was measured
    contexts of a large load     cost as at the largest load that has them, in proportion to the sequences

Shapes: L loads (sequences per data-parallel rank), G drafts from 0 to γ_max, U extra rows per sequence, C contexts.
Extra rows are rows / sequences − 1, so that loads between two measured ones lie between their curves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from runtime.profile.document import Cell, Profile
from runtime.profile.smoothing import monotone
from runtime.verification.costs import Floats, Ints

FAR = 2.0**24
"""Extra rows per sequence, and tokens of context, beyond all that is asked for: lines go on straight to there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTables:
    """Milliseconds.

    loads_L: sequences of a data-parallel rank, rising, at least two. extra_U, contexts_C: rising.
    verify_LGU, draft_LGU: at the shortest context; not falling along U.
    verify_more_LGC, draft_more_LGC: what the context adds; not falling along C.
    """

    loads_L: Floats
    extra_U: Floats
    contexts_C: Floats
    verify_LGU: Floats
    draft_LGU: Floats
    verify_more_LGC: Floats
    draft_more_LGC: Floats


def ceil_to_tiers(rows_N: Ints, tiers: Sequence[int]) -> Ints:
    """The tier that each number of rows is padded up to; what lies beyond the last one runs as it is."""
    if not tiers:
        return rows_N
    padded = np.asarray(tiers)
    place_N = np.searchsorted(padded, rows_N)
    return np.where(place_N < len(padded), padded[np.minimum(place_N, len(padded) - 1)], rows_N)


def build_tables(profile: Profile, *, sampled: bool) -> CostTables:
    """Of steps in which any sequence is sampled, or none. What was measured of one kind alone goes for both."""
    kind = [cell for cell in profile.cells if cell.sampled == sampled] or list(profile.cells)
    parts = [
        _Part(kind, profile.tiers, lambda cell: cell.waiting, lambda cell: cell.step.median - cell.draft.median),
        _Part(kind, profile.tiers, lambda cell: cell.gamma, lambda cell: cell.draft.median, idles_at_0=True),
    ]
    context_parts = parts
    if not any(part.has_contexts for part in parts) and len(kind) < len(profile.cells):
        context_parts = [part.of([cell for cell in profile.cells if cell.sampled != sampled]) for part in parts]
    loads = parts[0].loads
    extra_U = np.unique(np.concatenate([*(part.extra_rows() for part in parts), [FAR]]).round(9))
    contexts_C = np.unique([*(cell.context for cell in profile.cells), FAR])
    if len(loads) == 1:
        # A second load, of the same curves, says how more sequences than were measured would go on.
        loads = (loads[0], 2 * loads[0])
    drafts_G = np.arange(profile.identity.gamma_max + 1)
    curves = [np.stack([part.curves(load, extra_U, drafts_G) for load in loads]) for part in parts]
    more = [np.stack([part.more(load, contexts_C, drafts_G) for load in loads]) for part in context_parts]
    return CostTables(
        loads_L=np.array(loads, dtype=np.float64),
        extra_U=extra_U,
        contexts_C=contexts_C,
        verify_LGU=curves[0],
        # Each further draft is one more pass.
        draft_LGU=np.maximum.accumulate(curves[1], axis=1),
        verify_more_LGC=more[0],
        draft_more_LGC=more[1],
    )


class _Points(NamedTuple):
    """A curve over rows as measured, smoothed."""

    rows_N: Floats
    ms_N: Floats

    def at(self, rows_U: Floats) -> Floats:
        ms_U: Floats = np.interp(rows_U, self.rows_N, self.ms_N)
        return ms_U

    @property
    def slope(self) -> float | None:
        """Milliseconds per row over the whole; None of a single point."""
        width = self.rows_N[-1] - self.rows_N[0]
        return float((self.ms_N[-1] - self.ms_N[0]) / width) if width else None


class _Part:
    """One part of the cost. drafts_of: the number of drafts that it depends on. idles_at_0: without drafts it has
    nothing to do with rows."""

    def __init__(
        self,
        cells: Sequence[Cell],
        tiers: Sequence[int],
        drafts_of: Callable[[Cell], int],
        ms_of: Callable[[Cell], float],
        *,
        idles_at_0: bool = False,
    ) -> None:
        self._drafts_of, self._ms_of, self._idles_at_0 = drafts_of, ms_of, idles_at_0
        self._tiers = tiers
        self.loads = tuple(sorted({cell.num_sequences for cell in cells}))
        self._shortest = {
            load: min(cell.context for cell in cells if cell.num_sequences == load) for load in self.loads
        }
        self._points = {load: self._smooth(load, cells) for load in self.loads}
        self._more = {load: self._longer(load, cells) for load in self.loads}

    def of(self, cells: Sequence[Cell]) -> _Part:
        """The same part, of other cells."""
        return _Part(cells, self._tiers, self._drafts_of, self._ms_of, idles_at_0=self._idles_at_0)

    @property
    def has_contexts(self) -> bool:
        """Whether any load was measured at several."""
        return any(len(contexts) > 1 for contexts in self._more.values())

    def extra_rows(self) -> Floats:
        """All places where curves of any load bend."""
        ends = [self._widest(load).rows_N[-1] for load in self.loads]
        return np.array(
            [
                rows / load - 1
                for load in self.loads
                for rows in (*(x for points in self._points[load].values() for x in points.rows_N), *ends)
                if rows >= load
            ]
        )

    def curves(self, load: int, extra_U: Floats, drafts_G: Ints) -> Floats:
        """[G, U] at the shortest context."""
        rows_U = load * (1 + extra_U)
        measured = self._points[min(load, self.loads[-1])]
        table = {drafts: self._extended(load, drafts, points, rows_U) for drafts, points in measured.items()}
        return np.maximum.accumulate(_between(table, drafts_G), axis=1)

    def more(self, load: int, contexts_C: Floats, drafts_G: Ints) -> Floats:
        """[G, C]: what a context adds."""
        columns = [self._more_at(load, float(context), drafts_G) for context in contexts_C]
        return np.maximum.accumulate(np.stack(columns, axis=1), axis=1)

    def _smooth(self, load: int, cells: Sequence[Cell]) -> dict[int, _Points]:
        """By drafts, over rows; of what was measured twice the mean."""
        found: dict[int, dict[int, list[Cell]]] = defaultdict(lambda: defaultdict(list))
        for cell in cells:
            if (cell.num_sequences, cell.context) == (load, self._shortest[load]):
                found[self._drafts_of(cell)][self._rows(cell)].append(cell)
        points = {}
        for drafts, by_rows in sorted(found.items()):
            rows = sorted(by_rows)
            ms_N = np.array([np.mean([self._ms_of(cell) for cell in by_rows[each]]) for each in rows])
            iqr_N = np.array([max(cell.step.iqr for cell in by_rows[each]) for each in rows])
            points[drafts] = _Points(np.array(rows, dtype=np.float64), monotone(ms_N.clip(min=0), iqr_N))
        return points

    def _rows(self, cell: Cell) -> int:
        return int(ceil_to_tiers(np.array([cell.rows]), self._tiers)[0])

    def _widest(self, load: int) -> _Points:
        """Of the longest draft: it has the most rows."""
        points = self._points[load]
        return points[max(points)]

    def _slope(self, load: int) -> float:
        """Of rows beyond what was measured of a load, ms per row."""
        slope = self._widest(load).slope
        if slope is not None:
            return slope
        larger = [other for other in self.loads if other > load] or [other for other in self.loads if other < load]
        if not larger:
            return 0.0
        here, there = (self._widest(one) for one in (load, larger[0]))
        rows = there.rows_N[0] - here.rows_N[0]
        return max(0.0, float((there.ms_N[0] - here.ms_N[0]) / rows)) if rows else 0.0

    def _going_on(self, load: int, rows_U: Floats) -> Floats:
        """The longest draft's curve, and beyond it."""
        points = self._widest(load)
        ms_U, end = points.at(rows_U), points.rows_N[-1]
        slope = self._slope(load)
        for larger in (other for other in self.loads if other > load):
            next_end = self._widest(larger).rows_N[-1]
            if next_end > end:
                slope = self._slope(larger)
                ms_U = ms_U + slope * (rows_U.clip(end, next_end) - end)
                end = next_end
        return np.asarray(ms_U + slope * (rows_U - end).clip(min=0))

    def _extended(self, load: int, drafts: int, points: _Points, rows_U: Floats) -> Floats:
        ms_U = points.at(rows_U)
        if drafts == 0 and self._idles_at_0:
            return ms_U
        source, end = min(load, self.loads[-1]), points.rows_N[-1]
        beyond_U = self._going_on(source, rows_U.clip(min=end)) - self._going_on(source, np.array([end]))
        return np.asarray(ms_U + beyond_U)

    def _longer(self, load: int, cells: Sequence[Cell]) -> dict[float, dict[int, float]]:
        """By context, rising, and drafts: the mean over rows of what the context adds, nothing at the shortest one."""
        shortest = self._shortest[load]
        found: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for cell in cells:
            if cell.num_sequences == load and cell.context > shortest:
                drafts = self._drafts_of(cell)
                rows_U = np.array([float(self._rows(cell))])
                known = {each: self._extended(load, each, one, rows_U) for each, one in self._points[load].items()}
                before = float(_between(known, np.array([drafts]))[0, 0])
                found[cell.context][drafts].append(self._ms_of(cell) - before)
        zero = {shortest: {0: 0.0}}
        return zero | {
            context: {drafts: float(np.mean(values)) for drafts, values in found[context].items()}
            for context in sorted(found)
        }

    def _more_at(self, load: int, context: float, drafts_G: Ints) -> Floats:
        """[G]. Beyond a load's longest context the largest load with a longer one tells how it goes on."""
        source = min(load, self.loads[-1])
        if source < load:
            return self._more_at(source, context, drafts_G) * load / source
        known = self._more[load]
        contexts = np.array(list(known))
        knots_CG = np.maximum.accumulate(
            np.stack([_between({k: np.array([ms]) for k, ms in known[c].items()}, drafts_G)[:, 0] for c in known]),
            axis=0,
        )
        within_G = np.array([np.interp(context, contexts, knots_C) for knots_C in knots_CG.T])
        longest = float(contexts[-1])
        if context <= longest:
            return within_G
        donors = [other for other in self.loads if other != load and max(self._more[other]) > longest]
        if donors:
            donor = donors[-1]
            growth_G = self._more_at(donor, context, drafts_G) - self._more_at(donor, longest, drafts_G)
            return np.asarray(within_G + growth_G * load / donor)
        if len(contexts) == 1:
            return within_G
        slope_G = (knots_CG[-1] - knots_CG[-2]) / (contexts[-1] - contexts[-2])
        return np.asarray(within_G + slope_G * (context - longest))


def _between(table: dict[int, Floats], drafts_G: Ints) -> Floats:
    """[G, ...] from what some numbers of drafts have: in proportion between two of them and beyond the last, of which
    it is never less; below the first, that one."""
    known = sorted(table)
    first, last = known[0], known[-1]
    if first == last:
        return np.stack([table[first]] * len(drafts_G))
    rows = []
    for drafts in np.maximum(drafts_G, first).tolist():
        above = max(1, min(bisect_left(known, drafts), len(known) - 1))
        low, high = known[above - 1], known[above]
        value = table[low] + (drafts - low) / (high - low) * (table[high] - table[low])
        rows.append(np.maximum(value, table[last]) if drafts > last else value)
    return np.stack(rows)
