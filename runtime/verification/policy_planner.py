"""Plans each step as the policies in force say, and learns from what came of it. Knows no queue, no ranks, no clock.

    decide     load, policies ──▶ γ, feed the drafter or not, K per data-parallel rank      before the step
    learn      scores and acceptance of the drafts that were decided, measured time         after it
    catch_up   what was learnt is worked out, the next draft length looked for              while ranks work

Under `off` and `fixed` everything that waits is verified. Under `dynamic` the tuner finds a steady state, in which the
present step spends its budget on what waits. The drafts that wait are known by number only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from configs.schema import SpeculationSettings
from runtime.front.errors import MissingFeature
from runtime.request import Request
from runtime.settlement import Outcome
from runtime.verification.advice import USUAL_CONTEXT, advise
from runtime.verification.costs import StepCosts
from runtime.verification.counts import SpeculationCounts, is_plain
from runtime.verification.decided import Asked, Decision, Over
from runtime.verification.exploration import Exploration, exploration, period, within_limit
from runtime.verification.history import History
from runtime.verification.loads import (
    NOBODY,
    forced_of,
    is_sampled,
    limits_of,
    longest_useful,
    mean_context,
    outlook_of,
    predicted,
)
from runtime.verification.planner import Aim, Choice, Evidence, spend
from runtime.verification.policy import Dynamic, Policy, PolicyState, PolicyStore
from runtime.verification.residuals import CorrectedCosts, Residuals
from runtime.verification.rules import Rule, Rules, common_aim
from runtime.verification.shadow import Shadow
from runtime.verification.speculation import BatchSpeculation, Load, Speculation
from runtime.verification.tuner import Question, Tuner
from runtime.verification.view import AdviceReport, ProfileState, ProfileStatus, ShadowView, SpeculationView
from workers.plan import VERIFY_EVERYTHING, StepPlan

log = logging.getLogger(__name__)

NO_PROFILE = ProfileStatus(state=ProfileState.MISSING, detail="no hardware profile was looked for")


class PolicyPlanner:
    """A `StepPlanner` under the policies of a store.

    capacity: sequences that may run at once, of all data-parallel ranks. settings: may be replaced between two steps.
    """

    def __init__(self, store: PolicyStore, settings: SpeculationSettings, *, capacity: int) -> None:
        self._store = store
        self.settings = settings
        self._capacity = capacity
        self.history = History(store.gamma_max, capacity=capacity)
        self._residuals = Residuals(self._store.gamma_max)
        # A step's time knows of the drafts it drew, whose experts they went to: it waits for as long as they do.
        self._costs: CorrectedCosts | None = None
        self._profile = NO_PROFILE
        self._tuner = Tuner()
        # Of the policy in force, for the shadow to be held against: also where that one plans nothing.
        self._watched = Tuner()
        self._shadow: Shadow | None = None
        self._counts = SpeculationCounts()
        self._explored: Exploration | None = None
        self._told_fallback = ""
        self._loads: Sequence[Load] = ()
        self._decision: Decision | None = None
        self._asked: Asked | None = None
        self._unlearnt: list[Over] = []
        # Times of steps before this one may be learnt from.
        self._oldest_waiting = 0

    def use_profile(self, costs: StepCosts | None, status: ProfileStatus) -> None:
        """Goes by another profile from now on; None by none."""
        self._residuals = Residuals(self._store.gamma_max)
        self._costs = None if costs is None else CorrectedCosts(costs, self._residuals)
        self._profile = status
        self._tuner, self._asked = Tuner(), None

    def fit(self, gamma_max: int, *, capacity: int) -> None:
        """Takes the limits of ranks that came back; what was learnt of other lengths is let go."""
        if gamma_max != self.history.gamma_max or capacity > self._capacity:
            self.history, self._unlearnt = History(gamma_max, capacity=capacity), []
            self._shadow = None  # its counts are of other lengths, which it may not be able to draw any more
            self._capacity = capacity
            self.use_profile(None if self._costs is None else self._costs.raw, self._profile)

    @property
    def found(self) -> ProfileStatus:
        """The profile in use, as it was found."""
        return self._profile

    @property
    def profile(self) -> ProfileStatus:
        """The profile in use, as its predictions have turned out."""
        problem = self._residuals.problem if self._costs is not None else ""
        if problem and self._profile.state is ProfileState.OK:
            return replace(
                self._profile,
                state=ProfileState.STALE,
                detail=f"{self._profile.detail}: {problem}; measure this machine again with `outrider profile`",
            )
        return self._profile

    @property
    def fallback(self) -> str:
        """Why a dynamic policy in force runs as a fixed draft length; empty where it does not."""
        state = self._store.state
        if not any(isinstance(policy, Dynamic) for policy in (state.policy, *(own for _, own in state.classes))):
            return ""
        return "" if self._usable_costs() is not None else self.profile.detail

    def decide(self, step_id: int, loads: Sequence[Load]) -> Speculation:
        self._oldest_waiting = self.history.oldest_waiting(step_id, loads)
        self._note_fallback()
        costs = self._usable_costs()
        rules = Rules.of(
            self._store.state,
            self._store.gamma_max,
            fallback=None if costs is not None else self.settings.gamma,
        )
        in_force = rules.in_force(loads)
        is_planned = any(rule.aim is not None for rule in in_force) and any(
            load.uids or load.entering for load in loads
        )
        self._asked = None
        if costs is None or not is_planned:
            # By a stale profile too: that is how it is found to be right again.
            decision = self._as_told(loads, rules, in_force, self._costs)
        else:
            for load in loads:
                self.history.check_causal(step_id, load)
            decision = self._as_pays(step_id, loads, rules, in_force, costs)
            self._asked = Asked(step_id, loads, rules, in_force, costs)
        if self._shadow is not None and costs is not None and any(load.uids for load in loads):
            self._follow_shadow(step_id, self._shadow, loads, costs)
        if decision.choice is not None and self._costs is not None:
            busiest = max(1, *(len(load.uids) for load in loads))
            raw_ms = decision.choice.step_ms / self._residuals.factor(busiest, decision.choice.gamma)
            decision = replace(decision, costs=self._costs, raw_ms=raw_ms)
        self._loads, self._decision = loads, decision
        if decision.explored is not None:
            self._explored = decision.explored
        return replace(decision.speculation, calibration=self.history.calibrator.calibration)

    def learn(self, plan: StepPlan, rounds: Sequence[tuple[Request, Outcome]], *, measured_s: float) -> None:
        """Takes in the step that was decided last, for `catch_up` to work out. measured_s: all of it, planning and
        booking too."""
        self._unlearnt.append(Over(self.history.witness(plan, rounds), self._decision, measured_s))

    def catch_up(self) -> None:
        """Works out what was learnt, and the draft length to go on with. For the time in which the ranks are at work:
        it takes a good part of a millisecond, and a decision that it comes too late for rests on what was known
        before."""
        for step in self._unlearnt:
            self._work_out(step)
        self._unlearnt = []
        self._residuals.learn(before=self._oldest_waiting)
        if (asked := self._asked) is not None and self._usable_costs() is asked.costs:
            self._steady_state(asked.step_id + 1, asked.rules, asked.in_force, self._tuner, asked.loads, asked.costs)
            self._asked = None

    def _work_out(self, step: Over) -> None:
        plan, rounds, decision = step.seen.plan, step.seen.rounds, step.decision
        self.history.note(step.seen)
        if decision is None:
            return
        choice = decision.choice
        is_steady = is_plain(plan)
        predicted_s = 0.0
        # Of another profile's predictions the present one learns nothing.
        if choice is not None and self._costs is not None and decision.costs is self._costs:
            predicted_s = choice.step_ms / 1000
            if is_steady:
                num_sequences = max(len(batch.slots) for batch in plan.batches)
                self._residuals.hold(
                    plan.step_id,
                    num_sequences=num_sequences,
                    gamma=plan.gamma,
                    raw_ms=decision.raw_ms,
                    measured_ms=step.measured_s * 1000,
                )
        self._counts.add(
            plan,
            rounds=[outcome for _, outcome in rounds],
            predicted_s=predicted_s if is_steady else 0.0,
            measured_s=step.measured_s,
            explores=decision.explored is not None,
        )

    def view(self) -> SpeculationView:
        running = [uid for load in self._loads for uid in load.uids]
        return self._counts.view(
            profile=self.profile,
            survival=tuple(self.history.mean_survival(running).tolist()),
            calibrator=self.history.calibrator,
            fallback=self.fallback,
            shadow=None if self._shadow is None else self._shadow.view(),
        )

    def set_shadow(self, policy: Policy | None) -> ShadowView | None:
        """Has a second policy plan beside the one in force, from the next step on; None ends it. Raises InvalidRequest
        or MissingFeature."""
        if policy is not None:
            self._store.check(policy)
            self._require_costs()
        self._shadow = None if policy is None else Shadow(policy, self._store.gamma_max)
        return None if self._shadow is None else self._shadow.view()

    def advise(self, *, num_sequences: int | None, context: int | None) -> AdviceReport:
        """Advice for a load, by default the present one of the busiest data-parallel rank.

        Raises MissingFeature without a profile or anything drafted.
        """
        uids = [uid for load in self._loads for uid in load.uids]
        now = max((len(load.uids) for load in self._loads), default=0)
        lengths = [length for load in self._loads for length in load.committed]
        return advise(
            self.history,
            self._require_costs(),
            self._store.state.policy,
            uids,
            num_sequences=num_sequences or max(1, now),
            context=context or (sum(lengths) / len(lengths) if lengths else USUAL_CONTEXT),
            sampled=is_sampled(self._loads) if uids else True,
        )

    def _require_costs(self) -> CorrectedCosts:
        costs = self._usable_costs()
        if costs is None:
            raise MissingFeature(f"a hardware profile: {self.profile.detail}")
        return costs

    def _note_fallback(self) -> None:
        """Says in the log when dynamic policies begin to run as fixed lengths, and when that ends."""
        fallback = self.fallback
        if bool(fallback) != bool(self._told_fallback):
            if fallback:
                log.warning("the dynamic policy runs as gamma %d: %s", self.settings.gamma, fallback)
            else:
                log.info("the dynamic policy plans draft lengths, by %s", self.profile.detail)
            self._told_fallback = fallback
            self._store.announce()

    def _usable_costs(self) -> CorrectedCosts | None:
        return self._costs if self.profile.state is ProfileState.OK else None

    def _as_told(
        self, loads: Sequence[Load], rules: Rules, in_force: Sequence[Rule], costs: CorrectedCosts | None
    ) -> Decision:
        """Draft lengths are given: all that waits is verified."""
        gamma = max(rule.cap for rule in in_force)
        speculation = Speculation(
            gamma=gamma,
            feed_drafter=gamma > 0,
            batches=tuple(BatchSpeculation(limits=limits_of(load, rules, gamma)) for load in loads),
        )
        choice = None
        if costs is not None and any(load.uids for load in loads):
            choice = predicted(loads, costs, gamma=gamma)
        return Decision(speculation=speculation, choice=choice)

    def _as_pays(
        self,
        step_id: int,
        loads: Sequence[Load],
        rules: Rules,
        in_force: Sequence[Rule],
        costs: CorrectedCosts,
    ) -> Decision:
        steady, question = self._steady_state(step_id, rules, in_force, self._tuner, loads, costs)
        aim = question.aim
        every = period(self.settings.explore_every, steady, self.history.calibrator.num_reached)
        explored = exploration(step_id, every, steady, question.gammas[-1], loads)
        if explored is not None and aim.itl_limit_ms is not None:
            busiest = max(1, *question.num_sequences)
            curve = costs.at(busiest, mean_context(loads), sampled=question.sampled)
            explored = within_limit(explored, steady, curve, aim.itl_limit_ms, num_sequences=busiest)
        gamma = steady.gamma if explored is None else explored.gamma
        useful = longest_useful(loads)
        gamma = gamma if useful is None else min(gamma, useful)
        # What the last exploring step drew is verified whole, or it would show only what is known.
        last = self._explored
        explorers = last.uids if last is not None and last.step_id == step_id - 1 else NOBODY
        choice, budgets = self._spend(loads, rules, costs, steady, question, gamma, explorers)
        speculation = Speculation(
            gamma=gamma,
            feed_drafter=gamma > 0,
            batches=tuple(
                BatchSpeculation(
                    verify_budget=budget,
                    limits=limits_of(
                        load,
                        rules,
                        gamma,
                        spares_ends=True,
                        explores=None if explored is None else (steady.gamma, explored.uids),
                    ),
                    forced=forced_of(load, rules, explorers),
                )
                for load, budget in zip(loads, budgets, strict=True)
            ),
            min_survival=aim.min_survival,
        )
        return Decision(speculation=speculation, choice=choice, explored=explored)

    def _spend(
        self,
        loads: Sequence[Load],
        rules: Rules,
        costs: CorrectedCosts,
        steady: Choice,
        question: Question,
        gamma: int,
        explorers: frozenset[int],
    ) -> tuple[Choice | None, tuple[int, ...]]:
        """What this step is predicted to be, and how many of the waiting drafts each rank verifies in it."""
        if not any(load.uids for load in loads):
            return None, (VERIFY_EVERYTHING,) * len(loads)
        if steady.covers and not question.aim.min_survival:
            return predicted(loads, costs, gamma=gamma), (VERIFY_EVERYTHING,) * len(loads)
        if not explorers and gamma == steady.gamma and self._is_steady(loads, steady, question):
            return predicted(loads, costs, gamma=gamma, budgets=steady.budgets), steady.budgets
        waiting = max((waiting for load in loads for waiting in load.waiting), default=0)
        choice = spend(
            [
                Evidence(
                    outlook_of(load, rules, self.history, to_come=False, gamma_max=waiting, explorers=explorers),
                    question.aim.min_survival,
                )
                for load in loads
            ],
            costs,
            question.aim,
            context=mean_context(loads),
            sampled=question.sampled,
            waiting=waiting,
            gamma=gamma,
            rate=steady.rate,
        )
        return choice, choice.budgets

    def _follow_shadow(self, step_id: int, shadow: Shadow, loads: Sequence[Load], costs: CorrectedCosts) -> None:
        own_state = PolicyState(policy=shadow.policy, revision=0, effective_step=0)
        choices = []
        for state, tuner in ((self._store.state, self._watched), (own_state, shadow.tuner)):
            rules = Rules.of(state, self._store.gamma_max, fallback=None)
            choices.append(self._steady_state(step_id, rules, rules.in_force(loads), tuner, loads, costs)[0])
        shadow.note(*choices)

    def _steady_state(
        self,
        step_id: int,
        rules: Rules,
        in_force: Sequence[Rule],
        tuner: Tuner,
        loads: Sequence[Load],
        costs: CorrectedCosts,
    ) -> tuple[Choice, Question]:
        """What the rules would run in under this load, fixed lengths being steady states without a choice; and what
        that is the answer to. in_force: see Rules.in_force."""
        longest = min(max(rule.cap for rule in in_force), costs.gamma_max)
        question = Question(
            num_sequences=tuple(len(load.uids) + len(load.entering) for load in loads),
            sampled=is_sampled(loads),
            gammas=range(min(max(rule.forced for rule in in_force), longest), longest + 1),
            aim=common_aim(in_force) or Aim(min_gain=0.0),
        )
        steady = tuner.follow(
            step_id,
            question,
            lambda: [outlook_of(load, rules, self.history, to_come=True, gamma_max=longest) for load in loads],
            costs,
            context=mean_context(loads),
        )
        return steady, question

    def _is_steady(self, loads: Sequence[Load], steady: Choice, question: Question) -> bool:
        """Whether this step is one of the steady state that was asked for, whose budgets then are its own."""
        return question == self._tuner.question and all(
            not load.num_prompt_rows and all(waiting == steady.gamma for waiting in load.waiting) for load in loads
        )
