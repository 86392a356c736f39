"""All that planning knows of drafts: rounds that are over. Knows no cost, no policy and no waiting draft.

Every statistic carries the step in which the newest drafts it is of were drawn, and is used only for drafts drawn later
(`check_causal`). That is what keeps the budget of a step independent of the drafts it is spent on.

Rounds whose drafts were looked up are evidence of their sequences, by their scores as they are; what scores of the
drafter mean, and how often its drafts stand, is learnt from its own rounds alone.

Shapes: R sequences, G draft positions, E rows of evidence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.request import Request
from runtime.settlement import Outcome
from runtime.verification.calibration import Calibrator, Reached, sigmoid
from runtime.verification.costs import Floats, Ints
from runtime.verification.planner import Outlook
from runtime.verification.speculation import Load
from runtime.verification.survival import SurvivalBook
from workers.plan import StepPlan, temperature_class


@dataclass(frozen=True, slots=True)
class Witnessed:
    """A step that is over, with the steps in which the drafts that waited in it were drawn, one per round."""

    plan: StepPlan
    rounds: Sequence[tuple[Request, Outcome]]
    drawn: Sequence[int]


class History:
    """Owns the calibration and the book of survivals.

    gamma_max: G. capacity: sequences that may run at once, of all data-parallel ranks.
    """

    def __init__(self, gamma_max: int, *, capacity: int) -> None:
        self.gamma_max = gamma_max
        self.calibrator = Calibrator(gamma_max)
        self.survivals = SurvivalBook(gamma_max, capacity=2 * capacity)
        # The step of each sequence's newest drafts, in the order of those steps.
        self._drafted_at: OrderedDict[int, int] = OrderedDict()
        self._num_remembered = 4 * capacity + 4096
        self._prior_CG: Floats | None = None

    def witness(self, plan: StepPlan, rounds: Sequence[tuple[Request, Outcome]]) -> Witnessed:
        """Takes down who drew in a step that is over: their drafts wait now. To be learnt from by `note`, then or
        later, steps in order."""
        drawn = [self._drafted_at.get(request.uid, plan.step_id - 1) for request, _ in rounds]
        for request, outcome in rounds:
            if outcome.samples and plan.gamma:
                self._drafted_at[request.uid] = plan.step_id
                self._drafted_at.move_to_end(request.uid)
        # Not those of this step alone: drafts may wait longer, where a step has no rows for all sequences.
        while len(self._drafted_at) > self._num_remembered:
            self._drafted_at.popitem(last=False)
        return Witnessed(plan, rounds, drawn)

    def note(self, step: Witnessed) -> None:
        """Learns scores and acceptance of the drafts that waited in a step. Of those that it has drawn nothing is
        known."""
        seen = [
            (request, outcome, drawn)
            for (request, outcome), drawn in zip(step.rounds, step.drawn, strict=True)
            if outcome.num_drafts
        ]
        if seen:
            self._note_drafts(step.plan, seen)
            self._prior_CG = None
        self.calibrator.refit(step.plan.step_id)

    def check_causal(self, step_id: int, load: Load) -> None:
        """Asserts that nothing which is used for this step knows of the drafts that wait for it."""
        assert self.calibrator.calibration.version < step_id, "the calibration is of the step it is used in"
        for uid, waiting in zip(load.uids, load.waiting, strict=True):
            if waiting:
                seen, drawn = self.survivals.step_of(uid), self._drafted_at.get(uid, step_id)
                assert seen < drawn < step_id, f"sequence {uid}: statistics of step {seen} for drafts of step {drawn}"

    def oldest_waiting(self, step_id: int, loads: Sequence[Load]) -> int:
        """The step in which the oldest of the drafts that wait were drawn; `step_id` where none waits."""
        return min(
            (
                self._drafted_at.get(uid, -1)
                for load in loads
                for uid, waiting in zip(load.uids, load.waiting, strict=True)
                if waiting
            ),
            default=step_id,
        )

    def outlook(
        self, uids: Sequence[int], classes: Ints, caps_R: Ints, forced_R: Ints, *, num_prompt_rows: int
    ) -> Outlook:
        """What to expect of the drafts of some sequences, in a pass with prompt rows besides.

        classes: temperature classes, [R]; caps_R, forced_R: as in Outlook.
        """
        survival_EG, of_E, share = self.survivals.evidence(uids, self.prior()[classes])
        return Outlook(
            survival_EG=survival_EG,
            caps_E=caps_R[of_E],
            forced_E=forced_R[of_E],
            share=share,
            num_prompt_rows=num_prompt_rows,
        )

    def mean_survival(self, uids: Sequence[int]) -> Floats:
        """By position, over the newest rounds of sequences; empty where nothing is known of any."""
        return self.survivals.mean(uids, self.usual_survival())

    def prior(self) -> Floats:
        """Survival by class and position where nothing is known of a sequence, [C, G]."""
        if self._prior_CG is None:
            self._prior_CG = np.cumprod(self.calibrator.rates(), axis=1, dtype=np.float64)
        return self._prior_CG

    def usual_survival(self) -> Floats:
        """Survival by position over the requests that there were, [G]."""
        reached_C = self.calibrator.reached_by_class()
        weight_C = reached_C / reached_C.sum() if reached_C.any() else np.full(len(reached_C), 1 / len(reached_C))
        usual: Floats = weight_C @ self.prior()
        return usual

    def _note_drafts(self, plan: StepPlan, seen: Sequence[tuple[Request, Outcome, int]]) -> None:
        """seen: with the step in which the drafts were drawn."""
        classes = np.array([temperature_class(request.sampling.temperature) for request, *_ in seen], dtype=np.int64)
        width = max(len(outcome.scores) for _, outcome, _ in seen)
        scores_RG = np.array(
            [[*outcome.scores, *[np.nan] * (width - len(outcome.scores))] for _, outcome, _ in seen], dtype=np.float64
        )
        confidence_RG = np.full((len(seen), self.gamma_max), np.nan)
        # What was looked up comes before the drafter's own, and says its chance itself.
        looked_up_R = np.array([outcome.num_looked_up for _, outcome, _ in seen])
        confidence_RG[:, :width] = np.where(
            np.arange(width) < looked_up_R[:, None],
            sigmoid(scores_RG),
            self.calibrator.confidence(scores_RG, classes),
        )
        uids, drawn = [request.uid for request, *_ in seen], [drawn for *_, drawn in seen]
        self.survivals.note(uids, np.cumprod(confidence_RG, axis=1, dtype=np.float64), drawn)

        whole = [_verified_whole(plan, dp_rank) for dp_rank in range(len(plan.batches))]
        reached = [
            (classes[i], position, outcome.scores[position], label, outcome.slot in whole[outcome.dp_rank])
            for i, (_, outcome, _) in enumerate(seen)
            for position, label in enumerate(outcome.acceptance)
            if position >= outcome.num_looked_up
        ]
        columns = list(zip(*reached, strict=True)) or [(), (), (), (), ()]
        self.calibrator.note(
            Reached(
                classes=np.array(columns[0], dtype=np.int64),
                positions=np.array(columns[1], dtype=np.int64),
                scores=np.array(columns[2], dtype=np.float64),
                acceptance=np.array(columns[3], dtype=np.float64),
                uncensored=np.array(columns[4], dtype=np.bool_),
            ),
            step=max(drawn),
        )


def _verified_whole(plan: StepPlan, dp_rank: int) -> set[int]:
    """Slots all of whose waiting drafts the plan had verified, whatever their scores: nothing of them is left out."""
    batch = plan.batches[dp_rank]
    if batch.verify_budget >= sum(batch.num_drafts) and not plan.min_survival:
        return set(batch.slots)
    return {
        slot
        for slot, forced, drafts in zip(batch.slots, batch.num_forced, batch.num_drafts, strict=bool(batch.num_forced))
        if forced >= drafts > 0
    }
