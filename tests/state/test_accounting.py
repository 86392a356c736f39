"""Memory accounting: the budget holds, nothing useful is left out, and the prediction is what the pools really take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import CacheSettings
from state.accounting import MemoryPlan, accounting_rows, plan_memory
from state.layout import DRAFTER_GROUP, TARGET_GROUP, ConvSpec, GatedDeltaSpec, PagedKVSpec, StateLayout

KV = PagedKVSpec(group=TARGET_GROUP, num_kv_heads=2, head_dim=64, dtype="float32")
DRAFTER_KV = PagedKVSpec(group=DRAFTER_GROUP, num_kv_heads=2, head_dim=64, dtype="float32")
CONV = ConvSpec(channels=512, width=4, dtype="float32")
DELTA = GatedDeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=64, value_dim=64)
LAYOUT = StateLayout(
    layers=((CONV, DELTA), (CONV, DELTA), (KV,), (CONV, DELTA), (CONV, DELTA), (KV,), (DRAFTER_KV,)),
    hidden_size=192,
    vocab_size=4096,
    activation_dtype="float32",
)


def plan(
    memory_mib: int = 256,
    *,
    max_running: int = 64,
    max_model_len: int = 4096,
    page_size: int = 16,
    gamma_max: int = 8,
    drafting: bool = True,
    layout: StateLayout = LAYOUT,
    max_step_tokens: int = 512,
) -> MemoryPlan:
    return plan_memory(
        layout,
        CacheSettings(memory_mib=memory_mib, max_running=max_running, page_size=page_size),
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        gamma_max=gamma_max,
        hidden_window=16,
        drafting=drafting,
    )


def test_bytes_of_the_parts_follow_from_the_shapes() -> None:
    figures = plan()
    assert figures.slot.state == 4 * (3 * 512 * 4 + 4 * 64 * 64 * 4)
    assert figures.slot.hidden_window == 16 * 192 * 4
    assert figures.slot.draft_laws == 8 * 4096 * 4
    assert figures.slot.token_log == (4096 + 8 + 2) * 4
    assert figures.record_bytes == (512 + 32) * 4 * (512 * 4 + 4 * (2 * 64 + 4 * 64 + 2 * 4))
    pages = figures.sizes.num_pages[0]
    assert figures.kv_bytes == ((pages + 1) * 16 * 2 * 1024, (pages + 1) * 16 * 1024)


@given(
    memory_mib=st.integers(8, 600),
    max_running=st.integers(1, 80),
    max_model_len=st.integers(2, 5000),
    page_size=st.sampled_from([1, 16, 48]),
    gamma_max=st.integers(0, 8),
    drafting=st.booleans(),
)
def test_the_budget_holds_one_longest_sequence_and_wastes_no_page(
    memory_mib: int, max_running: int, max_model_len: int, page_size: int, gamma_max: int, drafting: bool
) -> None:
    try:
        figures = plan(
            memory_mib,
            max_running=max_running,
            max_model_len=max_model_len,
            page_size=page_size,
            gamma_max=gamma_max,
            drafting=drafting,
        )
    except ValueError:
        assert memory_mib < 30
        return
    sizes = figures.sizes
    page_bytes = 3 * 1024 * page_size
    assert figures.total_bytes <= memory_mib << 20
    assert min(sizes.num_pages) >= figures.pages_per_longest
    is_full = figures.total_bytes + page_bytes > memory_mib << 20
    assert is_full or sizes.num_pages[0] == sizes.num_slots * figures.pages_per_longest
    if sizes.num_slots < max_running:
        one_more = figures.record_bytes + (sizes.num_slots + 2) * figures.slot.total
        assert one_more + (figures.pages_per_longest + 1) * page_bytes > memory_mib << 20


def test_too_small_a_budget_is_refused_with_the_figures() -> None:
    with pytest.raises(
        ValueError, match=r"memory_mib is 8, but one sequence of 4096 tokens needs .* MiB.*raise"
    ) as refusal:
        plan(8)
    enough = int(str(refusal.value).split("cache.memory_mib to ")[1].split()[0])
    assert plan(enough).sizes.num_slots >= 1
    with pytest.raises(ValueError):
        plan(enough - 1)


def test_slots_give_way_to_the_pages_of_one_longest_sequence() -> None:
    figures = plan(32)
    assert 1 <= figures.sizes.num_slots < 64
    assert figures.sizes.num_pages[0] >= figures.pages_per_longest


def test_without_a_drafter_nothing_is_kept_for_one() -> None:
    bare = StateLayout(layers=LAYOUT.layers[:-1], hidden_size=192, vocab_size=4096, activation_dtype="float32")
    figures = plan(drafting=False, layout=bare)
    assert (figures.slot.hidden_window, figures.slot.draft_laws) == (0, 0)
    assert (figures.sizes.gamma_max, figures.sizes.hidden_window) == (0, 0)
    assert figures.cache_groups == (TARGET_GROUP,)


def test_a_model_without_attention_needs_no_pages() -> None:
    figures = plan(layout=StateLayout(layers=((CONV, DELTA),), hidden_size=8, vocab_size=8, activation_dtype="float32"))
    assert figures.sizes.num_pages == ()
    assert figures.sizes.num_slots == 64
    assert figures.num_sequences_of(4096) == (64, "slots")


def test_rows_say_how_many_sequences_fit_and_what_limits_them() -> None:
    figures = plan(32)
    rows = dict(accounting_rows(LAYOUT, figures, max_model_len=4096, max_running=64))
    count, limit = figures.num_sequences_of(4096)
    assert (count, limit) == (1, "pages")
    assert rows["sequences of 4096 tokens (longest)"] == "1, limited by pages"
    assert rows["KV per token"] == "target 2 KiB, drafter 1 KiB"
    assert "64 asked for" in rows["slots"]
    assert rows["all"].endswith("of 32 MiB")
    assert plan(max_model_len=32).num_sequences_of(32) == (64, "slots")


def test_the_prediction_is_what_the_device_pools_take() -> None:
    torch = pytest.importorskip("torch")
    pools = pytest.importorskip("state.pools")
    figures = plan(64)
    device_pools = pools.DevicePools(LAYOUT, figures.sizes, torch.device("cpu"))
    allocated = 0
    seen: set[int] = set()

    def count(value: object) -> None:
        nonlocal allocated
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                allocated += value.nbytes
        elif isinstance(value, dict):
            for part in value.values():
                count(part)
        elif isinstance(value, list):
            for part in value:
                for name in part.__dataclass_fields__:
                    count(getattr(part, name))

    for name, value in vars(device_pools).items():
        if name not in ("conv_of", "delta_of"):
            count(value)
    assert allocated == pytest.approx(figures.total_bytes, rel=2e-3)


def warnings_of(figures: MemoryPlan, *, max_model_len: int = 4096) -> dict[str, str]:
    rows = accounting_rows(LAYOUT, figures, max_model_len=max_model_len, max_running=figures.sizes.num_slots)
    return {what: figure for what, figure in rows if what.startswith("warning")}


def test_slots_that_starve_pages_are_advised_against_with_the_number_that_would_run() -> None:
    starved = plan(max_running=4096)
    assert starved.num_sequences_of(512)[0] < 10
    (advice,) = warnings_of(starved).values()
    best = starved.num_balanced_sequences_of(512)
    assert advice == f"cache.max_running {best} would run {best}"
    assert plan(max_running=best).num_sequences_of(512)[0] == best
    assert plan(max_running=best + 1).num_sequences_of(512)[0] <= best
    assert warnings_of(plan(max_running=best)) == {}


def test_slots_that_are_all_used_are_not_advised_against() -> None:
    assert warnings_of(plan(max_running=4)) == {}
