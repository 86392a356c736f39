"""What was simulated as pictures: SVG texts for a page. Pure; needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.figure import Figure as Canvas

from runtime.bench.canvas import MAX_PANELS, PANEL_HEIGHT, PANEL_WIDTH, STYLE, Picture, svg_text
from runtime.simulate.study import Cell, ratio


def pictures(cells: Sequence[Cell]) -> list[Picture]:
    """All that the cells allow."""
    with matplotlib.rc_context(STYLE):
        return list(_pictures(cells))


def _pictures(cells: Sequence[Cell]) -> Iterator[Picture]:
    yield Picture(
        title="Tokens per second and rank",
        caption="Each policy under each load, in virtual time; above each bar its ratio to off where that ran.",
        svg=_speed(cells),
    )
    dynamic = [cell for cell in cells if cell.policy.startswith("dynamic")]
    if dynamic:
        yield Picture(
            title="Draft lengths that the dynamic policy chose",
            caption="Share of steps by drafts drawn, exploring steps among them.",
            svg=_lengths(dynamic),
        )


def _speed(cells: Sequence[Cell]) -> str:
    loads = list(dict.fromkeys(cell.load for cell in cells))
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    width = min(len(loads), MAX_PANELS)
    height = -(-len(loads) // width)
    canvas = Canvas(figsize=(width * PANEL_WIDTH, height * PANEL_HEIGHT), layout="constrained")
    panels = canvas.subplots(height, width, squeeze=False).flatten()
    for axes, load in zip(panels, loads, strict=False):
        here = [cell for cell in cells if cell.load == load]
        heights = [cell.figures.tokens_per_s_per_rank for cell in here]
        colours = [f"C{policies.index(cell.policy)}" for cell in here]
        bars = axes.bar(range(len(here)), heights, color=colours)
        ratios = [ratio(cells, cell, "off") for cell in here]
        axes.bar_label(bars, ["" if one is None else f"{one:.2f}" for one in ratios], fontsize=7)
        axes.set_xticks(range(len(here)), [cell.policy for cell in here], rotation=40, ha="right")
        axes.set(title=load, ylabel="tokens/s per rank")
    for axes in panels[len(loads) :]:
        axes.remove()
    return svg_text(canvas)


def _lengths(cells: Sequence[Cell]) -> str:
    canvas = Canvas(figsize=(2 * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    axes = canvas.subplots()
    longest = max(len(cell.figures.steps_by_gamma) for cell in cells)
    for number, cell in enumerate(cells):
        counts = cell.figures.steps_by_gamma
        offset = (number - (len(cells) - 1) / 2) * 0.8 / len(cells)
        heights = [count / cell.figures.steps for count in counts]
        axes.bar([place + offset for place in range(len(counts))], heights, 0.8 / len(cells), label=cell.load)
    axes.set(xlabel="drafts per step", ylabel="share of steps", xticks=range(longest))
    axes.legend()
    return svg_text(canvas)
