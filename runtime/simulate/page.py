"""A study as one HTML page that needs nothing else: tables and pictures. Knows no files beside its template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.bench.template import render
from runtime.simulate import table
from runtime.simulate.plots import pictures
from runtime.simulate.study import Cell, Study

TEMPLATE = Path(__file__).with_name("simulation.html.j2")


def page(study: Study, cells: Sequence[Cell]) -> str:
    """HTML text. Needs matplotlib."""
    shown = table.speed_table(cells)
    return render(
        TEMPLATE,
        facts=[*study.facts],
        pictures=pictures(cells),
        table=shown,
        rows=list(zip(*(column.cells for column in shown.columns), strict=True)),
        remarks=[*table.REMARKS, *study.remarks],
    )
