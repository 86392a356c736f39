"""Costs by formula: what they count, that they rise where they must, and their models of chance against draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.mesh import Mesh
from runtime.simulate.analytic import AnalyticCosts, Assumptions, busiest_load, distinct_experts
from runtime.simulate.geometry import GEOMETRIES, Geometry
from runtime.simulate.machines import GPUS

ALONE = Mesh()
ROOT = Path(__file__).parents[2]


def costs(
    geometry: str | Geometry = "deepseek-v3",
    gpu: str = "h200",
    mesh: Mesh = ALONE,
    tiers: tuple[int, ...] = (),
    **changes: Any,
) -> AnalyticCosts:
    model = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
    return AnalyticCosts(GPUS[gpu], model, mesh, Assumptions(**changes), gamma_max=5, tiers=tiers)


def step(of: AnalyticCosts, sequences: int, rows: int, gamma: int = 0, context: float = 1000.0) -> float:
    return float(of.at(sequences, context).step_ms(np.array([rows]), waiting=gamma, gamma=gamma)[0])


@pytest.mark.parametrize(("name", "billions"), [("deepseek-v3", 671), ("qwen3-next", 80)])
def test_models_have_the_parameters_they_are_named_for(name: str, billions: float) -> None:
    assert GEOMETRIES[name].num_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_demo_is_the_bundled_one() -> None:
    config = json.loads((ROOT / "configs/models/demo/config.json").read_text())
    demo = GEOMETRIES["demo"]
    assert (demo.hidden, demo.vocab, demo.num_layers) == (
        config["hidden_size"],
        config["vocab_size"],
        config["num_hidden_layers"],
    )
    assert (demo.experts, demo.active) == (config["num_experts"], config["num_experts_per_tok"])
    assert demo.expert_params == 3 * config["hidden_size"] * config["moe_intermediate_size"]
    assert demo.attention_layers == config["layer_types"].count("full_attention")


def test_distinct_experts_are_as_many_as_draws_touch() -> None:
    generator, rows = np.random.default_rng(0), 24
    drawn = [
        len({expert for _ in range(rows) for expert in generator.permutation(64)[:4].tolist()}) for _ in range(300)
    ]
    assert distinct_experts(64, 4, np.array(float(rows))) == pytest.approx(np.mean(drawn), rel=0.01)
    assert distinct_experts(256, 8, np.array([1.0])).tolist() == pytest.approx([8])


@pytest.mark.parametrize(("mean", "ranks"), [(20.0, 8), (400.0, 64)])
def test_the_busiest_load_is_that_of_draws(mean: float, ranks: int) -> None:
    drawn = np.random.default_rng(0).poisson(mean, (4000, ranks)).max(1).mean()
    assert busiest_load(np.array(mean), ranks) == pytest.approx(drawn, rel=0.03)
    assert busiest_load(np.array(mean), 1) == mean
    assert busiest_load(np.array(0.01), ranks) <= 0.01 * ranks


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=4), Mesh(dp=8, ep=8), Mesh(dp=4, tp=2, ep=8)], ids=str)
@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_costs_rise_with_rows_drafts_sequences_and_context(name: str, mesh: Mesh) -> None:
    of = costs(name, mesh=mesh)
    rows = np.arange(1, 600, 7)
    for gamma in (0, 1, 5):
        curve = of.at(1, 500.0).step_ms(rows, waiting=gamma, gamma=gamma)
        assert (np.diff(curve) >= 0).all()
    assert step(of, 8, 16) < step(of, 8, 16, 1) < step(of, 8, 16, 2)
    assert step(of, 8, 16, 1, 100) < step(of, 8, 16, 1, 30_000)
    assert step(of, 8, 40, 1) <= step(of, 9, 40, 1)


def test_one_row_reads_the_weights_that_it_uses() -> None:
    """Of a model without context on one GPU that does nothing but read: bytes over bandwidth."""
    geometry = replace(GEOMETRIES["qwen3-next"], cache_values=0, state_values=0, record_values=0, attention_flops=0)
    of = costs(geometry, memory_share=1.0, layer_us=0.0, host_ms=0.0)
    active = (
        geometry.num_params
        - geometry.vocab * geometry.hidden
        - geometry.moe_layers * (geometry.experts - geometry.active) * geometry.expert_params
    )
    # The head is bfloat16, the rest FP8; the law is read and written besides.
    read = active + geometry.vocab * geometry.hidden + 6 * 4 * geometry.vocab - geometry.vocab * geometry.hidden
    read += geometry.vocab * geometry.hidden
    assert step(of, 1, 1) == pytest.approx(read / 4.8e12 * 1000, rel=1e-3)


def test_many_rows_compute_rather_than_read() -> None:
    of = costs("qwen3-next", layer_us=0.0, host_ms=0.0)
    more = step(of, 1, 40_000, context=1.0) / step(of, 1, 20_000, context=1.0)
    assert more == pytest.approx(2, rel=0.02)


def test_ranks_that_own_experts_share_the_reading_and_pay_for_the_exchange() -> None:
    alone, spread = costs("qwen3-next"), costs("qwen3-next", mesh=Mesh(dp=8, ep=8))
    assert spread.weight_bytes_per_gpu < alone.weight_bytes_per_gpu / 5
    slow = costs("qwen3-next", mesh=Mesh(dp=8, ep=8), exchange_us=50.0)
    assert step(slow, 8, 8) - step(spread, 8, 8) == pytest.approx(48 * 2 * 40e-3)
    hidden = costs("qwen3-next", mesh=Mesh(dp=8, ep=8), overlap=1.0)
    assert step(hidden, 64, 64) < step(spread, 64, 64)
    assert step(costs("qwen3-next", mesh=Mesh(dp=16, ep=16)), 64, 384) > step(
        costs("qwen3-next", "gb300", mesh=Mesh(dp=16, ep=16)), 64, 384
    ), "beyond a domain rows go by the network"


def test_a_stated_skew_takes_the_place_of_the_expected_one() -> None:
    of = {skew: costs(mesh=Mesh(dp=64, ep=64), expert_skew=skew) for skew in (None, 1.0, 4.0)}
    assert step(of[1.0], 60, 360) < step(of[None], 60, 360) < step(of[4.0], 60, 360)


def test_passes_are_padded_to_tiers() -> None:
    of = costs("qwen3-next", tiers=(8, 16))
    assert step(of, 1, 1) == step(of, 1, 8) < step(of, 1, 9) == step(of, 1, 16) < step(of, 1, 17)


def test_memory_counts_weights_caches_and_states() -> None:
    of = costs("deepseek-v3", mesh=Mesh(dp=64, ep=64))
    assert of.memory_bytes(1, 1000) - of.memory_bytes(0, 0) == 62 * 576 * 2 * 1000
    assert of.memory_bytes(0, 0) == pytest.approx(30e9, rel=0.1)


def test_experts_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(ValueError, match="256 experts"):
        costs(mesh=Mesh(dp=3, ep=3))
