"""Simulated ranks keep the contract of plans and draw what was asked of them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fakes.planners import FormulaCosts, planner_of
from fakes.requests import request
from fakes.worker import describe

from configs.schema import ServeSettings
from runtime.life import begin_life
from runtime.scheduler.queue import WaitingQueue
from runtime.settlement import outcomes
from runtime.simulate.acceptance import Acceptance, Luck
from runtime.simulate.clock import VirtualClock
from runtime.simulate.ranks import SimulatedGroup
from runtime.verification.policy import Fixed
from workers.draft.admit import admit
from workers.plan import BatchPlan, BatchResult, Calibration, NewSequence, StepPlan

GAMMA_MAX = 4


class Ranks:
    """One simulated rank of four slots whose sequences all decode, with `gamma` drafts waiting for each."""

    def __init__(self, gamma: int = GAMMA_MAX, *, max_tokens: int = 100, **model: Any) -> None:
        self.clock = VirtualClock()
        self.costs = FormulaCosts(gamma_max=GAMMA_MAX)
        self.group = SimulatedGroup(describe(), self.costs, Acceptance(**model), self.clock, dp=1, seed=7)
        self._step_id = 0
        entering = tuple(
            NewSequence(
                slot=slot,
                epoch=1,
                uid=10 + slot,
                prompt=(0, 0),
                tables=(),
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                seed=1,
                coupled=False,
                stop_token_ids=(),
                max_tokens=max_tokens,
            )
            for slot in (1, 2, 3, 4)
        )
        self.step(BatchPlan(admitted=entering, **self._columns(2, 0)), gamma=gamma)

    def step(self, batch: BatchPlan, **changes: Any) -> BatchResult:
        self._step_id += 1
        plan = StepPlan(step_id=self._step_id, epoch=1, batches=(batch,), **{"gamma": GAMMA_MAX, **changes})
        (result,) = asyncio.run(self.group.execute(plan)).batches
        return result

    def decode(self, drafts: int = GAMMA_MAX, *, plan: dict[str, Any] | None = None, **changes: Any) -> BatchResult:
        return self.step(BatchPlan(**{**self._columns(1, drafts), **changes}), **(plan or {}))

    def _columns(self, known: int, drafts: int) -> dict[str, Any]:
        return {
            "slots": (1, 2, 3, 4),
            "epochs": (1,) * 4,
            "num_known": (known,) * 4,
            "num_drafts": (drafts,) * 4,
            "samples": (True,) * 4,
            "max_committed": (9,) * 4,
            "num_unfed": (0,) * 4,
        }


def confidences(result: BatchResult, slope: float = 1.0, offset: float = 0.0) -> np.ndarray[Any, Any]:
    scores = np.array(result.scores, dtype=np.float32)
    return np.float32(1) / (np.float32(1) + np.exp(-(np.float32(slope) * scores + np.float32(offset))))


def test_what_is_admitted_is_what_the_real_rule_admits() -> None:
    ranks = Ranks(rates=(0.9,))
    for budget in (0, 1, 5, 11, 16):
        found = ranks.decode(verify_budget=budget)
        wanted = admit(confidences(found), np.full(4, GAMMA_MAX), np.array([11, 12, 13, 14]), budget)
        assert found.num_admitted == tuple(wanted)
        assert sum(found.num_admitted) == budget
        assert all(stood <= sent for stood, sent in zip(found.num_accepted, found.num_admitted, strict=True))


def test_forced_drafts_are_verified_and_unlikely_ones_are_not() -> None:
    ranks = Ranks(rates=(0.3,), score_noise=0.0)
    found = ranks.decode(num_forced=(2, 0, 0, 0), verify_budget=2)
    assert found.num_admitted == (2, 0, 0, 0)
    found = ranks.decode(plan={"min_survival": 0.5})
    survival = np.cumprod(confidences(found), axis=1)
    assert found.num_admitted == tuple((survival >= 0.5).sum(1))


def test_calibration_is_that_of_the_plan_that_drew_the_drafts() -> None:
    ranks = Ranks(rates=(0.6,))
    cells = 5 * GAMMA_MAX
    calibration = Calibration(version=1, slopes=(0.5,) * cells, offsets=(-1.0,) * cells)
    ranks.decode(plan={"calibration": calibration})
    found = ranks.decode(verify_budget=6)
    uids = np.array([11, 12, 13, 14])
    assert found.num_admitted == tuple(admit(confidences(found, 0.5, -1.0), np.full(4, GAMMA_MAX), uids, 6))


def test_labels_are_the_chances_of_the_positions_that_verification_reached() -> None:
    ranks = Ranks(rates=(0.6,), score_noise=0.0)
    for budget in (3, 9, 16):
        found = ranks.decode(verify_budget=budget)
        for scores, labels, admitted, accepted in zip(
            found.scores, found.acceptance, found.num_admitted, found.num_accepted, strict=True
        ):
            assert len(labels) == min(accepted + 1, admitted)
            # Without noise a score is the log-odds of the chance.
            assert labels == pytest.approx(1 / (1 + np.exp(-np.array(scores[: len(labels)]))), rel=1e-5)


def test_tokens_are_clipped_at_the_limit() -> None:
    ranks = Ranks(max_tokens=4, rates=(1.0,))
    assert [len(tokens) for tokens in ranks.decode().emitted] == [3] * 4
    assert ranks.group.newest[0].rows == 4 * (1 + GAMMA_MAX)


def test_a_step_takes_what_its_composition_costs() -> None:
    ranks = Ranks(rates=(0.6,))
    before = ranks.clock.now_s
    ranks.decode(verify_budget=5, plan={"gamma": 2})
    (one,) = ranks.group.newest
    assert (one.num_sequences, one.rows, one.waiting, one.context) == (4, 9, GAMMA_MAX, 2.0)
    wanted = ranks.costs.step_ms(np.array([9]), waiting=GAMMA_MAX, gamma=2)[0]
    assert (ranks.clock.now_s - before) * 1000 == pytest.approx(wanted)


@pytest.mark.parametrize("concentration", [2.0, 8.0, None])
def test_chances_have_the_mean_that_was_stated_and_coins_keep_to_them(concentration: float | None) -> None:
    model = Acceptance(rates=(0.8, 0.45), decay=0.5, concentration=concentration, spread=0.7)
    wanted = np.array([0.8, 0.45, 0.225, 0.1125])
    hands = [Luck(model, 4, (3, uid)).rounds(64) for uid in range(300)]
    chances, stands = np.stack([one.chance for one in hands]), np.stack([one.stands for one in hands])
    # Sequences lie up to 0.7 · min(m, 1 − m) to either side: a standard error of that / √3 / √300.
    assert chances.mean((0, 1)) == pytest.approx(wanted, abs=4 * 0.7 * 0.5 / 3**0.5 / 300**0.5)
    assert stands.mean((0, 1)) == pytest.approx(chances.mean((0, 1)), abs=4 * 0.5 / (300 * 64) ** 0.5)
    likely = chances > wanted
    if concentration:
        assert stands[likely].mean() == pytest.approx(chances[likely].mean(), abs=0.01)
        assert stands[~likely].mean() == pytest.approx(chances[~likely].mean(), abs=0.01)
    scatter = chances.std(1).mean(0)
    assert (scatter > 0.1).all() if concentration else scatter == pytest.approx(0)


def test_certain_drafts_always_stand_and_impossible_ones_never() -> None:
    hands = Luck(Acceptance(rates=(1.0, 0.0)), 2, (1,)).rounds(50)
    assert hands.stands[:, 0].all()
    assert not hands.stands[:, 1].any()
    assert hands.score.tolist() == [[30.0, -30.0]] * 50


@pytest.mark.parametrize(
    ("field", "value"),
    [("rates", (1.2,)), ("rates", ()), ("decay", 0.0), ("concentration", -1.0), ("spread", 2.0), ("score_noise", -1.0)],
)
def test_what_is_no_model_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="acceptance is" if field == "rates" else f"{field} is"):
        Acceptance(**{field: value})


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="back"):
        VirtualClock().advance(-1)


def test_who_forks_is_as_long_as_the_one_that_it_forks_from() -> None:
    group = SimulatedGroup(describe(), FormulaCosts(), Acceptance(), VirtualClock(), dp=1, seed=7)
    queue = WaitingQueue()
    scheduler = begin_life(group, queue, ServeSettings(), None, now_s=0.0).scheduler
    queue.push(request(1, num_prompt=9, max_tokens=3, n=3))
    newest = []
    for _ in range(3):
        plan = scheduler.plan(planner_of(Fixed(0)))
        result = asyncio.run(group.execute(plan))
        for outcome in outcomes(plan, result):
            sequence = scheduler.find(outcome.dp_rank, outcome.slot, outcome.epoch)
            assert sequence is not None
            sequence.commit(outcome.num_known, outcome.emitted)
        newest += group.newest
    assert [(part.num_sequences, part.rows, part.context) for part in newest] == [(0, 8, 0.0), (0, 3, 0.0), (3, 3, 9.0)]
