"""Hardware profiles made of a formula instead of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from runtime.profile.document import Cell, Identity, Method, Profile, Timing

CREATED = datetime(2030, 1, 1, tzinfo=UTC)

Cost = Callable[[int, float, int, int], tuple[float, float]]
"""(sequences, context, drafts, rows) to milliseconds of the step without its draft part, and of that."""


def linear(load: int, context: float, drafts: int, rows: int) -> tuple[float, float]:
    """A step of a machine that has a price for everything and no corners."""
    verify = 5 + 0.2 * load + 0.1 * rows + 0.05 * drafts + 0.001 * load * context
    return verify, (0.5 + drafts * (1 + 0.02 * load) if drafts else 0.2)


def identity(**changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "model_type": "fake",
        "checkpoint": "abc",
        "dtype": "float32",
        "numerics": "default",
        "devices": ("cpu",),
        "machines": ("one core",),
        "torch_version": "2",
        "outrider_version": "0",
        "dp": 1,
        "tp": 1,
        "ep": 1,
        "worker_threads": 1,
        "collectives": "none",
        "page_size": 16,
        "gamma_max": 8,
        "max_step_tokens": 512,
    }
    return Identity(**(fields | changes))


def timing(ms: float, iqr: float = 0.0) -> Timing:
    return Timing(median=ms, iqr=iqr, n=7)


def cell(
    load: int,
    context: float,
    drafts: int,
    rows: int,
    ms: tuple[float, float],
    *,
    iqr: float = 0.0,
    sampled: bool = True,
) -> Cell:
    """ms: without the draft part, and of it."""
    verify, draft = ms
    return Cell(
        sampled=sampled,
        num_sequences=load,
        context=context,
        waiting=drafts,
        gamma=drafts,
        rows=rows,
        step=timing(verify + draft, iqr),
        target=timing(verify / 2),
        verify=timing(verify / 4),
        commit=timing(verify / 8),
        draft=timing(draft),
        collective=timing(0),
        dispatch=timing(0),
        combine=timing(0),
    )


def profile(cells: Sequence[Cell], *, tiers: tuple[int, ...] = (), **changes: Any) -> Profile:
    """changes: of the identity."""
    return Profile(
        identity=identity(**changes),
        created=CREATED,
        method=Method(warmup=2, repeats=7, routing="none", temperature=1.0, quick=False, duration_s=1.0),
        tiers=tiers,
        imbalance=None,
        cells=tuple(cells),
    )


def grid(
    cost: Cost = linear,
    *,
    loads: Sequence[int] = (1, 2, 4, 8),
    drafts: Sequence[int] = (0, 1, 2, 3, 4, 5, 8),
    contexts: Sequence[float] = (64, 512),
    longest_load: int = 4,
    sampled: bool = True,
) -> list[Cell]:
    """As `outrider profile` measures: everything at the first context, the ends at the others up to a load."""
    cells = []
    for load in loads:
        for waiting in drafts:
            for budget in sorted({round(load * waiting * share / 3) for share in range(4)}):
                ms = cost(load, contexts[0], waiting, load + budget)
                cells.append(cell(load, contexts[0], waiting, load + budget, ms, sampled=sampled))
        for context in contexts[1:] if load <= longest_load else ():
            for waiting in (0, drafts[-1]):
                rows = load * (1 + waiting)
                cells.append(cell(load, context, waiting, rows, cost(load, context, waiting, rows), sampled=sampled))
    return cells
