"""The planner that serves, on costs of one's own, under a dynamic policy. Test material only."""

from __future__ import annotations

from collections.abc import Callable

from fakes.planners import planner_of

from configs.schema import SpeculationSettings
from runtime.verification.costs import StepCosts
from runtime.verification.policy import Dynamic, Policy
from runtime.verification.policy_planner import PolicyPlanner

SELDOM = 2**20
"""Steps between exploring ones: none comes in a test."""


def planner(
    costs: StepCosts,
    policy: Policy | None = None,
    *,
    classes: tuple[tuple[int, Policy], ...] = (),
    explore_every: int = SELDOM,
) -> PolicyPlanner:
    """policy: by default a dynamic one with nothing set."""
    return planner_of(
        policy or Dynamic(),
        gamma_max=costs.gamma_max,
        classes=classes,
        costs=costs,
        settings=SpeculationSettings(explore_every=explore_every),
        capacity=8,
    )


def planners(costs: StepCosts, policy: Policy | None = None) -> Callable[[], PolicyPlanner]:
    return lambda: planner(costs, policy)
