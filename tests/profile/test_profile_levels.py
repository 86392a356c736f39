"""A slow moment of a sweep says nothing of one cell beside another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.profile.drive import StepRecord
from runtime.profile.levels import levelled
from workers.plan import StepTimings

COSTS = {"short": 1.0, "middle": 2.0, "long": 7.0}


def record(seconds: float) -> StepRecord:
    return StepRecord(
        wall_s=seconds,
        rows=1,
        context=8.0,
        slowest=StepTimings(total_s=seconds, target_s=seconds / 2, draft_s=seconds / 4, expert_rows=5),
        expert_rows=(5,),
    )


def sweep(levels: list[float]) -> dict[str, list[StepRecord]]:
    return {name: [record(cost * level) for level in levels] for name, cost in COSTS.items()}


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=9))
def test_cells_keep_their_ratios_whatever_all_rounds_are_slowed_by(levels: list[float]) -> None:
    found = levelled(sweep(levels))
    usual = float(np.exp(np.median(np.log(levels))))
    for name, cost in COSTS.items():
        assert [one.wall_s for one in found[name]] == pytest.approx([cost * usual] * len(levels))


def test_a_slow_end_of_a_sweep_does_not_make_the_cells_that_ended_it_dearer() -> None:
    """Two of five rounds are slow; of one cell a third is, since it came last in that round."""
    slow = sweep([1.0, 1.0, 1.0, 2.0, 2.0])
    slow["long"][2] = record(COSTS["long"] * 2.0)
    assert np.median([one.wall_s for one in slow["long"]]) == 14.0
    found = levelled(slow)
    assert [float(np.median([one.wall_s for one in found[name]])) for name in COSTS] == pytest.approx([1.0, 2.0, 7.0])


def test_all_times_of_a_step_go_with_it_and_its_counts_do_not() -> None:
    found = levelled(sweep([1.0, 1.0, 3.0]))["long"][2]
    assert (found.wall_s, found.slowest.target_s, found.slowest.draft_s) == pytest.approx((7.0, 3.5, 1.75))
    assert (found.slowest.expert_rows, found.expert_rows, found.rows) == (5, (5,), 1)
