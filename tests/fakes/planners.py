"""Planners and costs for tests of the host: the real planner under a policy at will, and costs by formula."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from configs.schema import SpeculationSettings
from runtime.link import LoadedGroup, RankProgress
from runtime.policies import Found
from runtime.verification.costs import CostCurve, Floats, Ints, StepCosts
from runtime.verification.policy import Off, Policy, PolicyState, PolicyStore
from runtime.verification.policy_planner import PolicyPlanner
from runtime.verification.view import ProfileState, ProfileStatus

USABLE = ProfileStatus(state=ProfileState.OK, detail="costs by formula")


@dataclass(frozen=True)
class FormulaCosts:
    """base + per_row · rows + per_draft · γ, and `cliff_ms` more from each row count of `cliffs` on; milliseconds."""

    gamma_max: int = 4
    base: float = 10.0
    per_row: float = 0.1
    per_draft: float = 0.5
    cliffs: tuple[int, ...] = ()
    cliff_ms: float = 20.0
    tiers: tuple[int, ...] = field(default=())

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        return self

    def step_ms(self, rows: Ints, *, waiting: int, gamma: int) -> Floats:
        passed = sum(np.asarray(rows) >= cliff for cliff in self.cliffs) if self.cliffs else 0
        return np.asarray(self.base + self.per_row * np.asarray(rows) + self.per_draft * gamma + self.cliff_ms * passed)


def store_of(policy: Policy, *, gamma_max: int = 4, classes: tuple[tuple[int, Policy], ...] = ()) -> PolicyStore:
    """A store with this policy in force, for which every profile is good enough."""
    state = PolicyState(policy=policy, revision=1, effective_step=1, classes=classes)
    return PolicyStore(state, gamma_max=gamma_max, profile=lambda: USABLE)


def planner_of(
    policy: Policy = Off(),  # noqa: B008
    *,
    gamma_max: int = 4,
    classes: tuple[tuple[int, Policy], ...] = (),
    costs: StepCosts | None = None,
    settings: SpeculationSettings | None = None,
    capacity: int = 64,
) -> PolicyPlanner:
    store = store_of(policy, gamma_max=gamma_max, classes=classes)
    planner = PolicyPlanner(store, settings or SpeculationSettings(), capacity=capacity)
    if costs is not None:
        planner.use_profile(costs, USABLE)
    return planner


@dataclass(frozen=True)
class FormulaProfiles:
    """A `ProfileSource` that has one for every group. costs: None finds none."""

    costs: StepCosts | None

    async def find(self, group: LoadedGroup, progress: RankProgress, *, may_measure: bool) -> Found:
        status = ProfileStatus(state=ProfileState.MISSING, detail="none") if self.costs is None else USABLE
        return Found(costs=self.costs, status=status)


class Told:
    """The real planner under a policy that tests change from step to step."""

    def __init__(self, planner: PolicyPlanner | None = None) -> None:
        self.planner = planner or planner_of()

    def under(self, policy: Policy) -> PolicyPlanner:
        store = self.planner._store
        if policy != store.state.policy:
            store.set(policy, expected_revision=None, effective_step=1, set_by="a test", now=0)
        return self.planner
