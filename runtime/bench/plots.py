"""The report's figures as pictures: SVG texts for a page. Pure; needs matplotlib, which is an extra."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from runtime.bench.document import Figures, Group, Report, Spread
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
PARTS = (
    ("draft_ms", "draft", "#4c78a8"),
    ("verify_ms", "verify", "#f58518"),
    ("state_ms", "state", "#54a24b"),
    ("host_and_link_ms", "host and link", "#e45756"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """svg: an element to put into a page as it is."""

    title: str
    caption: str
    svg: str


def pictures(report: Report) -> list[Picture]:
    """All that the report's figures allow; what nothing was measured for is left out."""
    with matplotlib.rc_context(STYLE):
        return list(_pictures(report.groups))


def _pictures(groups: Sequence[Group]) -> Iterator[Picture]:
    closed = [group for group in groups if group.load.concurrency is not None]
    opened = [group for group in groups if group.load.rate is not None]
    if closed:
        yield _speed(closed, "concurrency", lambda group: float(group.load.concurrency or 0))
    if opened:
        yield _speed(opened, "requests per second offered", lambda group: group.load.rate or 0.0)
    if not groups:
        return
    yield _latencies(groups)
    if any(map(_drafts, groups)):
        yield Picture(
            title="Acceptance by position",
            caption="Drafts accepted / drafts made, by position in the round; all rounds, by the server's counters.",
            svg=_per_load(groups, _acceptance_panel),
        )
        yield Picture(
            title="Tokens per pass, counted and by formula",
            caption="Counted over full rounds, which 1 + Σ P(first j accepted) equals; beside it what one average "
            "acceptance rate α would give. Where the last bar stands apart, α misleads.",
            svg=_per_load(groups, _lengths_panel),
        )
        yield Picture(
            title="Accepted prefixes",
            caption="Share of full rounds by how many drafts were accepted.",
            svg=_per_load(groups, _prefix_panel),
        )
    yield _time_split(groups)


