"""Which part of a large matrix a run takes: another each day, and the whole in the full run."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

SEED = int(os.environ.get("OUTRIDER_TEST_SEED") or datetime.date.today().toordinal())
"""Moves samples of large matrices: the day's number, unless the environment names another."""


def by_day(cases: Mapping[str, Any], count: int = 1) -> list[Any]:
    """Parameters of which every run has `count`, others each day, and the full run all."""
    chosen = {(SEED + i) % len(cases) for i in range(count)}
    return [
        pytest.param(case, id=name, marks=() if i in chosen else pytest.mark.full)
        for i, (name, case) in enumerate(cases.items())
    ]


def on_turn(turn: int, of: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test that runs every `of` days, those of its turn, and in the full run."""
    return (lambda test: test) if SEED % of == turn else pytest.mark.full
