"""Several policies under several loads, one cell after the other, and what came of them as one document. Knows no files
and no terminal."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from runtime.bench.load import Policy as PolicyName
from runtime.simulate.deployment import Deployment, HeldContext
from runtime.simulate.figures import Figures
from runtime.simulate.loop import Scenario, Simulation
from runtime.simulate.traffic import Traffic
from runtime.verification.policy import Dynamic, Fixed, Off, Policy

SCHEMA_VERSION = 1
ENOUGH_PASSES = 60_000
"""Passes of sequences that a cell measures, within the bounds below."""
MIN_STEPS, MAX_STEPS = 400, 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """base: the scenario of all cells but for their traffic. context: tokens that sequences come with. policies, by
    the names that users give them. steps: that count in each cell; None takes what the load needs."""

    deployment: Deployment
    base: Scenario
    loads: tuple[Traffic, ...]
    policies: tuple[PolicyName, ...]
    context: int
    steps: int | None

    def scenario(self, traffic: Traffic) -> Scenario:
        steps = self.steps or min(max(MIN_STEPS, ENOUGH_PASSES // (traffic.sequences * self.base.dp)), MAX_STEPS)
        costs = HeldContext(self.deployment.costs, self.context)
        fields = {name: getattr(self.base, name) for name in Scenario.__slots__}
        return Scenario(**{**fields, "believed": costs, "true": costs, "traffic": traffic, "steps": steps})

    @property
    def num_steps(self) -> int:
        """Of all cells, warm-ups among them."""
        scenarios = [self.scenario(traffic) for traffic in self.loads]
        return len(self.policies) * sum(scenario.warmup + scenario.steps for scenario in scenarios)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What is simulated, as rows to print."""
        base, model = self.base, self.base.acceptance
        rates = " ".join(f"{rate:.2f}" for rate in model.means(base.gamma_max))
        chances = "its mean" if model.concentration is None else f"Beta, concentration {model.concentration:g}"
        lengths = self.loads[0]
        return [
            *self.deployment.facts,
            ("sequences", f"context {self.context} + prompt {lengths.prompt} + output {lengths.output} tokens"),
            (
                "acceptance",
                f"{rates} by position; chance of a draft: {chances}; spread over sequences {model.spread:g}; noise of "
                f"scores {model.score_noise:g}",
            ),
            ("steps", f"noise {base.noise:g}, imbalance {base.imbalance:g}; warm-up {base.warmup}; seed {base.seed}"),
        ]

    @property
    def remarks(self) -> list[str]:
        """What stands against the loads, a line each."""
        return [
            line
            for traffic in self.loads
            for line in self.deployment.problems(traffic.sequences, self.context + traffic.longest)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One policy under one load."""

    traffic: Traffic
    policy: str
    figures: Figures

    @property
    def load(self) -> str:
        """In words."""
        if self.traffic.rate is None:
            return f"{self.traffic.sequences} per rank"
        return f"{self.traffic.rate:g}/s"


async def run_study(study: Study, progress: Callable[[str, int], None]) -> AsyncIterator[Cell]:
    """The cells in order, as they are done. progress: hears what runs and how many steps of all are done."""
    done = 0
    for traffic in study.loads:
        scenario = study.scenario(traffic)
        for name in study.policies:
            simulation = Simulation(scenario, policy_of(name))
            tell = partial(_tell, progress, f"{traffic.sequences} per rank, {name}", done)
            yield Cell(traffic=traffic, policy=str(name), figures=await simulation.run(tell))
            done += scenario.warmup + scenario.steps


def _tell(progress: Callable[[str, int], None], text: str, before: int, steps: int) -> None:
    progress(text, before + steps)


def policy_of(name: PolicyName) -> Policy:
    """What the planner calls it."""
    if name.dynamic is not None:
        bounds = name.dynamic
        return Dynamic(gamma_min=bounds.gamma_min or 0, gamma_max=bounds.gamma_max, itl_limit_ms=bounds.itl_limit_ms)
    return Off() if name.gamma is None else Fixed(name.gamma)


def ratio(cells: Sequence[Cell], cell: Cell, to: str) -> float | None:
    """Tokens per second over those of another policy under the same load; None where it was not simulated."""
    other = next((one for one in cells if one.traffic == cell.traffic and one.policy == to), None)
    return None if other is None else cell.figures.tokens_per_s / other.figures.tokens_per_s


def document(study: Study, cells: Sequence[Cell]) -> dict[str, Any]:
    """For JSON. Fields of figures and of the scenario are those of their classes."""
    base = {name: getattr(study.base, name) for name in ("dp", "gamma_max", "noise", "imbalance", "warmup", "seed")}
    return {
        "schema_version": SCHEMA_VERSION,
        "outrider_version": importlib.metadata.version("outrider"),
        "deployment": dict(study.deployment.facts),
        "remarks": study.remarks,
        "context": study.context,
        "scenario": {**base, "max_step_tokens": study.base.max_step_tokens},
        "acceptance": asdict(study.base.acceptance),
        "cells": [
            {
                "load": cell.load,
                "traffic": asdict(cell.traffic),
                "policy": cell.policy,
                "ratio_to_off": ratio(cells, cell, "off"),
                "ratio_to_fixed_5": ratio(cells, cell, "fixed:5"),
                **asdict(cell.figures),
            }
            for cell in cells
        ],
    }
