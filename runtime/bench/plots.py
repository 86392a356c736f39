"""The report's figures as pictures: SVG texts for a page. Pure; needs matplotlib, which is an extra."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from runtime.bench.canvas import (
    MAX_PANELS,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    STYLE,
    Picture,
    by_kind,
    colours_of,
    loads_of,
    offset,
    svg_text,
)
from runtime.bench.document import Cell, Figures, Group, Report, Spread
from runtime.bench.report import load_text
from runtime.bench.speed_plots import gamma_pictures, speed_pictures

PARTS = (
    ("draft_ms", "draft", "#4c78a8"),
    ("verify_ms", "verify", "#f58518"),
    ("state_ms", "state", "#54a24b"),
    ("host_and_link_ms", "host and link", "#e45756"),
)


def pictures(report: Report) -> list[Picture]:
    """All that the report's figures allow; what nothing was measured for is left out."""
    with matplotlib.rc_context(STYLE):
        return list(_pictures(report.groups, report.cells))


def _pictures(groups: Sequence[Group], cells: Sequence[Cell]) -> Iterator[Picture]:
    yield from speed_pictures(groups)
    if not groups:
        return
    for what, shown in by_kind(groups).items():
        yield _latencies(shown, what)
    if any(map(_drafts, groups)):
        yield Picture(
            title="Acceptance by position",
            caption="Drafts accepted / drafts verified, by position in the round, by the server's counters.",
            svg=_per_load(groups, _acceptance_panel),
        )
    if any(group.lengths and _drafts(group) for group in groups):
        yield Picture(
            title="Tokens per pass, counted and by formula",
            caption="Counted over full rounds, which 1 + Σ P(first j accepted) equals; beside it what one average "
            "acceptance rate α would give. Where the last bar stands apart, α misleads.",
            svg=_per_load([group for group in groups if group.lengths], _lengths_panel),
        )
        yield Picture(
            title="Accepted prefixes",
            caption="Share of full rounds by how many drafts were accepted.",
            svg=_per_load([group for group in groups if group.lengths], _prefix_panel),
        )
    yield from gamma_pictures(cells)
    yield _time_split(groups)


def _latencies(groups: Sequence[Group], what: str) -> Picture:
    panels: tuple[tuple[str, Callable[[Figures], Spread]], ...] = (
        ("first token", lambda figures: figures.latencies.first_token_ms),
        ("gap between tokens", lambda figures: figures.latencies.token_gap_ms),
        ("whole request", lambda figures: figures.latencies.request_ms),
    )
    canvas = Canvas(figsize=(len(panels) * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    loads, colours = loads_of(groups), colours_of(groups)
    for axes, (title, part) in zip(canvas.subplots(1, len(panels)), panels, strict=True):
        for number, (policy, colour) in enumerate(colours.items()):
            found = [
                (loads.index(load_text(group.load)) + offset(number, len(colours)), part(group.figures))
                for group in groups
                if group.policy == policy and part(group.figures).count
            ]
            x = [place for place, _ in found]
            for name, marker in (("p50", "o"), ("p90", "_"), ("p99", "^")):
                label = policy if name == "p50" else None
                axes.plot(x, [getattr(spread, name) for _, spread in found], marker, color=colour, label=label)
            axes.vlines(x, [spread.p50 for _, spread in found], [spread.p99 for _, spread in found], color=colour)
        axes.set(title=title, xlabel="at a time, or per second", ylabel="ms", ylim=(0, None))
        axes.set_xticks(range(len(loads)), [load.partition(",")[0].removesuffix(" at a time") for load in loads])
    axes.legend()
    return Picture(title=f"Latencies{what}", caption="Dot: median. Bar: 90 %. Triangle: 99 %.", svg=svg_text(canvas))


def _per_load(groups: Sequence[Group], draw: Callable[[Axes, Sequence[Group], dict[str, str]], None]) -> str:
    """A panel for each load, of its policies that draft; a few in a row."""
    drafting = [group for group in groups if _drafts(group)]
    loads = loads_of(drafting)
    width = min(len(loads), MAX_PANELS)
    height = math.ceil(len(loads) / width)
    canvas = Canvas(figsize=(width * PANEL_WIDTH, height * PANEL_HEIGHT), layout="constrained")
    panels = canvas.subplots(height, width, squeeze=False).flatten()
    for axes, load in zip(panels, loads, strict=False):
        draw(axes, [group for group in drafting if load_text(group.load) == load], colours_of(groups))
        axes.set(title=load)
    for axes in panels[len(loads) :]:
        axes.remove()
    # The last that has anything to name: readings of a load may all have failed.
    named = [axes for axes in panels[: len(loads)] if axes.get_legend_handles_labels()[0]]
    for axes in named[-1:]:
        axes.legend()
    return svg_text(canvas)


def _acceptance_panel(axes: Axes, groups: Sequence[Group], colours: dict[str, str]) -> None:
    longest = 0
    for group in groups:
        drafts = group.figures.drafts
        rates = [
            accepted / admitted for admitted, accepted in zip(drafts.admitted, drafts.accepted, strict=True) if admitted
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
        places = [place + offset(number, len(bars)) for place in range(len(groups))]
        axes.bar(places, heights, width=0.8 / len(bars), color=colour, label=label)
    axes.set_xticks(range(len(groups)), [group.policy for group in groups])
    axes.set(ylabel="tokens per pass")


def _prefix_panel(axes: Axes, groups: Sequence[Group], colours: dict[str, str]) -> None:
    longest = 0
    for number, group in enumerate(groups):
        if group.lengths is None:
            continue
        prefixes, full = group.lengths.accepted_prefixes, group.lengths.full_rounds
        places = [place + offset(number, len(groups)) for place in range(len(prefixes))]
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
        svg=svg_text(canvas),
    )


def _drafts(group: Group) -> bool:
    return sum(group.figures.drafts.drafted) > 0
