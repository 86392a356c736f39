"""Ranks that answer a StepPlan in virtual time: real admission, chances for drafts, dummies for tokens. Know no policy
and nothing of how plans come about.

One data-parallel rank, one batch:

    admit the waiting drafts ──▶ coins ──▶ emit and clip ──▶ draw the next drafts, under the plan's calibration

The step lasts as long as its busiest rank's own composition costs.

Shapes: B columns of a batch, S slots, G draft positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel.mesh import Mesh
from runtime.link import RankPlace
from runtime.simulate.acceptance import SCORE_LIMIT, Acceptance, Decks, Hands
from runtime.simulate.clock import VirtualClock
from runtime.verification.costs import Ints, StepCosts
from workers.demands import Constraint
from workers.draft.admit import admit
from workers.plan import (
    NUM_TEMPERATURE_CLASSES,
    BatchPlan,
    BatchResult,
    Calibration,
    NewSequence,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerDescription,
    temperature_class,
)

TOKEN = 0
"""What every prompt and every output consists of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What one data-parallel rank's pass consists of. num_sequences: that decode. rows: known tokens and admitted
    drafts. waiting: the longest draft that waited. context: mean committed length of those that decode. sampled:
    whether any is not greedy."""

    num_sequences: int
    rows: int
    waiting: int
    context: float
    sampled: bool

    def step_ms(self, costs: StepCosts, *, gamma: int) -> float:
        """Of this composition alone; 0 for an idle rank."""
        if not self.rows:
            return 0.0
        curve = costs.at(max(1, self.num_sequences), max(1.0, self.context), sampled=self.sampled)
        return float(curve.step_ms(np.array([self.rows]), waiting=self.waiting, gamma=gamma)[0])


IDLE = Composition(num_sequences=0, rows=0, waiting=0, context=0.0, sampled=False)


class SimulatedRank:
    """One data-parallel rank's slots. A slot is numbered from 1, as the ledger does."""

    def __init__(self, acceptance: Acceptance, *, gamma_max: int, num_slots: int, seed: int) -> None:
        rows = num_slots + 1
        self._gamma_max = gamma_max
        self._decks = Decks(acceptance, gamma_max, rows, seed)
        self._waiting_SG = Hands.blank(rows, gamma_max)
        self._confidence_SG = np.zeros((rows, gamma_max), dtype=np.float32)
        self._uid_S, self._class_S, self._committed_S, self._emitted_S, self._max_tokens_S = (
            np.zeros(rows, dtype=np.int64) for _ in range(5)
        )
        self._drafted = tuple((TOKEN,) * number for number in range(gamma_max + 2))

    def run(self, plan: StepPlan, batch: BatchPlan) -> tuple[BatchResult, Composition]:
        """Carries out one batch."""
        for new in batch.admitted:
            self._enter(new)
        if not batch.slots:
            return BatchResult(), IDLE
        slots_B = np.array(batch.slots)
        drafts_B, known_B, samples_B = np.array(batch.num_drafts), np.array(batch.num_known), np.array(batch.samples)
        width = max(batch.num_drafts)
        hands_BG = self._waiting_SG[slots_B]
        admitted_B = admit(
            self._confidence_SG[slots_B][:, :width],
            drafts_B,
            self._uid_S[slots_B],
            batch.verify_budget,
            np.array(batch.num_forced) if batch.num_forced else None,
            plan.min_survival,
        )
        composition = self._composition(batch, slots_B, int(admitted_B.sum()))
        within_BG = np.arange(self._gamma_max) < admitted_B[:, None]
        accepted_B = np.cumprod(hands_BG.stands & within_BG, axis=1).sum(1)
        left_B = self._max_tokens_S[slots_B] - self._emitted_S[slots_B]
        num_emitted_B = np.where(samples_B, np.minimum(accepted_B + 1, left_B), 0)
        self._committed_S[slots_B] += np.where(self._emitted_S[slots_B] > 0, num_emitted_B, known_B)
        self._emitted_S[slots_B] += num_emitted_B
        self._draw(slots_B[samples_B], plan.gamma, plan.calibration)
        reached_B = np.minimum(accepted_B + 1, admitted_B)
        return (
            BatchResult(
                emitted=tuple(self._drafted[number] for number in num_emitted_B.tolist()),
                drafted=tuple(self._drafted[number] for number in batch.num_drafts),
                num_admitted=tuple(admitted_B.tolist()),
                num_accepted=tuple(accepted_B.tolist()),
                scores=_cut(hands_BG.score, batch.num_drafts),
                acceptance=_cut(hands_BG.chance.astype(np.float32), reached_B.tolist()),
            ),
            composition,
        )

    def _enter(self, new: NewSequence) -> None:
        self._decks.open(new.slot, new.uid)
        self._uid_S[new.slot], self._class_S[new.slot] = new.uid, temperature_class(new.temperature)
        self._committed_S[new.slot] = 0 if new.fork is None else self._committed_S[new.fork.slot]
        self._emitted_S[new.slot] = 0
        self._max_tokens_S[new.slot] = new.max_tokens

    def _composition(self, batch: BatchPlan, slots_B: Ints, num_admitted: int) -> Composition:
        decodes_B = self._emitted_S[slots_B] > 0
        committed = self._committed_S[slots_B][decodes_B]
        return Composition(
            num_sequences=int(decodes_B.sum()),
            rows=sum(batch.num_known) + num_admitted,
            waiting=max(batch.num_drafts),
            context=float(committed.mean()) if len(committed) else 0.0,
            sampled=bool((self._class_S[slots_B] > 0).any()),
        )

    def _draw(self, slots_N: Ints, gamma: int, calibration: Calibration) -> None:
        if not gamma or not len(slots_N):
            return
        hands_NG = self._decks.draw(slots_N)
        self._waiting_SG[slots_N] = hands_NG
        self._confidence_SG[slots_N] = _confidence(hands_NG.score, self._class_S[slots_N], calibration)


