"""Simulations with costs by formula, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

from fakes.planners import FormulaCosts

from runtime.simulate.acceptance import Acceptance
from runtime.simulate.figures import Figures
from runtime.simulate.loop import Scenario, Simulation
from runtime.simulate.traffic import Traffic
from runtime.verification.policy import Policy


def scenario(costs: Any = None, *, sequences: int = 8, **changes: Any) -> Scenario:
    """changes: of fields of Scenario; `costs` is what steps cost and what the planner believes."""
    costs = costs or FormulaCosts(gamma_max=5)
    fields: dict[str, Any] = {
        "believed": costs,
        "true": costs,
        "dp": 1,
        "traffic": Traffic(sequences=sequences),
        "acceptance": Acceptance(rates=(0.6,)),
        "warmup": 50,
        "steps": 200,
        "seed": 1,
    }
    return Scenario(**{**fields, **changes})


def figures(of: Scenario, policy: Policy) -> Figures:
    return asyncio.run(Simulation(of, policy).run())
