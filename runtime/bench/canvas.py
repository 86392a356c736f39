"""What the report's pictures have in common: style, colours, places, and SVG texts. Knows no figures; needs matplotlib,
which is an extra."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure as Canvas

from runtime.bench.document import Group
from runtime.bench.report import load_text

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "svg.hashsalt": "outrider",  # the same report gives the same bytes
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}
PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.9
"""Inches."""
MAX_PANELS = 4
"""Side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """svg: an element to put into a page as it is."""

    title: str
    caption: str
    svg: str


def loads_of(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(load_text(group.load) for group in groups))


def by_kind(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups by whose drafts there were and what requests brought, in words for a title; those of a kind differ in
    policy, and in how many requests there were at a time or per second."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        load = group.load
        drafts = "" if load.acceptance is None else f", oracle drafts, α={load.acceptance:g}"
        found.setdefault(drafts if load.variant is None else f"{drafts}, {load.variant}", []).append(group)
    return found


def colours_of(groups: Sequence[Group]) -> dict[str, str]:
    """One for each policy, in order."""
    return {policy: f"C{number}" for number, policy in enumerate(dict.fromkeys(group.policy for group in groups))}


def offset(number: int, of: int) -> float:
    """Where the `number`-th of some neighbours stands beside their common place."""
    return (number - (of - 1) / 2) * 0.8 / of


def svg_text(canvas: Canvas) -> str:
    """The element alone: no XML head, no document type and no metadata, which would name addresses of others."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
