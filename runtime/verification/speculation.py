"""What a planner of draft lengths is told of a step and what it answers. Values alone; knows no policy and no cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from workers.plan import IDENTITY, VERIFY_EVERYTHING, Calibration


class Traits(NamedTuple):
    """What of a request decides how it is drafted. temperature_class: see workers.plan. max_drafts: the request's own
    limit of drafts per round, None where it sets none."""

    priority: int
    temperature_class: int
    max_drafts: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one data-parallel rank has ready when a step is planned. Columns have one entry per sequence that can
    decode, in service order.

    waiting: drafts that wait for it. committed: its length, tokens. left: tokens it may still emit.
    entering: uids of sequences whose prompts may end in this step; entering_traits: theirs.
    num_prompt_rows: prompt tokens that wait for a pass, of all sequences.
    max_rows: most token rows of a pass.
    """

    uids: tuple[int, ...] = ()
    traits: tuple[Traits, ...] = ()
    waiting: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    entering: tuple[int, ...] = ()
    entering_traits: tuple[Traits, ...] = ()
    num_prompt_rows: int = 0
    max_rows: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpeculation:
    """One data-parallel rank's share of a decision.

    verify_budget: K. limits: drafts that wait after the step at most, for sequences that have a limit below γ.
    forced: of the drafts that wait now, how many are verified whatever their confidence, where any is.
    """

    verify_budget: int = VERIFY_EVERYTHING
    limits: Mapping[int, int] = field(default_factory=dict)
    forced: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A decision on one step: drafts to draw and whether the drafter runs, one answer for all ranks, since they join
    each other's passes; draft rows to verify, for each rank. The rest as in StepPlan."""

    gamma: int
    feed_drafter: bool
    batches: tuple[BatchSpeculation, ...]
    calibration: Calibration = IDENTITY
    min_survival: float = 0.0


class StepPlanner(Protocol):
    """Decides how far to speculate, step by step."""

    def decide(self, step_id: int, loads: Sequence[Load]) -> Speculation:
        """loads: one per data-parallel rank. The answer may rest on them and on steps before the one in which the
        drafts that wait were drawn, and on nothing else."""
        ...
