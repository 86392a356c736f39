"""A profile as pictures: SVG texts for a page. Pure; needs matplotlib, which is an extra."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from runtime.bench.canvas import MAX_PANELS, PANEL_HEIGHT, PANEL_WIDTH, STYLE, Picture, svg_text
from runtime.profile.document import Cell
from runtime.profile.forecast import ACCEPTANCES, Forecast

PARTS = (
    ("target", "target pass", "#f58518"),
    ("verify", "verification", "#eeca3b"),
    ("commit", "commit", "#54a24b"),
    ("draft", "draft", "#4c78a8"),
)
"""Fields of a cell; the rest of a step is the host and its links."""
REST = ("host and link", "#e45756")


def pictures(forecast: Forecast) -> list[Picture]:
    """All that was measured."""
    with matplotlib.rc_context(STYLE):
        return list(_pictures(forecast))


def _pictures(forecast: Forecast) -> Iterator[Picture]:
    for sampled in forecast.kinds:
        yield from _of_kind(forecast, sampled)
    if any(len(forecast.contexts(load)) > 1 for load in forecast.loads):
        yield Picture(
            title="Cost of context",
            caption="A step by mean committed length, as planning prices it; a line per load, sampled. Dots: where it "
            "was measured. Left: without drafts. Right: with the most.",
            svg=_contexts(forecast),
        )


def _of_kind(forecast: Forecast, sampled: bool) -> Iterator[Picture]:
    way = "sampled" if sampled else "greedy"
    yield Picture(
        title=f"Cost of rows, {way}",
        caption="Dots: as measured, at the shortest context. Left: the step without its draft part, a line per "
        "load with the most drafts waiting, as planning prices it. Right: the draft part, all drafts verified.",
        svg=_costs(forecast, sampled),
    )
    yield Picture(
        title=f"Where a step's time goes, {way}",
        caption="Milliseconds of one step by drafts per sequence, all verified, a panel per load. The parts are "
        "the slowest rank's.",
        svg=_panels(forecast, lambda axes, load: _parts(axes, _cells(forecast, load, sampled))),
    )
    yield Picture(
        title=f"Predicted tokens per second, {way}",
        caption="Over that without drafts, by the formula (1 − α^(γ+1)) / (1 − α) per step and sequence; a panel "
        "per load. Below 1 speculation costs more than it brings.",
        svg=_panels(forecast, lambda axes, load: _gain(axes, forecast, load, sampled)),
    )


def _costs(forecast: Forecast, sampled: bool) -> str:
    canvas = Canvas(figsize=(2 * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    by_rows, by_drafts = canvas.subplots(1, 2)
    longest = forecast.gammas[-1]
    for number, load in enumerate(forecast.loads):
        cells, colour = _cells(forecast, load, sampled), f"C{number}"
        if not cells:
            continue
        curve = forecast.costs.at(load, cells[0].context, sampled=sampled)
        rows = np.arange(load, max(cell.rows for cell in cells) + 1)
        # Without drafts the draft part is what reporting takes.
        step_ms = curve.step_ms(rows, waiting=longest, gamma=0) - cells[0].draft.median
        by_rows.plot(rows, step_ms, color=colour, label=str(load))
        places = [cell.rows for cell in cells]
        by_rows.plot(places, [cell.step.median - cell.draft.median for cell in cells], ".", color=colour)
        full = _all_verified(cells)
        by_drafts.plot([c.gamma for c in full], [c.draft.median for c in full], marker=".", color=colour)
    by_rows.set(xlabel="rows of the target pass", ylabel="ms without the draft part", ylim=(0, None))
    by_rows.set_xscale("log", base=2)
    by_rows.xaxis.set_major_formatter("{x:g}")
    by_drafts.set(xlabel="drafts drawn", ylabel="ms of the draft part", ylim=(0, None))
    canvas.legend(loc="outside right upper", title="sequences")
    return svg_text(canvas)


def _parts(axes: Axes, cells: Sequence[Cell]) -> None:
    full = _all_verified(cells)
    places = range(len(full))
    bottom = np.zeros(len(full))
    for name, label, colour in PARTS:
        heights = np.array([getattr(cell, name).median for cell in full])
        axes.bar(places, heights, bottom=bottom, color=colour, label=label)
        bottom += heights
    rest = np.array([cell.step.median for cell in full]) - bottom
    axes.bar(places, rest.clip(min=0), bottom=bottom, color=REST[1], label=REST[0])
    axes.set_xticks(places, [str(cell.gamma) for cell in full])
    axes.set(xlabel="drafts", ylabel="ms")


def _gain(axes: Axes, forecast: Forecast, load: int, sampled: bool) -> None:
    for number, acceptance in enumerate(ACCEPTANCES):
        speeds = [forecast.tokens_per_s(load, gamma, acceptance, sampled=sampled) for gamma in forecast.gammas]
        gains = np.array(speeds) / forecast.tokens_per_s(load, 0, acceptance, sampled=sampled)
        axes.plot(forecast.gammas, gains, marker=".", color=f"C{number}", label=f"α {acceptance:g}")
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.set(xlabel="drafts", ylabel="times as fast", ylim=(0, None))


def _contexts(forecast: Forecast) -> str:
    canvas = Canvas(figsize=(2 * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    longest = max(context for load in forecast.loads for context in forecast.contexts(load))
    for axes, gamma in zip(canvas.subplots(1, 2), (0, forecast.gammas[-1]), strict=True):
        for number, load in enumerate(forecast.loads):
            colour = f"C{number}"
            places = np.linspace(forecast.contexts(load)[0], longest, 50)
            line = [forecast.step_ms(load, gamma, context=float(place)) for place in places]
            axes.plot(places, line, color=colour, label=str(load) if gamma == 0 else None)
            cells = [cell for cell in forecast.profile.cells if cell.num_sequences == load and cell.sampled]
            dots = [cell for cell in cells if cell.gamma == gamma and cell.rows == load * (1 + gamma)]
            axes.plot([cell.context for cell in dots], [cell.step.median for cell in dots], ".", color=colour)
        axes.set(title=f"γ {gamma}", xlabel="mean committed length, tokens", ylabel="ms")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    canvas.legend(loc="outside right upper", title="sequences")
    return svg_text(canvas)


def _panels(forecast: Forecast, draw: Callable[[Axes, int], None]) -> str:
    """One for each load, a few in a row."""
    loads = forecast.loads
    width = min(len(loads), MAX_PANELS)
    height = math.ceil(len(loads) / width)
    canvas = Canvas(figsize=(width * PANEL_WIDTH, height * PANEL_HEIGHT), layout="constrained")
    panels = canvas.subplots(height, width, squeeze=False).flatten()
    for axes, load in zip(panels, loads, strict=False):
        draw(axes, load)
        axes.set(title=f"{load} at a time")
    for axes in panels[len(loads) :]:
        axes.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return svg_text(canvas)


def _cells(forecast: Forecast, load: int, sampled: bool) -> list[Cell]:
    """Of a load at its shortest context, by drafts and rows."""
    kind = [cell for cell in forecast.profile.cells if (cell.num_sequences, cell.sampled) == (load, sampled)]
    shortest = min((cell.context for cell in kind), default=0.0)
    return sorted((cell for cell in kind if cell.context == shortest), key=lambda cell: (cell.gamma, cell.rows))


def _all_verified(cells: Sequence[Cell]) -> list[Cell]:
    """Per draft length the cell of most rows."""
    return list({cell.gamma: cell for cell in cells}.values())
