"""What was simulated, on a terminal. Pure: from cells to a rich table and lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from runtime.simulate.study import Cell, ratio

REMARKS = (
    "γ: drafts drawn per step; K: share of the waiting drafts that was verified; stood: their share that stood; "
    "rows: of the busiest rank's pass",
    "ms/token: a sequence's time from token to token; gap: from one delivery of a sequence to the next, p50 / p99",
)
"""What the table needs said."""
NONE = "–"


def speed_table(cells: Sequence[Cell]) -> Table:
    """One row per cell."""
    table = Table(title="virtual time, per data-parallel rank", title_justify="left", box=None, pad_edge=False)
    columns = (
        "load",
        "policy",
        "tokens/s",
        "to off",
        "to fixed:5",
        "γ",
        "K",
        "stood",
        "tokens/step",
        "rows",
        "step ms",
        "ms/token",
        "gap ms",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for number, cell in enumerate(cells):
        figures = cell.figures
        if number and cells[number - 1].traffic != cell.traffic:
            table.add_section()
        drafts = figures.gamma > 0
        table.add_row(
            cell.load,
            cell.policy,
            f"{figures.tokens_per_s_per_rank:.0f}",
            *(NONE if to is None else f"{to:.3f}" for to in (ratio(cells, cell, "off"), ratio(cells, cell, "fixed:5"))),
            f"{figures.gamma:.2f}" if drafts else NONE,
            f"{figures.budget:.0%}" if drafts else NONE,
            f"{figures.accepted:.0%}" if drafts else NONE,
            f"{figures.tokens_per_step:.2f}",
            f"{figures.rows:.0f}",
            f"{figures.step_ms:.2f}",
            f"{figures.token_ms:.2f}",
            f"{figures.gap_p50_ms:.2f} / {figures.gap_p99_ms:.2f}",
        )
    return table
