"""A profile on a terminal. Pure: from a profile to rich tables and lines."""

from __future__ import annotations

from rich.table import Table

from runtime.profile.document import Profile
from runtime.profile.forecast import ACCEPTANCES, Forecast

REMARKS = (
    "γ: drafts per sequence, all verified, at the shortest context that was measured",
    "tokens/s: by formula, were every draft to stand with probability α; (1 − α^(γ+1)) / (1 − α) per step and sequence",
)
"""What the tables need said."""


def facts(profile: Profile) -> list[tuple[str, str]]:
    """What was measured, where and how, as rows to print."""
    identity, method = profile.identity, profile.method
    machines = ", ".join(dict.fromkeys(machine or "unknown" for machine in identity.machines))
    rows = [
        ("model", f"{identity.model_type}, {identity.dtype}, {identity.numerics} numerics"),
        ("checkpoint", identity.checkpoint or "unknown"),
        ("layout", f"dp {identity.dp}, tp {identity.tp}, ep {identity.ep}; collectives: {identity.collectives}"),
        ("machine", f"{machines}; {', '.join(dict.fromkeys(identity.devices))}; {identity.worker_threads} thread(s)"),
        ("versions", f"outrider {identity.outrider_version}, torch {identity.torch_version}"),
        (
            "measured",
            f"{profile.created.isoformat()}, {method.duration_s:.0f} s, {len(profile.cells)} cells of "
            f"{method.repeats} steps, median{', quick' if method.quick else ''}",
        ),
    ]
    if profile.tiers:
        rows.append(("tiers", f"rows are padded to {profile.tiers[0]}, up to {profile.tiers[-1]}"))
    if profile.imbalance is not None:
        rows.append(("imbalance", f"expert rows, busiest rank over mean: p50 {profile.imbalance.p50:.2f}, "
                     f"p95 {profile.imbalance.p95:.2f}"))  # fmt: skip
    return rows


def step_table(forecast: Forecast, *, sampled: bool) -> Table:
    """Milliseconds of a step by sequences and drafts, at the shortest context."""
    table = _table(f"ms per step, {_way(sampled)}", forecast.gammas, "sequences")
    for load in forecast.loads:
        steps = [f"{forecast.step_ms(load, gamma, sampled=sampled):.1f}" for gamma in forecast.gammas]
        table.add_row(str(load), *steps)
    return table


def speed_table(forecast: Forecast, *, sampled: bool) -> Table:
    """Tokens per second by sequences, acceptance and drafts; the best of each row stands out."""
    table = _table(f"tokens/s, {_way(sampled)}", forecast.gammas, "sequences", "α")
    for load in forecast.loads:
        for number, acceptance in enumerate(ACCEPTANCES):
            best = forecast.best_gamma(load, acceptance, forecast.gammas, sampled=sampled)
            speeds = []
            for gamma in forecast.gammas:
                text = f"{forecast.tokens_per_s(load, gamma, acceptance, sampled=sampled):.0f}"
                speeds.append(f"[bold]{text}[/]" if gamma == best else text)
            table.add_row("" if number else str(load), f"{acceptance:g}", *speeds)
    return table


def _way(sampled: bool) -> str:
    return "sampled" if sampled else "greedy"


def _table(title: str, gammas: list[int], *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in (*names, *(f"γ {gamma}" for gamma in gammas)):
        table.add_column(name, justify="right")
    return table
