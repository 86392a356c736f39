"""Simulated policies under load: what is counted, what repeats, and how the planner fares in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fakes.planners import FormulaCosts
from fakes.simulations import figures, scenario
from oracles.days import by_day

from runtime.request import FinishReason
from runtime.simulate.acceptance import Acceptance
from runtime.simulate.loop import Simulation
from runtime.simulate.traffic import Arrivals, Lengths, Traffic
from runtime.verification.policy import Dynamic, Fixed, Off, Policy

POLICIES = {"off": Off(), "fixed": Fixed(3), "dynamic": Dynamic()}


@pytest.mark.parametrize("policy", by_day(POLICIES, 2))
@pytest.mark.parametrize("dp", [1, 3])
def test_tokens_counted_are_tokens_emitted_and_books_hold(policy: Policy, dp: int) -> None:
    traffic = Traffic(sequences=4, prompt=Lengths(1, 40), output=Lengths(5, 30), staggered=False)
    simulation = Simulation(scenario(dp=dp, traffic=traffic, warmup=0, max_step_tokens=48), policy)
    found = asyncio.run(simulation.run())
    books = simulation.books
    assert books.check_integrity() == []
    ended = books.statistics().requests
    assert set(ended.ended) == {FinishReason.LENGTH}, "every sequence gets all its tokens"
    assert found.tokens == books.statistics().emitted
    arrivals = Arrivals(traffic, dp=dp, seed=1)
    in_all = sum(arrivals.request(uid).stopping.max_tokens for uid in range(1, ended.submitted + 1))
    assert in_all - found.tokens == sum(
        books.live[uid].request.stopping.max_tokens - books.live[uid].usage.completion for uid in books.live
    )
    num_ended = sum(ended.ended.values())
    assert num_ended > 4
    assert len(books.live) == ended.submitted - num_ended <= 4 * dp


@pytest.mark.parametrize("policy", by_day(POLICIES))
def test_the_seed_decides_everything(policy: Policy) -> None:
    case = scenario(noise=0.1, traffic=Traffic(sequences=3, rate=40.0, output=Lengths(10, 40)))
    assert figures(case, policy) == figures(case, policy)
    assert figures(replace(case, seed=2), policy) != figures(case, policy)


def test_requests_are_the_same_under_all_policies() -> None:
    traffic = Traffic(sequences=3, prompt=Lengths(1, 9), output=Lengths(10, 40))
    one, other = (Arrivals(traffic, dp=2, seed=4) for _ in range(2))
    assert [one.request(uid) for uid in (1, 9, 5)] == [other.request(uid) for uid in (1, 9, 5)]


def test_plain_decoding_costs_what_it_costs_by_hand() -> None:
    found = figures(scenario(sequences=8), Off())
    # A sequence that ends makes room for a prompt of one token, which takes its row.
    assert found.step_ms == pytest.approx(10 + 0.1 * 8)
    assert found.tokens_per_s == pytest.approx(8 / 10.8e-3)
    assert (found.gamma, found.tokens_per_step, found.rows) == (0, 1, 8)
    assert [found.gap_p50_ms, found.gap_p99_ms, found.token_ms] == pytest.approx([found.step_ms] * 3)


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_fixed_draft_brings_the_geometric_sum(gamma: int) -> None:
    model = Acceptance(rates=(0.7,), concentration=None, spread=0.0)
    traffic = Traffic(sequences=16, output=Lengths(4000, 4000))
    found = figures(scenario(traffic=traffic, acceptance=model, warmup=5, steps=200), Fixed(gamma))
    wanted = sum(0.7**drafts for drafts in range(gamma + 1))
    # 3200 rounds whose tokens deviate by less than 1.6.
    assert found.tokens_per_step == pytest.approx(wanted, abs=4 * 1.6 / 3200**0.5)
    assert found.step_ms == pytest.approx(10 + 0.1 * 16 * (1 + gamma) + 0.5 * gamma, rel=1e-3)


def test_the_busiest_rank_decides_how_long_a_step_takes() -> None:
    """Two ranks with unequal loads: requests come by themselves and differ in length."""
    traffic = Traffic(sequences=6, rate=60.0, output=Lengths(2, 120))
    simulation = Simulation(scenario(dp=2, traffic=traffic), Dynamic())
    costs, seen = FormulaCosts(gamma_max=5), []
    execute = simulation.group.execute

    async def watched(plan: Any) -> Any:
        before = simulation.clock.now_s
        result = await execute(plan)
        rows = [one.rows for one in simulation.group.newest]
        if plan.num_sequences:
            wanted = costs.step_ms(np.array([max(rows)]), waiting=0, gamma=plan.gamma)[0] / 1000
            assert simulation.clock.now_s - before == pytest.approx(wanted)
            seen.append(tuple(one.num_sequences for one in simulation.group.newest))
        return result

    simulation.group.execute = watched  # type: ignore[method-assign]
    asyncio.run(simulation.run())
    assert any(one != other for one, other in seen)


def test_an_open_loop_brings_what_arrives_where_ranks_keep_up() -> None:
    traffic = Traffic(sequences=16, rate=5.0, output=Lengths(20, 20))
    found = figures(scenario(traffic=traffic, steps=800), Fixed(2))
    # Arrivals of some 15 s.
    assert found.tokens_per_s == pytest.approx(5 * 20, rel=4 / 75**0.5)
    assert found.busy_s < found.seconds


def test_noise_leaves_the_mean_step_as_it_is() -> None:
    found = figures(scenario(sequences=2, noise=0.5, imbalance=1.5, steps=600), Off())
    assert found.step_ms == pytest.approx(10.2 * 1.5, rel=4 * 0.53 / 600**0.5)
    assert found.gap_p99_ms > 1.5 * found.gap_p50_ms


@pytest.mark.parametrize("times", [0.5, 2.0, 2.9])
def test_corrections_come_to_what_is_true_and_do_not_overshoot(times: float) -> None:
    """Steps are planned, learnt of and corrected in the order of a server: each is held against what was predicted by
    the corrections of its own moment."""
    believed = FormulaCosts(gamma_max=5)
    true = FormulaCosts(gamma_max=5, base=10 * times, per_row=0.1 * times, per_draft=0.5 * times)
    simulation = Simulation(scenario(believed=believed, true=true, warmup=0, steps=60), Off())
    planner, factors = simulation.planner, []
    catch_up = planner.catch_up

    def watched() -> None:
        catch_up()
        factors.append(planner._residuals.factor(8, 0))

    planner.catch_up = watched  # type: ignore[method-assign]
    asyncio.run(simulation.run())
    assert factors[-1] == pytest.approx(times, rel=0.02)
    assert max(factors) <= max(1.0, times * 1.001)
    assert min(factors) >= min(1.0, times * 0.999)


@dataclass(frozen=True)
class Contest:
    """Costs, sequences, acceptance; what share of the best fixed length the dynamic policy reaches at least."""

    costs: FormulaCosts
    sequences: int
    acceptance: float
    least: float = 0.98
    prompt: int = 1
    output: int = 256


SMOOTH = FormulaCosts(gamma_max=5)
STEEP = FormulaCosts(gamma_max=5, base=2.0, per_row=0.5, per_draft=0.6)
CLIFFS = FormulaCosts(gamma_max=5, per_row=0.02, cliffs=(4, 16, 40, 96, 160), cliff_ms=6.0)
CONTESTS = {
    f"{name}-{sequences}-{acceptance}": Contest(costs, sequences, acceptance)
    for name, costs in (("smooth", SMOOTH), ("cliffs", CLIFFS), ("steep", STEEP))
    for sequences in (2, 6, 12)
    for acceptance in (0.3, 0.6, 0.9)
} | {
    f"{name}-{sequences}-{acceptance}-short": Contest(costs, sequences, acceptance, prompt=48, output=48)
    for name, costs, sequences in (("smooth", SMOOTH, 1), ("smooth", SMOOTH, 64), ("steep", STEEP, 64))
    for acceptance in (0.3, 0.9)
}
"""Among them one sequence alone, and many that come with prompts in the steps of others."""


@pytest.mark.parametrize("contest", by_day(CONTESTS))
def test_dynamic_keeps_up_with_the_best_fixed_length(contest: Contest) -> None:
    """With exact costs. Everything is drawn by one seed, and policies meet the same luck."""
    case = scenario(
        contest.costs,
        traffic=Traffic(
            sequences=contest.sequences,
            prompt=Lengths(contest.prompt, contest.prompt),
            output=Lengths(contest.output, contest.output),
        ),
        acceptance=Acceptance(rates=(contest.acceptance,)),
        warmup=128,
        steps=512 if contest.sequences <= 2 else 192,
    )
    best = max(figures(case, policy).tokens_per_s for policy in (Off(), *map(Fixed, range(1, 6))))
    found = figures(case, Dynamic())
    assert found.tokens_per_s >= contest.least * best, f"{found.tokens_per_s / best:.3f} of the best: {found}"


def test_dynamic_passes_every_fixed_length_where_costs_have_cliffs() -> None:
    """A budget stops at a cliff, which no fixed length can."""
    case = scenario(CLIFFS, sequences=8, acceptance=Acceptance(rates=(0.3,)), warmup=64, steps=128)
    best = max(figures(case, policy).tokens_per_s for policy in (Off(), Fixed(1)))
    assert figures(case, Dynamic()).tokens_per_s > 1.1 * best


@pytest.mark.parametrize("rate", [None, 30.0])
def test_a_number_of_requests_ends_when_the_last_one_does(rate: float | None) -> None:
    traffic = Traffic(sequences=4, rate=rate, output=Lengths(3, 9), requests=11, staggered=False)
    case = scenario(traffic=traffic, warmup=0, steps=10_000)
    simulation = Simulation(case, Fixed(2))
    found = asyncio.run(simulation.run())
    arrivals = Arrivals(traffic, dp=1, seed=1)
    assert found.tokens == sum(arrivals.request(uid).stopping.max_tokens for uid in range(1, 12))
    assert len(simulation.books.live) == 0
