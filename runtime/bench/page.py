"""The report as one HTML page that needs nothing else: tables, pictures, and every difference of outputs. Knows no
files beside its template."""

from __future__ import annotations

from pathlib import Path

from runtime.bench import document, drafting, origin_table, table
from runtime.bench.plots import pictures
from runtime.bench.report import load_text
from runtime.bench.template import render
from runtime.bench.verdict import NEAR
from runtime.bench.verdict_table import verdict_lines

PARTS = (
    document.Latencies,
    document.Rates,
    drafting.Lengths,
    drafting.Origins,
    drafting.Work,
    document.TimeSplit,
    document.Memory,
    document.Agreement,
    document.Trial,
)
"""Whose fields a page explains."""

TEMPLATE = Path(__file__).with_name("report.html.j2")


def page(report: document.Report) -> str:
    """HTML text. Needs matplotlib."""
    return render(
        TEMPLATE,
        filters={"figure": _figure, "use": origin_table.use_text, "ended": origin_table.ended_text},
        report=report,
        pictures=pictures(report),
        remarks=[*table.remarks(report), *origin_table.origin_lines(report)],
        origin_rows=origin_table.origin_rows(report),
        load_text=load_text,
        limits_text=table.limits_text,
        verdict=table.verdict,
        verdict_lines=verdict_lines,
        near=NEAR,
        parts=PARTS,
    )


def _figure(value: float | None, digits: int = 2) -> str:
    return table.NONE if value is None else f"{value:.{digits}f}"
