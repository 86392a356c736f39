"""Which running sequence owns which row of the per-sequence state. Knows no tensors and no requests."""

from __future__ import annotations

NULL_SLOT = 0
"""Padding rows read and write here. It belongs to no sequence and is never handed out."""


class SlotPool:
    """Allocates slots 1 .. num_slots. Slot 0 is the null slot and is not counted.

    Each allocation gets an epoch of its own, rising over the life of the pool, so that (slot, epoch) names one tenancy
    and a late message to an earlier tenant is recognised.

    first_epoch: epoch of the first allocation; a pool that follows another one goes on where that one stopped.
    """

    def __init__(self, num_slots: int, *, first_epoch: int = 1) -> None:
        if num_slots < 1:
            raise ValueError(f"a slot pool needs at least one slot beside the null slot, got {num_slots}")
        self.num_slots = num_slots
        self.next_epoch = first_epoch
        self._free = list(range(num_slots, 0, -1))
        self._epochs: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._epochs)

    def can_allocate(self, count: int = 1) -> bool:
        return count <= len(self._free)

    def allocate(self) -> tuple[int, int]:
        """Takes a slot; returns (slot, epoch). Ask `can_allocate` first."""
        assert self._free, f"all {self.num_slots} slots are taken"
        slot, epoch = self._free.pop(), self.next_epoch
        self.next_epoch += 1
        self._epochs[slot] = epoch
        return slot, epoch

    def release(self, slot: int) -> None:
        assert slot in self._epochs, f"slot {slot} is not held and cannot be released"
        del self._epochs[slot]
        self._free.append(slot)

    def epoch_of(self, slot: int) -> int | None:
        """Epoch of the slot's tenant; None while the slot is free."""
        return self._epochs.get(slot)

    def check_integrity(self) -> list[str]:
        """One line per violated invariant; empty when all hold."""
        problems = []
        if sorted([*self._free, *self._epochs]) != list(range(1, self.num_slots + 1)):
            problems.append(
                f"free {sorted(self._free)} and held {sorted(self._epochs)} do not make up 1..{self.num_slots}"
            )
        if len(set(self._epochs.values())) != len(self._epochs):
            problems.append("two slots share an epoch")
        if any(epoch >= self.next_epoch for epoch in self._epochs.values()):
            problems.append("a slot holds an epoch that was not given out yet")
        return problems
