"""One row of a loading table: which elements of a published tensor go where in a parameter. No family, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from parallel.slices import Span

Box = tuple[Span, ...]
"""A rectangular block of a tensor: one span per dimension."""


def box(*spans: Span | int) -> Box:
    """A block from spans; an integer n stands for the whole dimension [0, n)."""
    return tuple(span if isinstance(span, Span) else Span(0, span) for span in spans)


def num_elements(block: Box) -> int:
    return math.prod(span.length for span in block)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of the published tensor and the block of the parameter it fills.

    Both hold the same elements in the same order; the numbers of dimensions may differ, by dimensions of length 1
    (one expert of a stack, the middle dimension of a depthwise convolution).
    """

    source: Box
    target: Box

    def __post_init__(self) -> None:
        if num_elements(self.source) != num_elements(self.target):
            raise ValueError(f"source {self.source} and target {self.target} differ in size")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """How one published tensor is loaded by this rank.

    published: its name in the checkpoint.
    parameter: our parameter that it fills, alone or together with other tensors.
    shape: of the whole published tensor.
    pieces: what this rank keeps; empty where it keeps nothing.
    padding: blocks of the parameter that no published element fills; loaded as zeros.
    scheme: how elements are stored. "plain": as floating point numbers, cast to the parameter's dtype.
    """

    published: str
    parameter: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[Box, ...] = ()
    scheme: str = "plain"

    @property
    def num_kept(self) -> int:
        """Elements of the published tensor that this rank keeps."""
        return sum(num_elements(piece.source) for piece in self.pieces)


def table_shapes(table: Iterable[TensorRule]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that a table fills, in the table's order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in table:
        for target in (*(piece.target for piece in rule.pieces), *rule.padding):
            known = shapes.get(rule.parameter, (0,) * len(target))
            shapes[rule.parameter] = tuple(max(n, span.stop) for n, span in zip(known, target, strict=True))
    return shapes
