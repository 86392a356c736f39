"""Exploring steps: by the step's number, by few sequences in turn, within the limit; never where nothing is hidden."""

from __future__ import annotations

import pytest
from fakes.planners import FormulaCosts

from runtime.verification.exploration import (
    EAGER,
    EXPLORERS,
    LITTLE,
    RESTING,
    Exploration,
    exploration,
    period,
    within_limit,
)
from runtime.verification.planner import Choice
from runtime.verification.speculation import Load, Traits

EVERY = 10


def choice(gamma: int, *, covers: bool = True, rows: int = 40) -> Choice:
    return Choice(gamma=gamma, budgets=(rows,), rows=rows, tokens=1.0, step_ms=1.0, covers=covers)


def load(first: int, count: int) -> Load:
    return Load(uids=tuple(range(first, first + count)), traits=(Traits(0, 0, None),) * count)


def test_it_comes_by_the_step_number_and_more_rarely_without_speculation() -> None:
    loads = [load(0, 3)]
    for gamma, every in ((2, EVERY), (0, EVERY * RESTING)):
        assert period(EVERY, choice(gamma), LITTLE) == every
        steps = [step for step in range(1, 100) if exploration(step, every, choice(gamma), 8, loads)]
        assert steps == list(range(every, 100, every))


@pytest.mark.parametrize("gamma", [0, 2])
def test_it_comes_often_while_little_is_known(gamma: int) -> None:
    assert period(64, choice(gamma), 0.0) == period(64, choice(gamma), LITTLE - 1) == 64 // EAGER
    assert period(2, choice(gamma), 0.0) == 2


def test_nothing_is_explored_where_nothing_is_left_out() -> None:
    assert exploration(EVERY, EVERY, choice(8), 8, [load(0, 3)]) is None
    assert exploration(EVERY, EVERY, choice(8, covers=False), 8, [load(0, 3)]) is not None
    assert exploration(EVERY, EVERY, choice(2), 8, [Load()]) is None


def test_it_goes_a_little_beyond_and_every_eighth_time_as_far_as_may_be() -> None:
    lengths = [
        found.gamma
        for turn in range(1, 17)
        if (found := exploration(turn * EVERY, EVERY, choice(3), 8, [load(0, 3)])) is not None
    ]
    assert lengths == [*[5] * 7, 8, *[5] * 7, 8]


@pytest.mark.parametrize("dp", [1, 2, 16])
def test_few_sequences_explore_in_turn_on_every_data_parallel_rank(dp: int) -> None:
    loads = [load(100 * rank, 12) for rank in range(dp)]
    seen: set[int] = set()
    share = max(1, EXPLORERS // dp)
    for turn in range(1, 13):
        found = exploration(turn * EVERY, EVERY, choice(3), 8, loads)
        assert found is not None
        assert [len(found.uids & set(one.uids)) for one in loads] == [share] * dp
        seen |= found.uids
    assert seen == {uid for one in loads for uid in one.uids}


def test_it_keeps_to_the_latency_limit() -> None:
    costs = FormulaCosts(gamma_max=8, base=10, per_row=1, per_draft=1)
    found = Exploration(EVERY, 8, frozenset(range(4)))
    # 16 sequences with 2 drafts each: 48 rows. Four explorers of γ: 16 + 24 + 4 γ rows.
    steady = choice(2, rows=48)
    bounded = [
        within_limit(found, steady, costs, limit_ms, num_sequences=16)
        for limit_ms in (10 + 72 + 2, 10 + 40 + 4 * 5 + 2, 10 + 40 + 4 * 3 + 2, 10 + 40 + 4 * 3 + 1.9)
    ]
    assert [one and one.gamma for one in bounded] == [8, 5, 3, None]
