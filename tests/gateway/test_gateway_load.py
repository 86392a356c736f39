"""Many streams through smg leave nothing behind: docs/benchmarks/gateway_load.py for seconds instead of minutes."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def load() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("gateway_load")


@pytest.mark.parametrize(
    ("seconds", "warm_up_s", "quiet"), [(5.0, 3.0, 0.15), pytest.param(120.0, 30.0, 0.03, marks=pytest.mark.full)]
)
def test_256_streams_leave_nothing_behind(
    load: ModuleType, tmp_path: Path, seconds: float, warm_up_s: float, quiet: float
) -> None:
    plan = load.Plan(seconds=seconds, warm_up_s=warm_up_s, max_tokens=8, quiet=quiet)
    found = asyncio.run(load.measure(plan, tmp_path))
    assert found.problems() == []
    assert found.called.ended >= plan.streams / 2
    assert found.called.left > 0
    assert found.steps.steps > 0
    assert load.report(found).row_count > 10


def test_a_leak_is_told_from_noise(load: ModuleType) -> None:
    times = [float(second) for second in range(300)]
    wobble = [(-1) ** second * 2 * load.MIB for second in range(300)]
    steady = load.line_of(times, [100 * load.MIB + one for one in wobble])
    leaking = load.line_of(times, [100 * load.MIB + one + second * load.MIB // 20 for second, one in enumerate(wobble)])
    assert steady.is_quiet(0.02)
    assert not leaking.is_quiet(0.02)
    assert leaking.growth == pytest.approx(15 * load.MIB, rel=0.05)


def test_quantiles_are_those_of_the_buckets(load: ModuleType) -> None:
    counts = [0] * (len(load.OVERHEAD_BOUNDS_S) + 1)
    counts[3], counts[5] = 90, 10
    low, high = load.OVERHEAD_BOUNDS_S[2], load.OVERHEAD_BOUNDS_S[3]
    assert load.quantile(0.45, counts) == pytest.approx((low + high) / 2)
    assert load.OVERHEAD_BOUNDS_S[4] < load.quantile(0.99, counts) <= load.OVERHEAD_BOUNDS_S[5]
    counts[-1] = 1000
    assert load.quantile(0.99, counts) == load.OVERHEAD_BOUNDS_S[-1]
