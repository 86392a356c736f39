"""Slots: one tenant each, an epoch of its own for every tenancy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state.slots import NULL_SLOT, SlotPool


def test_all_slots_but_the_null_slot_are_handed_out() -> None:
    pool = SlotPool(3)
    slots = {pool.allocate()[0] for _ in range(3)}
    assert slots == {1, 2, 3}
    assert NULL_SLOT not in slots
    assert not pool.can_allocate()
    with pytest.raises(AssertionError, match="all 3 slots are taken"):
        pool.allocate()


def test_a_slot_returns_with_another_epoch() -> None:
    pool = SlotPool(1, first_epoch=7)
    slot, epoch = pool.allocate()
    pool.release(slot)
    assert pool.epoch_of(slot) is None
    assert (slot, epoch, pool.allocate()) == (1, 7, (1, 8))


def test_a_free_slot_cannot_be_released() -> None:
    pool = SlotPool(2)
    for slot in (NULL_SLOT, 1):
        with pytest.raises(AssertionError, match=f"slot {slot} is not held"):
            pool.release(slot)


@given(st.lists(st.integers(0, 5), max_size=60))
def test_any_order_of_taking_and_giving_back_keeps_the_books(choices: list[int]) -> None:
    pool = SlotPool(4)
    held: dict[int, int] = {}
    epochs = []
    for choice in choices:
        if choice in held:
            pool.release(choice)
            del held[choice]
        elif pool.can_allocate():
            slot, epoch = pool.allocate()
            assert slot not in held
            held[slot] = epoch
            epochs.append(epoch)
        assert pool.check_integrity() == []
        assert {slot: pool.epoch_of(slot) for slot in held} == held
        assert (pool.num_used, pool.num_free) == (len(held), 4 - len(held))
    assert epochs == list(range(1, len(epochs) + 1))


def test_integrity_names_a_lost_slot() -> None:
    pool = SlotPool(2)
    pool._free.pop()
    assert len(pool.check_integrity()) == 1
