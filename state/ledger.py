"""The host's book of running sequences: token log, lengths, slots and pages. Knows no tensors, requests or schedules.

For a sequence with prompt p tokens long:

    stage      known tokens        committed_len
    prefill    p                   num_prefilled, 0 .. p
    decode     p + len(emitted)    known − 1 (the newest token has no K/V yet)

Nothing here guesses: a length moves only when a step's result is committed. The token log is the durable truth;
whatever a worker holds can be made from it again.

Sequences of one prompt may share it. One of them, the first, reads all of it but the last token, and then they fork:

    prompt of p tokens       0 ........ | k · page_size .. | p − 1
    first     pages          shared     | its own
    follower  pages          the same   | its own, begun as a copy where the page at p − 1 has entries already

The k pages that positions 0 .. p − 2 fill are written by none of them once they have forked: committed entries of the
target are never written again, and those of the drafter, where it makes up for a pause, only as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from state.pages import PagePool, num_pages_for, num_pages_together
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
    first: whose state it will take over; None where it takes over none, or has.
    num_followers: sequences that wait to take over its own.
    num_inherited: prompt tokens that it takes over or has taken over, rather than read.
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
    first: RunningSequence | None = None
    num_followers: int = 0
    num_inherited: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.log.prompt)

    @property
    def is_prefilling(self) -> bool:
        return not self.log.emitted

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that no pass has seen yet. The last one does not count while others wait to fork before it."""
        return self.prompt_len - self.num_prefilled - (self.num_followers > 0)

    @property
    def is_ready(self) -> bool:
        """Whether a step planned now may hold it."""
        return not self.awaiting_verdict and self.first is None

    @property
    def num_outstanding(self) -> int:
        """Tokens that it may still commit, at most; what it takes over is left to the one that reads it."""
        return self.num_reserved - max(self.committed_len, self.num_inherited)

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

    def can_open(self, num_reserved: int, *, count: int = 1, num_shared: int = 0) -> bool:
        """Whether `count` slots and, in every group, pages for `num_reserved` tokens of each are free, where they have
        the first `num_shared` tokens in common."""
        num_pages = num_pages_together(num_reserved, self.page_size, count=count, num_shared=num_shared)
        return self.slots.can_allocate(count) and all(pool.can_allocate(num_pages) for pool in self.pages.values())

    def open(self, uid: int, prompt: tuple[int, ...], num_reserved: int) -> RunningSequence:
        """Gives a sequence its slot and all pages it can ever need. Ask `can_open` first."""
        assert uid not in self._sequences, f"sequence {uid} runs already"
        num_pages = num_pages_for(num_reserved, self.page_size)
        tables = tuple(pool.allocate(num_pages) for pool in self.pages.values())
        return self._enter(uid, prompt, num_reserved, tables)

    def open_follower(self, uid: int, first: RunningSequence) -> RunningSequence:
        """Gives a sequence with the prompt and the reservation of `first`, which has emitted nothing, its slot and all
        pages it can ever need; it waits to take over what that has committed of the prompt. Ask `can_open` first, for
        all of them together."""
        assert uid not in self._sequences, f"sequence {uid} runs already"
        assert first.is_prefilling, f"sequence {first.uid} has left its prompt behind"
        num_inherited = first.prompt_len - 1
        num_pages_shared = num_inherited // self.page_size
        tables = []
        for pool, table in zip(self.pages.values(), first.tables, strict=True):
            shared = table[:num_pages_shared]
            pool.share(shared)
            tables.append((*shared, *pool.allocate(len(table) - num_pages_shared)))
        sequence = self._enter(uid, first.log.prompt, first.num_reserved, tuple(tables))
        sequence.first, sequence.num_inherited = first, num_inherited
        first.num_followers += 1
        return sequence

    def fork(self, uid: int) -> tuple[tuple[int, int] | None, ...]:
        """Lets a follower take over what its first has committed: all of the prompt but the last token. It is a
        sequence of its own then.

        Returns, per cache group, (page of the first, page of the follower) where one has to be copied into the other.
        """
        sequence = self._sequences[uid]
        first = sequence.first
        assert first is not None, f"sequence {uid} takes over nothing"
        assert first.num_prefilled == sequence.num_inherited, f"sequence {first.uid} has not read the prompt"
        sequence.num_prefilled, sequence.num_unfed = first.num_prefilled, first.num_unfed
        self._leave(sequence)
        page, num_entries = divmod(sequence.num_inherited, self.page_size)
        pairs = zip(first.tables, sequence.tables, strict=True)
        return tuple((source[page], target[page]) if num_entries else None for source, target in pairs)

    def hand_over(self, uid: int, heir: int) -> RunningSequence:
        """Ends a sequence and has one of its followers go on in its place: in its slot and pages, and with what it has
        read. The follower's own slot and pages go back."""
        sequence = self._sequences[uid]
        assert self._sequences[heir].first is sequence, f"sequence {heir} does not follow {uid}"
        self.close(heir)
        del self._sequences[uid]
        sequence.uid = heir
        self._sequences[heir] = sequence
        return sequence

    def close(self, uid: int) -> RunningSequence:
        """Takes back the slot and the pages of a sequence, which none may wait to take over."""
        assert not self._sequences[uid].num_followers, f"others wait for sequence {uid}"
        sequence = self._sequences.pop(uid)
        self._leave(sequence)
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
            problems += [f"pages of {group}: {problem}" for problem in self._check_tables(index, pool)]
        if self.slots.num_used != len(self._sequences):
            problems.append(f"{self.slots.num_used} slots used by {len(self._sequences)} sequences")
        waiting = Counter(sequence.first.uid for sequence in self._sequences.values() if sequence.first is not None)
        for sequence in self._sequences.values():
            if self.slots.epoch_of(sequence.slot) != sequence.epoch:
                problems.append(
                    f"sequence {sequence.uid} holds slot {sequence.slot} in epoch {sequence.epoch}, the pool does not"
                )
            if sequence.committed_len > sequence.num_reserved:
                problems.append(f"sequence {sequence.uid} outgrew its {sequence.num_reserved} reserved tokens")
            if waiting[sequence.uid] != sequence.num_followers:
                problems.append(
                    f"{waiting[sequence.uid]} wait for sequence {sequence.uid}, it counts {sequence.num_followers}"
                )
            if sequence.first is not None and sequence.first is not self._sequences.get(sequence.first.uid):
                problems.append(f"sequence {sequence.uid} waits for one that does not run")
        return problems

    def _check_tables(self, index: int, pool: PagePool) -> list[str]:
        """One line per violated invariant of who holds which pages of the cache group with this index."""
        problems = []
        owners = Counter(page for sequence in self._sequences.values() for page in sequence.tables[index])
        if len(owners) != pool.num_used:
            problems.append(f"{pool.num_used} used, tables name {len(owners)} distinct ones")
        problems += [
            f"page {page} has {pool.ref_count(page)} owners, {count} tables name it"
            for page, count in owners.items()
            if pool.ref_count(page) != count
        ]
        for sequence in self._sequences.values():
            num_read = (sequence.prompt_len - 1) // self.page_size
            shared = [page for page in sequence.tables[index][num_read:] if owners[page] > 1]
            if shared:
                problems.append(f"sequence {sequence.uid} writes to pages {shared}, which others hold too")
        return problems

    def _enter(
        self, uid: int, prompt: tuple[int, ...], num_reserved: int, tables: tuple[tuple[int, ...], ...]
    ) -> RunningSequence:
        slot, epoch = self.slots.allocate()
        sequence = RunningSequence(
            uid=uid, slot=slot, epoch=epoch, tables=tables, num_reserved=num_reserved, log=TokenLog(prompt=prompt)
        )
        self._sequences[uid] = sequence
        self._by_slot[slot] = sequence
        return sequence

    def _leave(self, sequence: RunningSequence) -> None:
        """It waits for its first no longer."""
        if sequence.first is not None:
            sequence.first.num_followers -= 1
            sequence.first = None
