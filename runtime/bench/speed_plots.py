"""Pictures of speed by load, and of what a dynamic policy chose over time. Pure; needs matplotlib, an extra."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from runtime.bench.canvas import MAX_PANELS, PANEL_HEIGHT, PANEL_WIDTH, Picture, by_kind, colours_of, svg_text
from runtime.bench.crossovers import crossovers, fastest
from runtime.bench.document import Cell, Group
from runtime.bench.report import load_text

DYNAMIC_COLOUR = "black"

Place = Callable[[Group], float]
"""Where a group stands on the axis of loads."""


def speed_pictures(groups: Sequence[Group]) -> Iterator[Picture]:
    """One for closed loops and one for open ones, where there are any."""
    closed = [group for group in groups if group.load.concurrency is not None]
    opened = [group for group in groups if group.load.rate is not None]
    if closed:
        yield _speed(closed, "concurrency", lambda group: float(group.load.concurrency or 0))
    if opened:
        yield _speed(opened, "requests per second offered", lambda group: group.load.rate or 0.0)


def _speed(groups: Sequence[Group], axis: str, place: Place) -> Picture:
    """A row for each kind of requests: speeds as they are, and beside those of the first policy."""
    kinds = by_kind(groups)
    canvas = Canvas(figsize=(3 * PANEL_WIDTH, len(kinds) * PANEL_HEIGHT), layout="constrained")
    rows = canvas.subplots(len(kinds), 2, squeeze=False)
    for (left, right), (what, shown) in zip(rows, kinds.items(), strict=True):
        _speed_panel(left, shown, place, relative=False)
        _speed_panel(right, shown, place, relative=True)
        left.set(xlabel=axis, ylabel="tokens/s", ylim=(0, None), title=f"tokens per second{what}")
        right.set(xlabel=axis, ylabel="ratio", title=f"beside {shown[0].policy}{what}")
        right.margins(y=0.12)
        _mark_crossovers(right, shown, place)
        left.legend()
    return Picture(
        title=f"Tokens per second by {axis}",
        caption="Upright lines reach from the slowest repeat to the fastest. Dotted lines: where another policy of one "
        "draft length becomes the fastest of those; its name stands above. Black: dynamic.",
        svg=svg_text(canvas),
    )


def _speed_panel(axes: Axes, groups: Sequence[Group], place: Place, *, relative: bool) -> None:
    baselines = _by_place([group for group in groups if group.policy == groups[0].policy], place) if relative else {}
    for policy, colour in colours_of(groups).items():
        points = []
        for at, group in sorted(_by_place([group for group in groups if group.policy == policy], place).items()):
            unit = baselines[at].figures.rates.tokens_per_s if at in baselines else math.nan
            scale = 1.0 if not relative else 1 / unit if unit else math.nan
            repeats = group.tokens_per_s_by_repeat
            points.append((at, group.figures.rates.tokens_per_s * scale, min(repeats) * scale, max(repeats) * scale))
        is_dynamic = policy.startswith("dynamic")
        colour = DYNAMIC_COLOUR if is_dynamic else colour
        x = [point[0] for point in points]
        axes.plot(
            x, [p[1] for p in points], marker="o", color=colour, label=policy, linewidth=2.5 if is_dynamic else 1.2
        )
        axes.vlines(x, [p[2] for p in points], [p[3] for p in points], color=colour)
    ticks = sorted({place(group) for group in groups})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _mark_crossovers(axes: Axes, groups: Sequence[Group], place: Place) -> None:
    """Among policies of one draft length that were measured at every place."""
    places = sorted({place(group) for group in groups})
    speeds: dict[str, list[float]] = {}
    for policy in dict.fromkeys(group.policy for group in groups if not group.policy.startswith("dynamic")):
        found = _by_place([group for group in groups if group.policy == policy], place)
        if found.keys() == set(places):
            speeds[policy] = [found[at].figures.rates.tokens_per_s for at in places]
    if len(speeds) < 2:
        return
    on_axis = [math.log2(at) for at in places]
    borders = [crossing.place for crossing in crossovers(on_axis, speeds)]
    for border in borders:
        axes.axvline(2**border, color="#888888", linestyle=":")
    best = fastest(speeds)
    names = [best[0], *(after for before, after in pairwise(best) if after != before)]
    for name, begin, end in zip(names, [on_axis[0], *borders], [*borders, on_axis[-1]], strict=True):
        middle, above = 2 ** ((begin + end) / 2), axes.get_xaxis_transform()
        axes.text(middle, 0.98, name, ha="center", va="top", transform=above, fontsize=8)


def _by_place(groups: Sequence[Group], place: Place) -> dict[float, Group]:
    return {place(group): group for group in groups}


def gamma_pictures(cells: Sequence[Cell]) -> Iterator[Picture]:
    """Draft lengths over time, of cells whose policy chooses them; none without such."""
    shown = [cell for cell in cells if cell.policy.startswith("dynamic") and cell.series.at_s]
    if not shown:
        return
    names = list(dict.fromkeys((load_text(cell.load), cell.policy) for cell in shown))
    width = min(len(names), MAX_PANELS)
    height = math.ceil(len(names) / width)
    canvas = Canvas(figsize=(width * PANEL_WIDTH, height * PANEL_HEIGHT), layout="constrained")
    panels = canvas.subplots(height, width, squeeze=False).flatten()
    longest = max(max(cell.series.gamma) for cell in shown)
    for axes, (load, policy) in zip(panels, names, strict=False):
        for cell in shown:
            if (load_text(cell.load), cell.policy) == (load, policy):
                axes.step(cell.series.at_s, cell.series.gamma, where="post", alpha=0.6, linewidth=1)
        axes.set(title=f"{load}\n{policy}", xlabel="s", ylabel="γ", ylim=(-0.3, longest + 0.3))
        axes.set_yticks(range(longest + 1))
    for axes in panels[len(names) :]:
        axes.remove()
    yield Picture(
        title="Draft length over time",
        caption="Drafts drawn for each sequence in the newest step, sampled ten times a second; a line per repeat.",
        svg=svg_text(canvas),
    )