class SimulatedGroup:
    """A `runtime.link.LoadedGroup` of `dp` data-parallel ranks, and its link, which moves the clock.

    costs: of steps as they are; what a planner believes may be something else.
    noise: standard deviation of the logarithm of a step's time, about a mean of 1.
    imbalance: factor on every step, of what makes ranks wait for each other beyond the costs.
    newest: compositions of the newest step, one per data-parallel rank.
    """

    def __init__(
        self,
        description: WorkerDescription,
        costs: StepCosts,
        acceptance: Acceptance,
        clock: VirtualClock,
        *,
        dp: int,
        seed: int,
        noise: float = 0.0,
        imbalance: float = 1.0,
    ) -> None:
        self.mesh = Mesh(dp=dp)
        self.description = description
        self.epoch = 1
        self.newest: tuple[Composition, ...] = ()
        self._costs, self._clock = costs, clock
        self._noise, self._imbalance = noise, imbalance
        self._generator = np.random.default_rng((seed, 0))
        self._dp_ranks = [
            SimulatedRank(acceptance, gamma_max=description.gamma_max, num_slots=description.num_slots, seed=seed)
            for _ in range(dp)
        ]

    @property
    def link(self) -> SimulatedGroup:
        """Itself."""
        return self

    @property
    def ranks(self) -> tuple[WorkerDescription, ...]:
        """All are like the first."""
        return (self.description,) * self.mesh.size

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """They are nowhere."""
        return ()

    @property
    def lost(self) -> asyncio.Future[str]:
        """Never done."""
        return asyncio.get_running_loop().create_future()

    async def check_integrity(self) -> list[list[str]]:
        """They hold nothing that could be violated."""
        return [[] for _ in range(self.mesh.size)]

    async def prepare(self, constraint: Constraint) -> str:
        """Every constraint is as good as none."""
        return ""

    async def execute(self, plan: StepPlan) -> StepResult:
        """Answers at once; the clock stands at the step's end then. Steps without sequences take no time."""
        parts = [rank.run(plan, batch) for rank, batch in zip(self._dp_ranks, plan.batches, strict=True)]
        self.newest = tuple(composition for _, composition in parts)
        step_s = max(one.step_ms(self._costs, gamma=plan.gamma) for one in self.newest) / 1000 * self._imbalance
        if self._noise:
            step_s *= float(np.exp(self._noise * self._generator.standard_normal() - self._noise**2 / 2))
        self._clock.advance(step_s)
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            batches=tuple(result for result, _ in parts),
            timings=(StepTimings(total_s=step_s),),
        )


def _confidence(score_NG: NDArray[np.float32], class_N: Ints, calibration: Calibration) -> NDArray[np.float32]:
    """As ranks calibrate, in float32."""
    odds_NG = score_NG
    if calibration.slopes:
        table_2CG = np.array([calibration.slopes, calibration.offsets], dtype=np.float32).reshape(
            2, NUM_TEMPERATURE_CLASSES, -1
        )
        slope_NG, offset_NG = table_2CG[:, class_N]
        odds_NG = slope_NG * score_NG + offset_NG
    confidence_NG = np.float32(1) / (np.float32(1) + np.exp(-odds_NG))
    return np.where(score_NG > -SCORE_LIMIT, confidence_NG, np.float32(0))


def _cut(values_BG: NDArray[np.float32], lengths: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row[:length]) for row, length in zip(values_BG.tolist(), lengths, strict=True))
