"""What waits has no say: admission does not see past a draft, the host sees none that waits, and nobody sees rows."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from admission.cliffs import CliffCosts
from admission.hosts import planner
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.request import Request, SamplingParams, StopParams
from runtime.settlement import Outcome
from runtime.verification.policy import Dynamic, Fixed, Policy
from runtime.verification.policy_planner import PolicyPlanner
from runtime.verification.speculation import Load, Speculation, Traits
from workers.draft.admit import admit
from workers.plan import BatchPlan, StepPlan, temperature_class

NAN = float("nan")
COARSE = [0.0, -0.0, 0.25, 0.5, 0.75, 1.0, 1.5, -1.0, NAN, float("inf")]
GAMMA_MAX = 3


@dataclass(frozen=True, slots=True)
class Waiting:
    """The arguments of `admit`."""

    confidence_BG: NDArray[np.float32]
    num_drafts_B: NDArray[np.int64]
    uid_B: NDArray[np.int64]
    budget: int
    num_forced_B: NDArray[np.int64]
    floor: float

    def admitted(self) -> list[int]:
        return admit(
            self.confidence_BG, self.num_drafts_B, self.uid_B, self.budget, self.num_forced_B, self.floor
        ).tolist()


@st.composite
def waiting(draw: st.DrawFn) -> Waiting:
    num_sequences, num_positions = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    one = st.one_of(st.sampled_from(COARSE), st.floats(0, 1, width=32))
    row = st.lists(one, min_size=num_positions, max_size=num_positions)
    drafts = draw(st.lists(st.integers(0, num_positions), min_size=num_sequences, max_size=num_sequences))
    return Waiting(
        np.array(draw(st.lists(row, min_size=num_sequences, max_size=num_sequences)), dtype=np.float32),
        np.array(drafts),
        np.array(draw(st.lists(st.integers(0, 50), min_size=num_sequences, max_size=num_sequences, unique=True))),
        draw(st.integers(0, num_sequences * num_positions + 1)),
        np.array([draw(st.integers(0, count)) for count in drafts]),
        draw(st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0])),
    )


@given(waiting(), st.data())
def test_no_later_confidence_changes_an_earlier_admission(there: Waiting, data: st.DataObject) -> None:
    num_sequences, num_positions = there.confidence_BG.shape
    row, k = data.draw(st.integers(0, num_sequences - 1)), data.draw(st.integers(0, num_positions - 1))
    changed = there.confidence_BG.copy()
    changed[row, k + 1 :] = data.draw(
        st.lists(st.sampled_from(COARSE), min_size=num_positions - k - 1, max_size=num_positions - k - 1)
    )
    before, after = there.admitted(), replace(there, confidence_BG=changed).admitted()
    assert (before[row] > k) == (after[row] > k)


@given(waiting(), st.randoms(use_true_random=False))
def test_admission_follows_uids_when_rows_move(there: Waiting, rng: random.Random) -> None:
    order = list(range(len(there.uid_B)))
    rng.shuffle(order)
    moved = Waiting(
        there.confidence_BG[order],
        there.num_drafts_B[order],
        there.uid_B[order],
        there.budget,
        there.num_forced_B[order],
        there.floor,
    )
    expected = there.admitted()
    assert moved.admitted() == [expected[i] for i in order]


class House:
    """Sequences under a planner, step by step, with results made up by lot: what the ranks would report."""

    def __init__(self, made: PolicyPlanner, seed: int, *, homes: Sequence[int] = (0, 0, 0)) -> None:
        self.planner = made
        self.rng = random.Random(seed)
        self.homes = homes
        self.step_id = 0
        self.waiting = [0] * len(homes)
        self.emitted = [1] * len(homes)
        self.temperatures = [self.rng.choice((0.0, 0.7, 1.0)) for _ in homes]
        self.priorities = [self.rng.randrange(2) for _ in homes]
        # Whether what a step taught is worked out beside the next one, as a server does, or before.
        self.is_late = self.rng.random() < 0.5

    def loads(self) -> list[Load]:
        return [
            self._load([i for i, home in enumerate(self.homes) if home == rank]) for rank in range(max(self.homes) + 1)
        ]

    def _load(self, mine: Sequence[int]) -> Load:
        return Load(
            uids=tuple(100 + i for i in mine),
            traits=tuple(
                Traits(self.priorities[i], temperature_class(self.temperatures[i]), None if i else 2) for i in mine
            ),
            waiting=tuple(self.waiting[i] for i in mine),
            committed=tuple(5 + self.emitted[i] for i in mine),
            left=tuple(1000 - self.emitted[i] for i in mine),
        )

    def decide(self) -> Speculation:
        self.step_id += self.rng.choice((1, 1, 9))
        decided = self.planner.decide(self.step_id, self.loads())
        if self.is_late:
            self.planner.catch_up()
        return decided

    def learn(self, decided: Speculation, *, poison: int = 0) -> None:
        """poison: how much longer the step took, as a multiple, because of the drafts that it drew."""
        batches, rounds = [], []
        for rank, share in enumerate(decided.batches):
            mine = [i for i, home in enumerate(self.homes) if home == rank]
            batches.append(
                BatchPlan(
                    slots=tuple(mine),
                    epochs=tuple(mine),
                    num_known=(1,) * len(mine),
                    num_drafts=tuple(self.waiting[i] for i in mine),
                    samples=(True,) * len(mine),
                    verify_budget=share.verify_budget,
                )
            )
            for i in mine:
                rounds.append((self._request(i), self._outcome(i, rank)))
                self.emitted[i] += 1
                self.waiting[i] = min(decided.gamma, share.limits.get(100 + i, decided.gamma))
        plan = StepPlan(step_id=self.step_id, epoch=1, batches=tuple(batches), gamma=decided.gamma)
        self.planner.learn(plan, rounds, measured_s=0.002 * (1 + poison))
        if not self.is_late:
            self.planner.catch_up()

    def run(self, steps: int) -> list[Speculation]:
        decided = []
        for _ in range(steps):
            decided.append(self.decide())
            self.learn(decided[-1])
        return decided

    def _request(self, i: int) -> Request:
        return Request(
            uid=100 + i,
            request_id=str(i),
            prompt=(1, 2, 3),
            sampling=SamplingParams(temperature=self.temperatures[i]),
            stopping=StopParams(max_tokens=1000),
            priority=self.priorities[i],
        )

    def _outcome(self, i: int, rank: int) -> Outcome:
        count = self.waiting[i]
        admitted = self.rng.randint(0, count)
        accepted = self.rng.randint(0, admitted)
        return Outcome(
            dp_rank=rank,
            slot=i,
            epoch=i,
            num_known=1,
            num_drafts=count,
            samples=True,
            drafted=(7,) * count,
            num_admitted=admitted,
            num_accepted=accepted,
            emitted=(7,) * (accepted + 1),
            scores=tuple(self.rng.uniform(-3, 3) for _ in range(count)),
            acceptance=tuple(self.rng.random() for _ in range(min(accepted + 1, admitted))),
        )


def costs(seed: int) -> CliffCosts:
    rng = random.Random(seed)
    by_rows = {1: 2.0}
    for rows in range(2, 3 * (1 + GAMMA_MAX) + 1):
        by_rows[rows] = by_rows[rows - 1] + rng.choice((0.0, 0.02, 0.1, 0.5))
    return CliffCosts(by_rows=by_rows, draft_ms=rng.choice((0.0, 0.05)), gamma_max=GAMMA_MAX)


POLICIES: list[tuple[Policy, tuple[tuple[int, Policy], ...]]] = [
    (Dynamic(min_gain=0.0), ()),
    (Dynamic(min_gain=0.0, itl_limit_ms=2.8), ()),
    (Dynamic(min_gain=0.0, min_survival=0.3, gamma_min=1), ()),
    (Dynamic(min_gain=0.0), ((1, Fixed(2)),)),
]


@given(st.integers(0, 10**6), st.sampled_from(POLICIES), st.integers(0, 12))
def test_drafts_that_wait_and_the_time_they_took_change_no_decision(
    seed: int, policy: tuple[Policy, tuple[tuple[int, Policy], ...]], steps: int
) -> None:
    """Two worlds of one past, but for how long the step took that drew what waits: the next decision is the same in
    both. Nothing else of those drafts is known to a host: no call has a place for it."""
    house = House(planner(costs(seed), policy[0], classes=policy[1]), seed)
    house.run(steps)
    decided = house.decide()
    other = copy.deepcopy(house)
    house.learn(decided)
    other.learn(decided, poison=9)
    assume(any(house.waiting))
    assert house.decide() == other.decide()


def test_a_result_changes_decisions_once_it_is_learnt() -> None:
    """Else the test before would hold of a host that learns nothing."""
    differ = 0
    for seed in range(20):
        house = House(planner(costs(seed), Dynamic(min_gain=0.0, itl_limit_ms=3.0)), seed)
        house.run(2)
        other = copy.deepcopy(house)
        other.rng = random.Random(seed + 1)  # results of the steps to come, not those of drafts that wait
        house.planner.decide(house.step_id + 1, house.loads())
        assert house.planner.decide(house.step_id + 1, house.loads()) == other.planner.decide(
            other.step_id + 1, other.loads()
        )
        differ += [one.batches for one in house.run(6)] != [one.batches for one in other.run(6)]
    assert differ


def test_statistics_of_drafts_that_wait_are_refused() -> None:
    house = House(planner(costs(0)), 0)
    house.run(4)
    decided = house.decide()
    house.learn(decided)
    assert any(house.waiting), "inconclusive: nothing waits"
    uid = 100 + next(i for i, count in enumerate(house.waiting) if count)
    smuggled = copy.deepcopy(house)
    smuggled.planner.history.survivals.note([uid], np.ones((1, GAMMA_MAX)), [house.step_id])
    with pytest.raises(AssertionError, match=f"sequence {uid}: statistics of step {house.step_id}"):
        smuggled.decide()
    early = copy.deepcopy(house)
    calibrator = early.planner.history.calibrator
    calibrator.calibration = replace(calibrator.calibration, version=house.step_id + 100)
    with pytest.raises(AssertionError, match="the calibration is of the step it is used in"):
        early.decide()
    house.decide()


@given(st.integers(0, 10**6), st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_a_decision_follows_uids_when_rows_move(
    seed: int, policy: tuple[Policy, tuple[tuple[int, Policy], ...]], rng: random.Random
) -> None:
    house = House(planner(costs(seed), policy[0], classes=policy[1]), seed, homes=(0, 0, 0, 0))
    house.run(5)
    other = copy.deepcopy(house)
    (load,) = house.loads()
    order = list(range(len(load.uids)))
    rng.shuffle(order)
    names = ("uids", "traits", "waiting", "committed", "left")
    moved = replace(load, **{name: tuple(getattr(load, name)[i] for i in order) for name in names})
    step_id = house.step_id + rng.choice((1, 9))
    assert house.planner.decide(step_id, [load]) == other.planner.decide(step_id, [moved])


@given(st.integers(0, 10**6), st.sampled_from(POLICIES))
def test_a_decision_does_not_know_which_data_parallel_rank_is_which(
    seed: int, policy: tuple[Policy, tuple[tuple[int, Policy], ...]]
) -> None:
    """The ranks exchanged, their budgets are, and what is common stays."""
    house = House(planner(costs(seed), policy[0], classes=policy[1]), seed, homes=(0, 1, 1))
    house.run(5)
    other = copy.deepcopy(house)
    one, two = house.loads()
    # Late enough for both to be asked anew: an answer is kept for the ranks that it was given for.
    here = house.planner.decide(house.step_id + 9, [one, two])
    there = other.planner.decide(other.step_id + 9, [two, one])
    assert there == replace(here, batches=here.batches[::-1])


def test_drafts_may_wait_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without rows for a sequence leaves its drafts where they are, however many requests the server has had."""
    house = House(planner(costs(0)), 0)
    gone = [(replace(house._request(0), uid=1000 + n), house._outcome(0, 0)) for n in range(4200)]
    with monkeypatch.context() as patched:
        learn = house.planner.learn
        patched.setattr(
            house.planner,
            "learn",
            lambda plan, rounds, *, measured_s: learn(plan, [*gone, *rounds], measured_s=measured_s),
        )
        house.learn(replace(house.decide(), gamma=2))
    assert house.waiting[1]
    only = StepPlan(step_id=house.step_id + 1, epoch=1, batches=(BatchPlan(),), gamma=1)
    house.planner.learn(only, [(house._request(0), house._outcome(0, 0))], measured_s=0.002)
    house.step_id += 1
    house.decide()
