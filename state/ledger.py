"""The host's book of running sequences: token log, lengths, slots and pages. Knows no tensors, requests or schedules.

For a sequence with prompt p tokens long:

    stage      known tokens        committed_len
    prefill    p                   num_prefilled, 0 .. p
    decode     p + len(emitted)    known − 1 (the newest token has no K/V yet)

Nothing here guesses: a length moves only when a step's result is committed. The token log is the durable truth;
whatever a worker holds can be made from it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from state.pages import PagePool, num_pages_for
from state.slots import SlotPool


@dataclass(slots=True, kw_only=True, eq=False)
class TokenLog:
    """All tokens of a sequence in order: the prompt, then what was emitted. Only grows."""

    prompt: tuple[int, ...]
    emitted: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.emitted)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.emitted)


@dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """One sequence that holds a slot and pages.

    tables: its pages per cache group, for the whole of its life.
    num_reserved: tokens that the tables hold.
    num_waiting_drafts: drafts of the worker's, drawn after the last pass that sampled, that may be verified.
    draft_limit: how many may wait after the pass planned last.
    num_unfed: rows of the passes planned since the drafter was last fed: no fewer than the committed ones it lacks.
    awaiting_verdict: not to be scheduled before the front has looked at its newest tokens.
    """

    uid: int
    slot: int
    epoch: int
    tables: tuple[tuple[int, ...], ...]
    num_reserved: int
    log: TokenLog
    num_prefilled: int = 0
    num_waiting_drafts: int = 0
    draft_limit: int = 0
    num_unfed: int = 0
    awaiting_verdict: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.log.prompt)

    @property
    def is_prefilling(self) -> bool:
        return not self.log.emitted

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that no pass has seen yet."""
        return self.prompt_len - self.num_prefilled

    @property
    def committed_len(self) -> int:
        """Tokens whose KV and recurrent state are committed."""
        return self.num_prefilled if self.is_prefilling else len(self.log) - 1

    def plan_pass(self, num_rows: int, *, feed_drafter: bool) -> int:
        """Notes a pass that a plan holds; returns `num_unfed` as it was before that pass.

        num_rows: rows of the pass with every waiting draft admitted. feed_drafter: whether the drafter runs over them,
        and over those that it lacks before them.
        """
        num_unfed = self.num_unfed
        self.num_unfed = 0 if feed_drafter else num_unfed + num_rows
        return num_unfed

    def commit(self, num_known: int, emitted: Sequence[int]) -> None:
        """Books one pass, the one planned last. Where it sampled, `draft_limit` drafts wait now.

        num_known: known tokens it was fed (prompt chunk, or 1 in decode).
        emitted: what it drew; empty for all but the last prompt chunk.

        Raises ValueError, and changes nothing, when the worker's answer does not fit the books.
        """
        if self.is_prefilling:
            prefilled = self.num_prefilled + num_known
            if prefilled > self.prompt_len or len(emitted) != (1 if prefilled == self.prompt_len else 0):
                raise ValueError(
                    f"sequence {self.uid}: {len(emitted)} tokens after {prefilled} of {self.prompt_len} prompt tokens"
                )
            self.num_prefilled = prefilled
        elif not 1 <= len(emitted) <= 1 + self.num_waiting_drafts:
            raise ValueError(
                f"sequence {self.uid}: {len(emitted)} tokens from {self.num_waiting_drafts} waiting drafts"
            )
        if emitted:
            self.log.emitted.extend(emitted)
            self.num_waiting_drafts = self.draft_limit


class Ledger:
    """Owns the slots and pages of one data-parallel rank in one life of the group, and the sequences that hold them.

    cache_groups, num_pages: one entry per paged group, null pages not counted.
    first_epoch: where the epochs of the slots start; above all epochs of earlier lives.
    """

    def __init__(
        self,
        *,
        cache_groups: Sequence[str],
        num_pages: Sequence[int],
        page_size: int,
        num_slots: int,
        first_epoch: int = 1,
    ) -> None:
        self.page_size = page_size
        self.pages = {group: PagePool(count) for group, count in zip(cache_groups, num_pages, strict=True)}
        self.slots = SlotPool(num_slots, first_epoch=first_epoch)
        self._sequences: dict[int, RunningSequence] = {}
        self._by_slot: dict[int, RunningSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, uid: int) -> bool:
        return uid in self._sequences

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(self._sequences.values())

    def __getitem__(self, uid: int) -> RunningSequence:
        return self._sequences[uid]

    def find(self, slot: int, epoch: int) -> RunningSequence | None:
        """The tenant of `slot` if it is still the one of `epoch`."""
        sequence = self._by_slot.get(slot)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def can_open(self, num_reserved: int) -> bool:
        """Whether a slot and, in every group, pages for `num_reserved` tokens are free."""
        num_pages = num_pages_for(num_reserved, self.page_size)
        return self.slots.can_allocate() and all(pool.can_allocate(num_pages) for pool in self.pages.values())

    def open(self, uid: int, prompt: tuple[int, ...], num_reserved: int) -> RunningSequence:
        """Gives a sequence its slot and all pages it can ever need. Ask `can_open` first."""
        assert uid not in self._sequences, f"sequence {uid} runs already"
        num_pages = num_pages_for(num_reserved, self.page_size)
        tables = tuple(pool.allocate(num_pages) for pool in self.pages.values())
        slot, epoch = self.slots.allocate()
        sequence = RunningSequence(
            uid=uid, slot=slot, epoch=epoch, tables=tables, num_reserved=num_reserved, log=TokenLog(prompt=prompt)
        )
        self._sequences[uid] = sequence
        self._by_slot[slot] = sequence
        return sequence

    def close(self, uid: int) -> RunningSequence:
        """Takes back the slot and the pages of a sequence."""
        sequence = self._sequences.pop(uid)
        del self._by_slot[sequence.slot]
        for pool, table in zip(self.pages.values(), sequence.tables, strict=True):
            pool.release(table)
        self.slots.release(sequence.slot)
        return sequence

    def check_integrity(self) -> list[str]:
        """One line per violated invariant; empty when all hold."""
        problems = [f"slots: {problem}" for problem in self.slots.check_integrity()]
        for index, (group, pool) in enumerate(self.pages.items()):
            problems += [f"pages of {group}: {problem}" for problem in pool.check_integrity()]
            held = [page for sequence in self._sequences.values() for page in sequence.tables[index]]
            if len(held) != pool.num_used or len(set(held)) != len(held):
                problems.append(
                    f"pages of {group}: {pool.num_used} used, tables name {len(held)} ({len(set(held))} distinct)"
                )
        if self.slots.num_used != len(self._sequences):
            problems.append(f"{self.slots.num_used} slots used by {len(self._sequences)} sequences")
        for sequence in self._sequences.values():
            if self.slots.epoch_of(sequence.slot) != sequence.epoch:
                problems.append(
                    f"sequence {sequence.uid} holds slot {sequence.slot} in epoch {sequence.epoch}, the pool does not"
                )
            if sequence.committed_len > sequence.num_reserved:
                problems.append(f"sequence {sequence.uid} outgrew its {sequence.num_reserved} reserved tokens")
        return problems
