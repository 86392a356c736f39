"""The schedulers of a group on fake ranks, without engine or event loop; every step checks the books."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from fakes.planners import Told, planner_of
from fakes.worker import FakeGroup, describe, true_stream

from configs.schema import SchedulerSettings, ServeSettings
from runtime.life import begin_life
from runtime.request import Request, sequences_of
from runtime.scheduler.group import GroupScheduler
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.scheduler import Scheduler
from runtime.settlement import outcomes
from runtime.verification.policy import Fixed, Policy
from workers.plan import BatchPlan, StepPlan, WorkerDescription


class Bench:
    """A group scheduler on a fake group of `dp` data-parallel ranks."""

    def __init__(
        self,
        *,
        dp: int = 1,
        max_step_tokens: int = 32,
        description: WorkerDescription | None = None,
        accept: float = 0.6,
    ) -> None:
        self.group = FakeGroup(description or describe(), dp=dp, max_step_tokens=max_step_tokens, accept=accept)
        self.queue = WaitingQueue()
        settings = ServeSettings(scheduler=SchedulerSettings(max_step_tokens=max_step_tokens))
        self.scheduler: GroupScheduler = begin_life(self.group, self.queue, settings, None, now_s=0).scheduler
        self.requests: dict[int, Request] = {}
        # What a step is said to have taken.
        self.measure: Callable[[StepPlan], float] = lambda plan: 0.01
        self.told = Told(planner_of(gamma_max=self.group.description.gamma_max))

    @property
    def one(self) -> Scheduler:
        """The only data-parallel rank's."""
        (scheduler,) = self.scheduler.schedulers
        return scheduler

    def submit(self, *requests: Request) -> None:
        for each in requests:
            self.requests |= {sequence.uid: sequence for sequence in sequences_of(each)}
            self.queue.push(each)

    def home_of(self, uid: int) -> int:
        """The data-parallel rank on which a request runs."""
        (home,) = (rank for rank, one in enumerate(self.scheduler.schedulers) if uid in one.ledger)
        return home

    def drain(self, gammas: Sequence[int] = (3,)) -> None:
        """Steps until nothing is left to do, with these γ in turn. Fails when that takes longer than it ever should."""
        for gamma in itertools.islice(itertools.cycle(gammas), 1000):
            if not self.scheduler.has_work:
                return
            self.step(Fixed(gamma))
        pytest.fail("after 1000 steps there is work left")

    def step(self, policy: Policy = Fixed(3)) -> StepPlan:  # noqa: B008
        """Plans, executes, commits; lets go of what has all its tokens."""
        plan = self.scheduler.plan(self.told.under(policy))
        result = self.group.run(plan)
        settled = []
        for outcome in outcomes(plan, result):
            sequence = self.scheduler.find(outcome.dp_rank, outcome.slot, outcome.epoch)
            assert sequence is not None
            sequence.commit(outcome.num_known, outcome.emitted)
            settled.append((self.requests[sequence.uid], outcome))
            if len(sequence.log.emitted) == self.requests[sequence.uid].stopping.max_tokens:
                assert tuple(sequence.log.emitted) == true_stream(self.requests[sequence.uid])
                self.scheduler.release(sequence.uid)
        self.told.planner.learn(plan, settled, measured_s=self.measure(plan))
        self.told.planner.catch_up()
        assert self.scheduler.check_integrity() == []
        return plan

    def batch(self, policy: Policy = Fixed(3)) -> BatchPlan:  # noqa: B008
        """A step of the only data-parallel rank."""
        (batch,) = self.step(policy).batches
        return batch

    def check_baseline(self) -> None:
        """Nothing runs, and every page and slot is back."""
        uses = [scheduler.use() for scheduler in self.scheduler.schedulers]
        assert [(use.running, use.slots_used) for use in uses] == [(0, 0)] * len(uses)
        assert all(pool.used == 0 for use in uses for pool in use.pages)
        assert self.group.tenants == []