def _speed(groups: Sequence[Group], axis: str, place: Callable[[Group], float]) -> Picture:
    canvas = Canvas(figsize=(2 * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    axes = canvas.subplots()
    for policy, colour in _colours(groups).items():
        points = sorted(
            (place(group), group.figures.rates.tokens_per_s, group.tokens_per_s_by_repeat)
            for group in groups
            if group.policy == policy
        )
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, marker="o", color=colour, label=policy)
        axes.vlines(x, [min(point[2]) for point in points], [max(point[2]) for point in points], color=colour)
    ticks = sorted({place(group) for group in groups})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(xlabel=axis, ylabel="tokens/s", ylim=(0, None))
    axes.legend()
    return Picture(
        title=f"Tokens per second by {axis}",
        caption="Upright lines reach from the slowest repeat to the fastest.",
        svg=_svg(canvas),
    )


def _latencies(groups: Sequence[Group]) -> Picture:
    panels: tuple[tuple[str, Callable[[Figures], Spread]], ...] = (
        ("first token", lambda figures: figures.latencies.first_token_ms),
        ("gap between tokens", lambda figures: figures.latencies.token_gap_ms),
        ("whole request", lambda figures: figures.latencies.request_ms),
    )
    canvas = Canvas(figsize=(len(panels) * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    loads, colours = _loads(groups), _colours(groups)
    for axes, (title, part) in zip(canvas.subplots(1, len(panels)), panels, strict=True):
        for number, (policy, colour) in enumerate(colours.items()):
            found = [
                (loads.index(load_text(group.load)) + _offset(number, len(colours)), part(group.figures))
                for group in groups
                if group.policy == policy and part(group.figures).count
            ]
            x = [place for place, _ in found]
            for name, marker in (("p50", "o"), ("p90", "_"), ("p99", "^")):
                label = policy if name == "p50" else None
                axes.plot(x, [getattr(spread, name) for _, spread in found], marker, color=colour, label=label)
            axes.vlines(x, [spread.p50 for _, spread in found], [spread.p99 for _, spread in found], color=colour)
        axes.set(title=title, xlabel="at a time, or per second", ylabel="ms", ylim=(0, None))
        axes.set_xticks(range(len(loads)), [load.removesuffix(" at a time") for load in loads])
    axes.legend()
    return Picture(title="Latencies", caption="Dot: median. Bar: 90 %. Triangle: 99 %.", svg=_svg(canvas))


def _per_load(groups: Sequence[Group], draw: Callable[[Axes, Sequence[Group], dict[str, str]], None]) -> str:
    """A panel for each load, of its policies that draft; a few in a row."""
    drafting = [group for group in groups if _drafts(group)]
    loads = _loads(drafting)
    width = min(len(loads), MAX_PANELS)
    height = math.ceil(len(loads) / width)
    canvas = Canvas(figsize=(width * PANEL_WIDTH, height * PANEL_HEIGHT), layout="constrained")
    panels = canvas.subplots(height, width, squeeze=False).flatten()
    for axes, load in zip(panels, loads, strict=False):
        draw(axes, [group for group in drafting if load_text(group.load) == load], _colours(groups))
        axes.set(title=load)
    for axes in panels[len(loads) :]:
        axes.remove()
    # The last that has anything to name: readings of a load may all have failed.
    named = [axes for axes in panels[: len(loads)] if axes.get_legend_handles_labels()[0]]
    for axes in named[-1:]:
        axes.legend()
    return _svg(canvas)


def _acceptance_panel(axes: Axes, groups: Sequence[Group], colours: dict[str, str]) -> None:
    longest = 0
    for group in groups:
        drafts = group.figures.drafts
        rates = [
            accepted / drafted for drafted, accepted in zip(drafts.drafted, drafts.accepted, strict=True) if drafted
        ]
        longest = max(longest, len(rates))
        axes.plot(range(1, len(rates) + 1), rates, marker="o", color=colours[group.policy], label=group.policy)
    axes.set(xlabel="position of the draft", ylabel="accepted", ylim=(0, 1.05), xticks=range(1, longest + 1))


def _lengths_panel(axes: Axes, groups: Sequence[Group], colours: dict[str, str]) -> None:
    bars = (
        ("counted", "tokens_per_full_round", "#4c78a8"),
        ("1 + Σ P", "by_survival", "#54a24b"),
        ("by one rate α", "by_rate", "#e45756"),
    )
    for number, (label, name, colour) in enumerate(bars):
        heights = [getattr(group.lengths, name, None) or 0.0 for group in groups]
        places = [place + _offset(number, len(bars)) for place in range(len(groups))]
        axes.bar(places, heights, width=0.8 / len(bars), color=colour, label=label)
    axes.set_xticks(range(len(groups)), [group.policy for group in groups])
    axes.set(ylabel="tokens per pass")


def _prefix_panel(axes: Axes, groups: Sequence[Group], colours: dict[str, str]) -> None:
    longest = 0
    for number, group in enumerate(groups):
        if group.lengths is None:
            continue
        prefixes, full = group.lengths.accepted_prefixes, group.lengths.full_rounds
        places = [place + _offset(number, len(groups)) for place in range(len(prefixes))]
        heights = [count / full if full else 0.0 for count in prefixes]
        axes.bar(places, heights, width=0.8 / len(groups), color=colours[group.policy], label=group.policy)
        longest = max(longest, len(prefixes))
    axes.set(xlabel="drafts accepted", ylabel="share of rounds", xticks=range(longest))


def _time_split(groups: Sequence[Group]) -> Picture:
    shown = [(group, group.figures.time_per_token) for group in groups if group.figures.time_per_token]
    canvas = Canvas(figsize=(2 * PANEL_WIDTH, 1.0 + 0.3 * len(shown)), layout="constrained")
    axes = canvas.subplots()
    left = [0.0] * len(shown)
    for name, label, colour in PARTS:
        widths = [float(getattr(split, name)) for _, split in shown]
        axes.barh(range(len(shown)), widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shown)), [f"{load_text(group.load)}, {group.policy}" for group, _ in shown])
    axes.invert_yaxis()
    axes.set(xlabel="ms per committed token")
    canvas.legend(loc="outside upper center", ncols=len(PARTS))
    return Picture(
        title="Time per committed token",
        caption="Time of steps over the tokens they committed, prefill in every part, by what the slowest rank did. "
        "Verify: from the plan's arrival to the end of verification. State: committing. Draft: drafting and reporting. "
        "Host and link: planning, booking, and the way to the rank and back.",
        svg=_svg(canvas),
    )


def _drafts(group: Group) -> bool:
    return sum(group.figures.drafts.drafted) > 0


def _loads(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(load_text(group.load) for group in groups))


def _colours(groups: Sequence[Group]) -> dict[str, str]:
    """One for each policy, in order."""
    return {policy: f"C{number}" for number, policy in enumerate(dict.fromkeys(group.policy for group in groups))}


def _offset(number: int, of: int) -> float:
    """Where the `number`-th of some neighbours stands beside their common place."""
    return (number - (of - 1) / 2) * 0.8 / of


def _svg(canvas: Canvas) -> str:
    """The element alone: no XML head, no document type and no metadata, which would name addresses of others."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
