"""The report as one HTML page that needs nothing else: tables, pictures, and every difference of outputs. Knows no
files beside its template."""

from __future__ import annotations

from pathlib import Path

import jinja2

from runtime.bench import document, table
from runtime.bench.plots import pictures
from runtime.bench.report import load_text
from runtime.bench.verdict import NEAR
from runtime.bench.verdict_table import verdict_lines

TEMPLATE = Path(__file__).with_name("report.html.j2")


def page(report: document.Report) -> str:
    """HTML text. Needs matplotlib."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        load_text=load_text,
        limits_text=table.limits_text,
        verdict=table.verdict,
        verdict_lines=verdict_lines,
        near=NEAR,
        document=document,
    )
    environment.filters.update(figure=_figure)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(report=report, pictures=pictures(report), remarks=table.remarks(report))


def _figure(value: float | None, digits: int = 2) -> str:
    return table.NONE if value is None else f"{value:.{digits}f}"
