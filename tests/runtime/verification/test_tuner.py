"""The draft length follows the load: kept while the load is like the last one, and no longer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fakes.planners import FormulaCosts

from runtime.verification.planner import Aim, Choice, Outlook
from runtime.verification.tuner import KEEP_STEPS, Question, Tuner

GAMMA_MAX = 4
QUESTION = Question(num_sequences=(1,), sampled=False, gammas=range(GAMMA_MAX + 1), aim=Aim())
COSTS = FormulaCosts(gamma_max=GAMMA_MAX, base=10, per_row=1, per_draft=1)
"""One sequence drafts at next to no cost; of a hundred each row counts."""


def outlook(count: int, survival: float = 0.5) -> Outlook:
    return Outlook(
        survival_EG=np.cumprod(np.full((count, GAMMA_MAX), survival), axis=1),
        caps_E=np.full(count, GAMMA_MAX),
        forced_E=np.zeros(count, dtype=np.int64),
        share=1.0,
    )


def follow(tuner: Tuner, step_id: int, count: int, survival: float = 0.5) -> Choice:
    question = replace(QUESTION, num_sequences=(count,))
    return tuner.follow(step_id, question, lambda: [outlook(count, survival)], COSTS, context=10.0)


def test_another_load_gets_its_own_length_at_once() -> None:
    tuner = Tuner()
    alone = follow(tuner, 1, 1)
    assert alone.gamma > 0
    assert follow(tuner, 2, 100).gamma == 0
    assert follow(tuner, 3, 1).gamma == alone.gamma


def test_under_one_load_an_answer_is_kept_for_some_steps() -> None:
    tuner = Tuner()
    kept = follow(tuner, 1, 1, survival=0.9)
    assert [follow(tuner, step, 1, survival=0.0) for step in range(2, 1 + KEEP_STEPS)] == [kept] * (KEEP_STEPS - 1)
    assert follow(tuner, 1 + KEEP_STEPS, 1, survival=0.0).gamma == 0
