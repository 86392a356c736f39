"""Follows the load with a draft length, for one dynamic policy: keeps the last answer for as long as it may hold.

Planning takes a good part of a millisecond; loads change little from step to step. Knows no sequence and no draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.verification.costs import StepCosts
from runtime.verification.planner import MIN_DWELL, Aim, Choice, Evidence, Outlook, choose

KEEP_STEPS = 8
"""Steps for which an answer is kept under the same load."""
KEEP_SHARE = 1 / 8
"""Change in the number of sequences, as a share, under which a load is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an answer is for. num_sequences: that will decode, per data-parallel rank. sampled: whether any of them is
    not greedy."""

    num_sequences: tuple[int, ...]
    sampled: bool
    gammas: range
    aim: Aim

    def is_like(self, other: Question) -> bool:
        """Whether an answer to the other one will do."""
        return (
            self.gammas == other.gammas
            and self.sampled == other.sampled
            and self.aim == other.aim
            and all(
                abs(mine - theirs) <= theirs * KEEP_SHARE
                for mine, theirs in zip(self.num_sequences, other.num_sequences, strict=True)
            )
        )


class Tuner:
    """choice: the steady state in force, and question: what it answers; None before the first."""

    def __init__(self) -> None:
        self.choice: Choice | None = None
        self.question: Question | None = None
        self._asked_at = 0
        self._since = 0

    def follow(
        self,
        step_id: int,
        question: Question,
        outlooks: Callable[[], Sequence[Outlook]],
        costs: StepCosts,
        *,
        context: float,
    ) -> Choice:
        """The steady state for this step's load. outlooks: asked for only where the answer is not kept."""
        is_known = self.question is not None and question.is_like(self.question)
        if self.choice is not None and is_known and step_id < self._asked_at + KEEP_STEPS:
            return self.choice
        previous = self.choice
        evidence = [Evidence(outlook, question.aim.min_survival) for outlook in outlooks()]
        self.choice = choose(
            evidence,
            costs,
            question.aim,
            context=context,
            sampled=question.sampled,
            gammas=question.gammas,
            previous=previous,
            # A length that another load was given has no claim to stay for a while.
            dwelt=step_id - self._since if is_known else MIN_DWELL,
        )
        if previous is None or previous.gamma != self.choice.gamma:
            self._since = step_id
        self.question, self._asked_at = question, step_id
        return self.choice
