"""Steps planned as policies say: by class and request, as pays under dynamic, as a fixed length without a profile."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fakes.planners import USABLE, FormulaCosts, Told, planner_of
from fakes.requests import request
from fakes.scheduler_bench import Bench
from fakes.worker import describe

from configs.schema import SpeculationSettings
from runtime.front.errors import InvalidRequest, MissingFeature
from runtime.verification.policy import Dynamic, Fixed, Off, Policy
from runtime.verification.policy_planner import PolicyPlanner
from runtime.verification.residuals import STALE_AFTER
from runtime.verification.speculation import Load, Traits
from runtime.verification.view import ProfileState
from workers.plan import VERIFY_EVERYTHING, BatchPlan, StepPlan

CHEAP = FormulaCosts(base=10, per_row=0.01, per_draft=0.01)
DEAR = FormulaCosts(base=1, per_row=10, per_draft=10)


def bench_with(planner: PolicyPlanner, *, accept: float = 0.6, dp: int = 1) -> Bench:
    bench = Bench(dp=dp, accept=accept, description=describe(num_pages=(90, 90), max_model_len=200))
    bench.told = Told(planner)
    return bench


def run(bench: Bench, policy: Policy, steps: int) -> list[StepPlan]:
    """Two sequences on each data-parallel rank, begun anew as they end."""
    plans = []
    for _ in range(steps):
        while sum(1 for _ in bench.scheduler.running) + len(bench.queue) < 2 * len(bench.scheduler.schedulers):
            bench.submit(request(1 + len(bench.requests), max_tokens=30))
        plans.append(bench.step(policy))
    return plans


def only(plan: StepPlan) -> BatchPlan:
    (batch,) = plan.batches
    return batch


def test_dynamic_drafts_where_it_pays_and_not_where_it_costs() -> None:
    settings = SpeculationSettings(explore_every=1000)
    pays = run(bench_with(planner_of(costs=CHEAP, settings=settings), accept=1.0), Dynamic(), 40)
    costs = run(bench_with(planner_of(costs=DEAR, settings=settings), accept=1.0), Dynamic(), 40)
    lengths = Counter(plan.gamma for plan in pays[20:])
    assert lengths.most_common(1)[0][0] == 4
    assert min(lengths) > 0, "shorter only where all are about to end"
    assert {(plan.gamma, plan.feed_drafter) for plan in costs[20:]} == {(0, False)}


@pytest.mark.parametrize("dp", [1, 3])
def test_gamma_and_rows_are_one_answer_for_all_data_parallel_ranks(dp: int) -> None:
    plans = run(bench_with(planner_of(costs=FormulaCosts(base=10, per_row=2.0, per_draft=0.01)), dp=dp), Dynamic(), 90)
    assert len({plan.gamma for plan in plans}) > 1, "inconclusive: the length never changed"
    partial = [plan for plan in plans for batch in plan.batches if batch.verify_budget < sum(batch.num_drafts)]
    assert partial, "inconclusive: no budget was partial"


def test_without_a_profile_dynamic_runs_as_the_configured_length_within_its_bounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = SpeculationSettings(gamma=3)
    with caplog.at_level(logging.INFO):
        planner = planner_of(Dynamic(), settings=settings)
        states = []
        planner._store.add_listener(states.append)
        gammas = [plan.gamma for plan in run(bench_with(planner), Dynamic(), 5)]
        lowered = [plan.gamma for plan in run(bench_with(planner), Dynamic(gamma_max=2), 5)]
        raised = [plan.gamma for plan in run(bench_with(planner), Dynamic(gamma_min=4), 5)]
        said = planner.fallback
        planner.use_profile(CHEAP, USABLE)
        planner.decide(1000, [])
    assert (set(gammas), set(lowered), set(raised)) == ({3}, {2}, {4})
    assert said
    assert "runs as gamma 3" in caplog.text
    assert states, "who watches the policy is told of it"
    assert planner.fallback == ""
    assert "plans draft lengths" in caplog.text


def test_predictions_that_stay_wrong_make_the_profile_stale_and_right_ones_do_not() -> None:
    planner = planner_of(Dynamic(), costs=CHEAP)
    bench = bench_with(planner)
    run(bench, Dynamic(), STALE_AFTER + 50)  # the bench says 10 ms a step, as the formula does
    assert planner.profile.state is ProfileState.OK
    planner.use_profile(FormulaCosts(base=500), USABLE)
    run(bench, Dynamic(), 2 * STALE_AFTER)
    assert planner.profile.state is ProfileState.STALE
    assert "outrider profile" in planner.profile.detail
    assert planner.fallback
    assert run(bench, Dynamic(), 1)[0].gamma == SpeculationSettings().gamma
    bench.measure = lambda plan: 0.5
    run(bench, Dynamic(), 2 * STALE_AFTER)
    assert planner.profile.state is ProfileState.OK, "right again"


def test_classes_and_requests_set_bounds_of_their_own() -> None:
    """Fixed 3 for priority 0, off for priority 1, and a request that asks for one draft at most."""
    bench = bench_with(planner_of(Fixed(3), classes=((1, Off()),)))
    bench.submit(
        request(1, max_tokens=9, priority=0),
        request(2, max_tokens=9, priority=1),
        request(3, max_tokens=9, priority=0, max_drafts=1),
    )
    bench.step(Fixed(3))
    batch = only(bench.step(Fixed(3)))
    assert dict(zip(batch.slots, batch.num_drafts, strict=True)) == {1: 3, 2: 1, 3: 0}
    assert batch.verify_budget == VERIFY_EVERYTHING


def test_when_nobody_may_draft_the_drafter_does_not_run() -> None:
    bench = bench_with(planner_of(Fixed(3)))
    bench.submit(request(1, max_drafts=0), request(2, max_drafts=0))
    assert [(plan.gamma, plan.feed_drafter) for plan in (bench.step(Fixed(3)), bench.step(Fixed(3)))] == [
        (0, False)
    ] * 2


def test_a_fixed_class_beside_a_dynamic_one_has_all_its_drafts_verified() -> None:
    dear = FormulaCosts(cliffs=(5,), cliff_ms=1000)
    settings = SpeculationSettings(explore_every=1000)
    bench = bench_with(planner_of(Dynamic(), classes=((1, Fixed(2)),), costs=dear, settings=settings))
    bench.submit(request(1, max_tokens=20, priority=0), request(2, max_tokens=20, priority=1))
    plans = [bench.step(Dynamic()) for _ in range(6)]
    for plan in plans[2:]:
        batch = only(plan)
        of_slot = {slot: place for place, slot in enumerate(batch.slots)}
        assert (plan.gamma, batch.verify_budget) == (2, 2)
        assert batch.num_forced[of_slot[2]] == batch.num_drafts[of_slot[2]] == 2
        assert batch.num_forced[of_slot[1]] == 0


def test_gamma_min_is_drawn_and_verified_whatever_it_costs() -> None:
    settings = SpeculationSettings(explore_every=1000)
    plans = run(bench_with(planner_of(costs=DEAR, settings=settings)), Dynamic(gamma_min=2), 12)
    assert {plan.gamma for plan in plans} == {2}
    assert all(
        batch.verify_budget >= sum(batch.num_drafts) or batch.num_forced == batch.num_drafts
        for plan in plans
        for batch in plan.batches
    )


def test_no_more_is_drafted_than_a_sequence_may_still_emit() -> None:
    bench = bench_with(planner_of(costs=CHEAP), accept=0.0)
    bench.submit(request(1, max_tokens=6))
    drafts = [only(bench.step(Dynamic(gamma_min=4))).num_drafts[0] for _ in range(6)]
    assert drafts == [0, 4, 3, 2, 1, 0]


def test_exploring_steps_come_by_the_step_counter_and_are_verified_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.verification.exploration.LITTLE", 0)
    settings = SpeculationSettings(explore_every=5)
    planner = planner_of(costs=DEAR, settings=settings)
    bench = bench_with(planner)
    plans = run(bench, Dynamic(), 170)
    explored = [plan for plan in plans if plan.gamma]
    assert [plan.step_id for plan in explored] == [20 * turn for turn in range(1, 9)]
    assert [plan.gamma for plan in explored] == [*[2] * 7, 4], "two beyond what pays, and every eighth time all"
    after = [plans[plan.step_id] for plan in explored if plan.step_id < len(plans)]
    assert all(sum(batch.num_drafts) <= batch.verify_budget for plan in after for batch in plan.batches)
    assert planner.view().explored_steps == 8


def test_steps_keep_to_the_latency_limit() -> None:
    costs = FormulaCosts(base=5, per_row=1, per_draft=0)
    planner = planner_of(costs=costs, settings=SpeculationSettings(explore_every=7))
    bench = bench_with(planner)

    def step_s(plan: StepPlan) -> float:
        batch = only(plan)
        rows = sum(batch.num_known) + min(sum(batch.num_drafts), batch.verify_budget)
        return float(costs.step_ms(np.array([rows]), waiting=0, gamma=plan.gamma)[0]) / 1000

    bench.measure = step_s
    bench.submit(request(1, max_tokens=90), request(2, max_tokens=90))
    plans = [bench.step(Dynamic(itl_limit_ms=9.5)) for _ in range(40)]
    # Two sequences: 5 ms, and 1 ms for each of their rows; the prompts' rows are not drafts' to spare.
    assert max(step_s(plan) for plan in plans[1:]) == pytest.approx(0.009)
    assert max(plan.gamma for plan in plans) > 1, "more may be drawn than fits, for the best to be verified"


def test_a_shadow_plans_beside_the_policy_and_changes_nothing() -> None:
    alone = run(bench_with(planner_of(costs=CHEAP)), Fixed(1), 60)
    planner = planner_of(costs=CHEAP)
    bench = bench_with(planner)
    run(bench, Fixed(1), 1)
    view = planner.set_shadow(Dynamic())
    assert view is not None
    assert (view.policy, view.steps) == (Dynamic(), 0)
    shadowed = run(bench, Fixed(1), 59)
    assert [replace(plan, calibration=alone[0].calibration) for plan in alone[1:]] == [
        replace(plan, calibration=alone[0].calibration) for plan in shadowed
    ]
    view = planner.view().shadow
    assert view is not None
    assert 50 <= view.steps <= 59
    assert sum(view.steps_by_gamma) == view.steps
    assert view.agreed == view.steps_by_gamma[1]
    assert view.shadow_tokens / view.shadow_step_s > view.tokens / view.step_s
    assert planner.set_shadow(None) is None
    assert planner.view().shadow is None


def test_a_shadow_and_advice_are_refused_without_a_profile() -> None:
    planner = planner_of()
    for ask in (lambda: planner.set_shadow(Fixed(2)), lambda: planner.advise(num_sequences=None, context=None)):
        with pytest.raises(MissingFeature, match="hardware profile"):
            ask()
    with pytest.raises(InvalidRequest, match=r"policy\.fixed\.gamma"):
        planner_of(costs=CHEAP).set_shadow(Fixed(9))


def test_advice_compares_lengths_by_survival_and_formula_and_says_which_to_use() -> None:
    planner = planner_of(costs=FormulaCosts(base=10, per_row=0.05, per_draft=0.05))
    bench = bench_with(planner, accept=0.8)
    with pytest.raises(MissingFeature, match="verified whole"):
        planner.advise(num_sequences=None, context=None)
    run(bench, Fixed(4), 80)
    report = planner.advise(num_sequences=None, context=None)
    assert report.num_sequences in (1, 2)
    assert report.acceptance == pytest.approx(0.8, abs=0.1)
    assert [one.gamma for one in report.advice] == [0, 1, 2, 3, 4]
    for one in report.advice:
        alpha = report.acceptance
        assert one.geometric_tokens == pytest.approx(sum(alpha**k for k in range(one.gamma + 1)))
        assert one.tokens == pytest.approx(one.geometric_tokens, rel=0.2)
        assert one.tokens_per_s == pytest.approx(one.tokens * report.num_sequences / one.step_s, rel=1e-6)
    best = max(report.advice, key=lambda one: one.tokens_per_s)
    assert report.advice[report.best_gamma].tokens_per_s > best.tokens_per_s / 1.02
    assert "gamma 4" in report.sentence
    assert f"{report.acceptance:.2f}" in report.sentence
    more = planner.advise(num_sequences=64, context=900)
    assert (more.num_sequences, more.context) == (64, 900)
    assert more.advice[0].step_s > report.advice[0].step_s


def test_the_view_adds_up() -> None:
    planner = planner_of(costs=FormulaCosts(cliffs=(6,)))
    plans = run(bench_with(planner), Dynamic(), 120)
    view = planner.view()
    assert sum(view.steps_by_gamma) == len(plans)
    assert view.steps_by_gamma[plans[-1].gamma] > 0
    assert view.gamma == plans[-1].gamma
    assert view.budget_sum == sum(
        min(batch.verify_budget, sum(batch.num_drafts)) for plan in plans for batch in plan.batches
    )
    assert 0 < view.predicted_steps <= len(plans)
    assert view.measured_sum_s == pytest.approx(0.01 * view.predicted_steps)
    assert view.error_sum_s >= abs(view.predicted_sum_s - view.measured_sum_s)
    assert len(view.survival_by_position) == len(view.calibration_error_by_position) == 4
    assert list(view.survival_by_position) == sorted(view.survival_by_position, reverse=True)
    assert view.calibration_version > 0


def test_advice_says_of_a_bounded_policy_no_more_than_that_it_is_in_force() -> None:
    planner = planner_of(costs=CHEAP)
    run(bench_with(planner, accept=0.8), Fixed(4), 80)
    said = []
    for policy in (Dynamic(), Dynamic(gamma_max=0), Dynamic(itl_limit_ms=0.1)):
        planner._store.set(policy, expected_revision=None, effective_step=1, set_by="a test", now=0)
        said.append(planner.advise(num_sequences=None, context=None).sentence)
    assert ["finds it by itself" in sentence for sentence in said] == [True, False, False]


def test_nobody_is_planned_for_where_nobody_decodes() -> None:
    planner = planner_of(costs=CHEAP)
    run(bench_with(planner), Dynamic(), 20)
    before = planner._tuner.choice
    planner.decide(1000, [Load()])
    planner.catch_up()
    assert planner._tuner.choice is before
    assert before is not None
    assert math.isfinite(before.rate)


def test_a_decision_does_not_wait_for_what_is_learnt_beside_it() -> None:
    """What is not worked out yet leaves the draft length where it was."""
    quick, late = (bench_with(planner_of(costs=CHEAP), accept=1.0) for _ in range(2))
    late.told.planner.catch_up = lambda: None  # type: ignore[method-assign]
    learnt, unlearnt = (run(bench, Dynamic(), 60)[-1] for bench in (quick, late))
    assert learnt.calibration.version == 0 or learnt.calibration.version < learnt.step_id
    assert unlearnt.calibration.version == 0
    assert late.told.planner.history.calibrator.num_reached == 0 < quick.told.planner.history.calibrator.num_reached


@pytest.mark.parametrize("gamma_max", [0, 2, 8])
def test_a_shadow_ends_where_ranks_come_back_with_other_limits(gamma_max: int) -> None:
    planner = planner_of(Fixed(2), costs=CHEAP)
    planner.set_shadow(Dynamic())
    bench = bench_with(planner)
    run(bench, Fixed(2), 10)
    assert planner.view().shadow is not None
    planner._store.fit(gamma_max, effective_step=11, now=0)
    planner.fit(gamma_max, capacity=64)
    planner.decide(1000, [Load(uids=(1,), traits=(Traits(0, 0, None),), waiting=(0,), committed=(5,), left=(9,))])
    assert planner.view().shadow is None


def test_what_one_profile_predicted_corrects_no_other() -> None:
    planner = planner_of(costs=CHEAP)
    bench = bench_with(planner)
    run(bench, Off(), 20)
    planner.catch_up = lambda: None  # type: ignore[method-assign]
    run(bench, Off(), 3)
    del planner.catch_up  # type: ignore[method-assign]
    planner.use_profile(DEAR, USABLE)
    planner.catch_up()
    assert not planner._residuals._held
