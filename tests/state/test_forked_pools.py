"""What a fork copies on the device, to the bit, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from state.accounting import PoolSizes
from state.layout import DRAFTER_GROUP, TARGET_GROUP, ConvSpec, GatedDeltaSpec, PagedKVSpec, StateLayout
from state.pools import DevicePools

PAGE = 4
COPIED = ("committed_len", "prompt_len", "token_log", "hidden_window", "draft_len", "gap_start", "gap_end")


@pytest.fixture
def pools() -> DevicePools:
    """Three slots and seven pages per group, all full of noise; slot 1 has pages 1 to 3 and 4 to 6."""
    conv = ConvSpec(channels=6, width=3, dtype="float32")
    delta = GatedDeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=3, value_dim=4)
    kv = [
        PagedKVSpec(group=group, num_kv_heads=1, head_dim=2, dtype="float32") for group in (TARGET_GROUP, DRAFTER_GROUP)
    ]
    layout = StateLayout(
        layers=((conv, delta), (kv[0],), (conv, delta), (kv[0],), (kv[1],)),
        hidden_size=5,
        vocab_size=11,
        activation_dtype="float32",
    )
    sizes = PoolSizes(
        num_slots=3, num_pages=(7, 7), page_size=PAGE, max_rows=8, max_length=12, gamma_max=2, hidden_window=3
    )
    pools = DevicePools(layout, sizes, torch.device("cpu"))
    pools.enter([1], [[3, 4, 5, 6, 7, 8]], [[(1, 2, 3), (4, 5, 6)]])
    generator = torch.Generator().manual_seed(1)
    for name, tensor in pools.tensors():
        if tensor.is_floating_point() and ".records." not in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for name in ("committed_len", "draft_len", "gap_end"):
        getattr(pools, name)[1] = 5
    pools.gap_start[1] = 2
    for name in ("score", "confidence"):
        getattr(pools, name).fill_(0.5)
    return pools


def everything(pools: DevicePools) -> dict[str, torch.Tensor]:
    named = {name: getattr(pools, name) for name in (*COPIED, "score", "confidence")}
    return {name: tensor.clone() for name, tensor in (*pools.tensors(), *named.items())}


def rows(page: int) -> slice:
    return slice(page * PAGE, (page + 1) * PAGE)


def test_a_fork_gets_all_that_is_committed_and_no_drafts(pools: DevicePools) -> None:
    before = everything(pools)
    pools.fork([1, 1], [2, 3], [[(1, 7, 5), (4, 1, 2)], [(1, 4, 6), (4, 3, 7)]], [[(2, 7), None], [(2, 4), (5, 3)]])
    after = everything(pools)
    for slot in (2, 3):
        for name in COPIED:
            assert torch.equal(after[name][slot], before[name][1]), name
        for name in before:
            if name.endswith(".committed"):
                assert torch.equal(after[name][:, slot], before[name][:, 1]), name
        assert not after["score"][slot].any()
        assert not after["confidence"][slot].any()
    assert after["table.target"][2].tolist()[:3] == [1, 7, 5]
    assert after["table.drafter"][3].tolist()[:3] == [4, 3, 7]
    for layer in (1, 3):
        kv = f"kv.{layer}"
        assert torch.equal(after[kv][:, rows(7)], before[kv][:, rows(2)])
        assert torch.equal(after[kv][:, rows(4)], before[kv][:, rows(2)])
    assert torch.equal(after["kv.4"][:, rows(3)], before["kv.4"][:, rows(5)])
    # The first stays as it stands, and so do all pages but the copies.
    for name, tensor in after.items():
        if name.startswith("kv."):
            copies = (3,) if name == "kv.4" else (7, 4)
            kept = [page for page in range(8) if page not in copies]
            assert all(torch.equal(tensor[:, rows(page)], before[name][:, rows(page)]) for page in kept), name
        elif name.endswith(".committed"):
            assert torch.equal(tensor[:, :2], before[name][:, :2]), name
        elif ".records." not in name:
            assert torch.equal(tensor[:2], before[name][:2]), name


def test_who_stays_in_its_slot_goes_on_as_it_stands(pools: DevicePools) -> None:
    before = everything(pools)
    pools.fork([1], [1], [[(1, 2, 3), (4, 5, 6)]], [[None, None]])
    for name, tensor in everything(pools).items():
        if name in ("score", "confidence"):
            assert not tensor[1].any()
            tensor[1] = before[name][1]
        assert torch.equal(tensor, before[name]), name


def test_a_fork_of_nobody_touches_nothing(pools: DevicePools) -> None:
    before = everything(pools)
    pools.fork([], [], [], [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(pools).items())
