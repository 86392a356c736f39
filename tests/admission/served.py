"""A rank under the scheduler and the planner that serve, without engine and links: requests in, streams out.

Test material only.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from runtime.request import Request
from runtime.scheduler.group import GroupScheduler
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.routing import PrefixRouter
from runtime.scheduler.scheduler import Scheduler
from runtime.settlement import Outcome, outcomes
from runtime.verification.costs import StepCosts
from runtime.verification.policy_planner import PolicyPlanner
from state.ledger import Ledger
from workers.plan import StepPlan, StepResult
from workers.step import Worker


@dataclass(slots=True, kw_only=True)
class Tally:
    """What speculation came to. gammas: of all steps. partial: steps that left a waiting draft out, none: those that
    verified none of what waited. lengths: admitted drafts, of the rounds that could have had more than one.
    stood, fell: verified drafts by output position, from 0."""

    gammas: set[int] = field(default_factory=set)
    drafted: int = 0
    admitted: int = 0
    partial: int = 0
    none: int = 0
    lengths: set[int] = field(default_factory=set)
    stood: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    fell: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, plan: StepPlan, rounds: list[tuple[int, Outcome]]) -> None:
        """rounds: with how many tokens were emitted before."""
        self.gammas.add(plan.gamma)
        waiting = sum(outcome.num_drafts for _, outcome in rounds)
        admitted = sum(outcome.num_admitted for _, outcome in rounds)
        self.drafted += waiting
        self.admitted += admitted
        self.partial += 0 < admitted < waiting
        self.none += admitted == 0 < waiting
        for before, outcome in rounds:
            if outcome.num_drafts > 1:
                self.lengths.add(outcome.num_admitted)
            for j in range(min(outcome.num_accepted + 1, outcome.num_admitted)):
                (self.stood if j < outcome.num_accepted else self.fell)[before + j] += 1


class Served:
    """One per worker at a time. Steps are said to take what `costs` says, give or take a tenth, by lot: runs are alike
    everywhere. `streams`: the tokens of requests that have ended, by uid."""

    def __init__(self, worker: Worker, planner: PolicyPlanner, costs: StepCosts, *, seed: int) -> None:
        self.worker, self.planner = worker, planner
        self._costs, self._rng = costs, random.Random(seed)
        self.queue = WaitingQueue()
        self.streams: dict[int, tuple[int, ...]] = {}
        self.tally = Tally()
        self._requests: dict[int, Request] = {}
        known = worker.description
        ledger = Ledger(
            cache_groups=known.cache_groups,
            num_pages=known.num_pages,
            page_size=known.page_size,
            num_slots=known.num_slots,
            first_epoch=1 + max(worker._epochs),
        )
        self.scheduler = GroupScheduler(
            self.queue,
            [Scheduler(ledger, max_step_tokens=256, gamma_max=known.gamma_max)],
            PrefixRouter(1, block_size=known.page_size, capacity=1),
            epoch=1,
            first_step_id=worker._last_step + 2,
        )

    def submit(self, request: Request) -> None:
        self._requests[request.uid] = request
        self.queue.push(request)

    @property
    def num_running(self) -> int:
        return sum(1 for _ in self.scheduler.running)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.planner)
        report = self.worker.execute(plan)
        assert report.batch is not None
        result = StepResult(step_id=plan.step_id, epoch=plan.epoch, batches=(report.batch,), timings=(report.timings,))
        rounds, learnt = [], []
        for outcome in outcomes(plan, result):
            sequence = self.scheduler.find(outcome.dp_rank, outcome.slot, outcome.epoch)
            assert sequence is not None
            request = self._requests[sequence.uid]
            rounds.append((len(sequence.log.emitted), outcome))
            learnt.append((request, outcome))
            sequence.commit(outcome.num_known, outcome.emitted)
            if len(sequence.log.emitted) == request.stopping.max_tokens:
                self.streams[sequence.uid] = tuple(sequence.log.emitted)
                self.scheduler.release(sequence.uid)
        self.planner.learn(plan, learnt, measured_s=self._seconds(plan))
        self.planner.catch_up()
        self.tally.add(plan, rounds)
        return plan

    def _seconds(self, plan: StepPlan) -> float:
        (batch,) = plan.batches
        rows = sum(batch.num_known) + min(batch.verify_budget, sum(batch.num_drafts))
        curve = self._costs.at(max(1, len(batch.slots)), 1.0)
        (step_ms,) = curve.step_ms(np.array([rows]), waiting=max(batch.num_drafts, default=0), gamma=plan.gamma)
        return float(step_ms) / 1000 * self._rng.uniform(0.9, 1.1)
