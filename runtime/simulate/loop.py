"""One policy under one load: the engine's round on simulated ranks. Knows no costs and no chances.

    requests come ──▶ the scheduler plans by the planner ──▶ ranks answer, the clock moves ──▶ books, planner learn

Scheduler, ledger, books, settlement and planner are those that serve; of them nothing is repeated here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import SchedulerSettings, ServeSettings, SpeculationSettings
from runtime.books import Books
from runtime.events import ErrorEvent, EventSink, TokenEvent, Verdict
from runtime.life import begin_life
from runtime.simulate.acceptance import Acceptance
from runtime.simulate.clock import VirtualClock
from runtime.simulate.figures import Figures, Sums
from runtime.simulate.ranks import SimulatedGroup
from runtime.simulate.traffic import Arrivals, Traffic
from runtime.verification.costs import StepCosts
from runtime.verification.policy import Policy, PolicyState, PolicyStore
from runtime.verification.policy_planner import PolicyPlanner
from runtime.verification.view import ProfileState, ProfileStatus
from state.pages import num_pages_for, num_reserved_tokens
from workers.plan import WorkerDescription

log = logging.getLogger(__name__)

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A deployment and what comes to it.

    believed: costs that the planner goes by; true: those that steps have. dp: data-parallel ranks.
    gamma_max: longest draft. max_step_tokens: most rows of a rank's pass.
    noise, imbalance: see SimulatedGroup. steps: that count; warmup: before them.
    """

    believed: StepCosts
    true: StepCosts
    dp: int
    traffic: Traffic
    acceptance: Acceptance
    gamma_max: int = 5
    max_step_tokens: int = 8192
    noise: float = 0.0
    imbalance: float = 1.0
    explore_every: int = 64
    warmup: int = 200
    steps: int = 800
    seed: int = 0


class Simulation:
    """A scenario under one policy. Raises ValueError where its steps cannot hold its sequences."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._scenario = scenario
        self.clock = VirtualClock()
        traffic = scenario.traffic
        self.group = SimulatedGroup(
            _describe(traffic, scenario.gamma_max),
            scenario.true,
            scenario.acceptance,
            self.clock,
            dp=scenario.dp,
            seed=scenario.seed,
            noise=scenario.noise,
            imbalance=scenario.imbalance,
        )
        speculation = SpeculationSettings(
            gamma=min(4, scenario.gamma_max), gamma_max=scenario.gamma_max, explore_every=scenario.explore_every
        )
        settings = ServeSettings(
            scheduler=SchedulerSettings(max_step_tokens=scenario.max_step_tokens), speculation=speculation
        )
        status = ProfileStatus(state=ProfileState.OK, detail="the costs of a simulation")
        store = PolicyStore(
            PolicyState(policy=policy, revision=1, effective_step=1),
            gamma_max=scenario.gamma_max,
            profile=lambda: status,
        )
        store.check(policy)
        self.planner = PolicyPlanner(store, speculation, capacity=scenario.dp * traffic.sequences)
        self.planner.use_profile(scenario.believed, status)
        self.books = Books(_Nobody(), max_waiting=lambda: 2**31, clock=self.clock)
        self._life = begin_life(self.group, self.books.queue, settings, None, now_s=0.0)
        self.books.adopt(self._life)
        self._arrivals = Arrivals(traffic, dp=scenario.dp, seed=scenario.seed)

    async def run(self, progress: Callable[[int], None] = lambda steps: None) -> Figures:
        """Warm-up and measurement, which ends early where all requests have.

        progress: hears how many steps are done, now and then.
        """
        scenario, sums, explored = self._scenario, None, 0
        for step in range(scenario.warmup + scenario.steps):
            if step == scenario.warmup:
                sums, explored = Sums(self.clock.now_s, scenario.dp), self.planner.view().explored_steps
            if not await self._step(sums):
                break
            if step % 16 == 0:
                progress(step)
        assert sums is not None, "a simulation has steps that count"
        if self.planner.fallback:
            log.warning("the planner does not trust its costs: %s", self.planner.fallback)
        return sums.view(self.clock.now_s, explored_steps=self.planner.view().explored_steps - explored)

    async def _step(self, sums: Sums | None) -> bool:
        """One step with sequences in it, once there are any; False where none will ever be again."""
        books, scheduler = self.books, self._life.scheduler
        while True:
            for _ in range(self._arrivals.due(self.clock.now_s, len(books.live))):
                books.accept(self._arrivals.request(books.intake.next_uid()))
            if scheduler.has_work:
                began_s = self.clock.now_s
                plan = scheduler.plan(self.planner)
                books.note_starts(plan)
                self.planner.catch_up()
                result = await self.group.execute(plan)
                rounds = books.rounds(plan, result)
                for event in books.settle(plan.step_id, rounds):
                    books.outbox.hold(event)
                books.deliver(books.outbox.take())
                if plan.num_sequences:
                    break
            elif (next_s := self._arrivals.next_s) is not None:
                self.clock.advance(next_s - self.clock.now_s)
            else:
                return False
        step_s = self.clock.now_s - began_s
        books.counters.add_step(result, execute_s=step_s, host_s=0.0)
        self.planner.learn(plan, [(request, outcome) for _, request, outcome in rounds], measured_s=step_s)
        self._life.num_steps += 1
        if sums is not None:
            sums.add(plan, result, self.group.newest, step_s)
        return True


class _Nobody(EventSink):
    """A front without clients. Raises what the engine reports as an error: simulated requests have none."""

    def deliver(self, events: list[TokenEvent | ErrorEvent]) -> list[Verdict]:
        return []


def _describe(traffic: Traffic, gamma_max: int) -> WorkerDescription:
    """Ranks with room for all sequences that may run at once."""
    num_pages = num_pages_for(num_reserved_tokens(traffic.longest, gamma_max), PAGE_SIZE)
    return WorkerDescription(
        model_type="simulated",
        vocab_size=1,
        context_length=traffic.longest,
        max_model_len=traffic.longest,
        eos_token_ids=(),
        dtype="none",
        numerics="default",
        device="simulated",
        num_parameters=0,
        parameter_bytes=0,
        gamma_max=gamma_max,
        page_size=PAGE_SIZE,
        cache_groups=("all",),
        num_pages=(num_pages * traffic.sequences,),
        page_bytes=(0,),
        num_slots=traffic.sequences,
        slot_bytes=0,
        record_bytes=0,
        accounting=(),
    )
