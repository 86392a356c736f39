"""Advice of servers as one HTML page that needs nothing else: rates by draft length, and whether confidences come true.
Knows no server and no files beside its template; needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure as Canvas

from runtime.bench.canvas import PANEL_HEIGHT, PANEL_WIDTH, STYLE, Picture, svg_text
from runtime.bench.template import render

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2

TEMPLATE = Path(__file__).with_name("advice.html.j2")
LARGEST_DOT = 90.0
"""Points squared, of the bin with most drafts."""


def page(advice: Sequence[tuple[str, str, operator_pb2.AdvisePolicyResponse]]) -> str:
    """HTML text. advice: address, a line on the load, and the reply, of each server."""
    with matplotlib.rc_context(STYLE):
        servers = [(address, title, reply.sentence, list(_pictures(reply))) for address, title, reply in advice]
    return render(TEMPLATE, servers=servers)


def _pictures(reply: operator_pb2.AdvisePolicyResponse) -> Iterator[Picture]:
    yield Picture(
        title="By draft length",
        caption="Left: predicted tokens per second; the filled dot is the best. Right: tokens per sequence and step, "
        "by the estimated survival of each position, and by the geometric formula at one rate of acceptance.",
        svg=_by_length(reply),
    )
    if any(position.bins for position in reply.reliability):
        yield Picture(
            title="Confidence and acceptance",
            caption="What confidences foretold, and what became of the drafts, by draft position; dots on the line "
            "came true, larger ones are of more drafts. In brackets the expected calibration error.",
            svg=_reliability(reply),
        )


def _by_length(reply: operator_pb2.AdvisePolicyResponse) -> str:
    canvas = Canvas(figsize=(2 * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    rates, tokens = canvas.subplots(1, 2)
    gammas = [one.gamma for one in reply.advice]
    rates.plot(gammas, [one.tokens_per_s for one in reply.advice], marker="o", markerfacecolor="white", color="C0")
    best = reply.advice[reply.best_gamma]
    rates.plot([best.gamma], [best.tokens_per_s], marker="o", color="C0", linestyle="none")
    rates.set_ylabel("tokens per second")
    tokens.plot(gammas, [one.tokens for one in reply.advice], marker="o", color="C0", label="by survival")
    tokens.plot(gammas, [one.geometric_tokens for one in reply.advice], linestyle="--", color="C1", label="by formula")
    tokens.set_ylabel("tokens per sequence and step")
    tokens.legend()
    for axes in (rates, tokens):
        axes.set_xlabel("drafts per round")
        axes.set_ylim(bottom=0)
    return svg_text(canvas)


def _reliability(reply: operator_pb2.AdvisePolicyResponse) -> str:
    canvas = Canvas(figsize=(1.6 * PANEL_WIDTH, 1.4 * PANEL_HEIGHT), layout="constrained")
    axes = canvas.subplots()
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1)
    most = max(one.weight for position in reply.reliability for one in position.bins)
    errors = reply.calibration_error_by_position
    for number, position in enumerate(reply.reliability):
        if position.bins:
            axes.scatter(
                [one.confidence for one in position.bins],
                [one.acceptance for one in position.bins],
                s=[LARGEST_DOT * one.weight / most for one in position.bins],
                color=f"C{number}",
                label=f"draft {number + 1} ({errors[number]:.1%})",
            )
    axes.set_xlabel("confidence")
    axes.set_ylabel("acceptance")
    axes.legend(loc="upper left")
    return svg_text(canvas)
