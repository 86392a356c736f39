"""What is simulated: costs, layout and limits, from a measured profile or by formula, with words for them. Knows no
policy and no traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from configs.load import SettingsError
from parallel.mesh import Mesh
from runtime.profile import files
from runtime.simulate.analytic import AnalyticCosts, Assumptions
from runtime.simulate.geometry import GEOMETRIES, Geometry
from runtime.simulate.machines import GPUS, Gpu
from runtime.verification.costs import CostCurve, StepCosts
from runtime.verification.profile import ProfileCosts

MAY_BE_NONE = {
    *("overlap", "layer_us", "exchange_us", "host_ms", "cache_values", "attention_flops", "recurrent_layers"),
    *("recurrent_params", "state_values", "record_values", "dense_layers", "dense_params", "shared_params"),
}
"""Figures that may be 0."""

Values = TypeVar("Values", Gpu, Geometry, Assumptions)


@dataclass(frozen=True, slots=True)
class HeldContext:
    """Costs of sequences that came with `tokens` of context, which other ranks have computed."""

    costs: StepCosts
    tokens: int

    @property
    def gamma_max(self) -> int:
        return self.costs.gamma_max

    @property
    def tiers(self) -> tuple[int, ...]:
        return self.costs.tiers

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        """As in the protocol; context: what has come since."""
        return self.costs.at(num_sequences, context + self.tokens, sampled=sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """facts: rows (what, figure) to print. dp: data-parallel ranks. gamma_max: longest draft that is priced.
    max_step_tokens: most rows of a rank's pass; None leaves it open. most_sequences: per rank that were measured; None
    where costs are by formula."""

    costs: StepCosts
    facts: tuple[tuple[str, str], ...]
    dp: int
    gamma_max: int
    max_step_tokens: int | None = None
    most_sequences: int | None = None

    def problems(self, num_sequences: int, tokens: int) -> list[str]:
        """What stands against running so many sequences of so many tokens on a data-parallel rank, a line each."""
        if self.most_sequences is not None and num_sequences > self.most_sequences:
            return [
                f"{num_sequences} sequences per rank: the profile has at most {self.most_sequences}; beyond, its costs "
                "go on in a straight line"
            ]
        if isinstance(self.costs, AnalyticCosts):
            needed, there = self.costs.memory_bytes(num_sequences, tokens), self.costs.gpu.memory_bytes
            if needed > there:
                return [
                    f"{num_sequences} sequences of {tokens} tokens per rank: weights and state take "
                    f"{needed / 1e9:.0f} GB per GPU, and {self.costs.gpu.name} has {there / 1e9:.0f}"
                ]
        return []


def measured(path: Path) -> Deployment:
    """That of a profile. Raises SettingsError."""
    try:
        profile = files.read(path)
    except files.ProfileFileError as error:
        raise SettingsError(f"--profile {error}") from None
    identity = profile.identity
    return Deployment(
        costs=ProfileCosts(profile),
        facts=(
            ("costs", f"measured {profile.created.isoformat()}, {path}"),
            ("model", f"{identity.model_type}, {identity.dtype}, {identity.numerics} numerics"),
            ("layout", f"dp {identity.dp}, tp {identity.tp}, ep {identity.ep}"),
        ),
        dp=identity.dp,
        gamma_max=identity.gamma_max,
        max_step_tokens=identity.max_step_tokens,
        most_sequences=max(cell.num_sequences for cell in profile.cells),
    )


def by_formula(
    *,
    gpu: str,
    geometry: str,
    dp: int,
    tp: int,
    ep: int,
    gamma_max: int,
    tiers: tuple[int, ...],
    changes: Sequence[str],
) -> Deployment:
    """changes: KEY=VALUE of fields of Gpu, Geometry or Assumptions. Raises SettingsError, which names the flag."""
    values = _changes(changes)
    machine = _changed(_named(GPUS, "--gpu", gpu), values)
    model = _changed(_named(GEOMETRIES, "--geometry", geometry), values)
    assumptions = _changed(Assumptions(), values)
    if values:
        known = sorted({field.name for one in (machine, model, assumptions) for field in fields(one)} - {"name"})
        raise SettingsError(f"--set {next(iter(values))}: no such figure; there are {', '.join(known)}")
    try:
        mesh = Mesh(dp=dp, tp=tp, ep=ep)
        costs = AnalyticCosts(machine, model, mesh, assumptions, gamma_max=gamma_max, tiers=tiers)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return Deployment(
        costs=costs,
        facts=(
            ("costs", "by formula (runtime/simulate/analytic.py)"),
            ("GPU", f"{gpu}, {mesh.size} of them"),
            ("model", f"{geometry}, {model.num_params / 1e9:.3g} billion parameters"),
            ("layout", f"dp {dp}, tp {tp}, ep {ep}; weights {costs.weight_bytes_per_gpu / 1e9:.0f} GB per GPU"),
            ("taken for granted", ", ".join(f"{name} {value}" for name, value in asdict(assumptions).items())),
        ),
        dp=dp,
        gamma_max=gamma_max,
    )


def _named(table: dict[str, Any], option: str, name: str) -> Any:
    if name not in table:
        raise SettingsError(f"{option} {name}: not known; there are {', '.join(table)}")
    return table[name]


def _changes(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for (name, equals, value), text in zip(pairs, texts, strict=True):
        if not (name and equals and value):
            raise SettingsError(f"--set {text!r}: not of the form KEY=VALUE, as in memory_share=0.7")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _changed(values: Values, changes: dict[str, str]) -> Values:
    """With those of `changes` that are its fields, which are taken out of there."""
    found: dict[str, Any] = {}
    for field in fields(values):
        if field.name == "name" or field.name not in changes:
            continue
        text = changes.pop(field.name)
        kind = int if isinstance(getattr(values, field.name), int) else float
        try:
            found[field.name] = kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise SettingsError(f"--set {field.name}={text}: give {wanted}") from None
        least = "from 0" if field.name in MAY_BE_NONE else "above 0"
        if not (0 <= found[field.name] < math.inf and (found[field.name] or field.name in MAY_BE_NONE)):
            raise SettingsError(f"--set {field.name}={text}: give a number {least}")
    return replace(values, **found)
