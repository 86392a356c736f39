"""Sequences that share a prompt: full pages are held once, what is written has one owner, and all of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from state.ledger import Ledger, RunningSequence
from state.pages import num_pages_for, num_pages_together

PAGE_SIZE = 4
GROUPS = ("target", "drafter")


def ledger(num_pages: int = 40, num_slots: int = 6) -> Ledger:
    return Ledger(cache_groups=GROUPS, num_pages=(num_pages, num_pages - 3), page_size=PAGE_SIZE, num_slots=num_slots)


def family(books: Ledger, num_prompt: int, num_reserved: int, count: int) -> list[RunningSequence]:
    first = books.open(1, tuple(range(num_prompt)), num_reserved)
    return [first, *(books.open_follower(uid, first) for uid in range(2, count + 1))]


@pytest.mark.parametrize(
    ("num_prompt", "num_shared", "copies"),
    [(2, 0, True), (4, 0, True), (5, 1, False), (6, 1, True), (8, 1, True), (9, 2, False)],
)
def test_full_pages_before_the_last_token_are_shared_and_a_part_is_copied(
    num_prompt: int, num_shared: int, copies: bool
) -> None:
    books = ledger()
    first, second, third = family(books, num_prompt, num_prompt + 9, 3)
    num_pages = num_pages_for(num_prompt + 9, PAGE_SIZE)
    for index, pool in enumerate(books.pages.values()):
        tables = [each.tables[index] for each in (first, second, third)]
        assert {len(table) for table in tables} == {num_pages}
        assert {table[:num_shared] for table in tables} == {first.tables[index][:num_shared]}
        assert pool.num_used == num_shared + 3 * (num_pages - num_shared)
        assert pool.num_used == num_pages_together(num_prompt + 9, PAGE_SIZE, count=3, num_shared=num_prompt - 1)
    first.num_unfed = 7
    first.commit(num_prompt - 1, ())
    pairs = books.fork(2)
    expected = (first.tables[0][num_shared], second.tables[0][num_shared]) if copies else None
    assert (len(pairs), pairs[0]) == (2, expected)
    assert (second.committed_len, second.num_unfed, second.is_ready) == (num_prompt - 1, 7, True)
    assert first.num_prompt_left == 0, "the third waits still"
    books.fork(3)
    assert [each.num_prompt_left for each in (first, second, third)] == [1, 1, 1]
    assert books.check_integrity() == []


def test_who_waits_to_fork_is_not_ready_and_counts_what_it_takes_over_once() -> None:
    books = ledger()
    first, second = family(books, 9, 20, 2)
    assert (first.is_ready, second.is_ready) == (True, False)
    assert (first.num_outstanding, second.num_outstanding) == (20, 12)
    first.commit(5, ())
    assert (first.num_outstanding, second.num_outstanding) == (15, 12)


def test_a_fork_before_its_time_is_an_assertion() -> None:
    books = ledger()
    first, _ = family(books, 9, 20, 2)
    first.commit(7, ())
    with pytest.raises(AssertionError, match="has not read the prompt"):
        books.fork(2)
    with pytest.raises(AssertionError, match="takes over nothing"):
        books.fork(1)
    with pytest.raises(AssertionError, match="others wait"):
        books.close(1)


def test_an_heir_goes_on_in_the_place_of_the_first() -> None:
    books = ledger()
    first, second, third = family(books, 9, 20, 3)
    slot, epoch, tables = first.slot, first.epoch, first.tables
    first.commit(6, ())
    used = books.pages["target"].num_used
    heir = books.hand_over(1, 2)
    assert (heir.uid, heir.slot, heir.epoch, heir.tables, heir.num_prefilled) == (2, slot, epoch, tables, 6)
    assert books[2] is heir is books.find(slot, epoch) is third.first
    assert (1 in books, books.find(second.slot, second.epoch), len(books)) == (False, None, 2)
    assert books.pages["target"].num_used == used - 3, "three pages of the second were its own"
    assert heir.num_followers == 1
    assert books.check_integrity() == []
    with pytest.raises(AssertionError, match="does not follow"):
        books.hand_over(3, 2)


def test_integrity_names_a_shared_page_that_is_written_to() -> None:
    books = ledger()
    first, second = family(books, 6, 12, 2)
    second.tables = (first.tables[0], second.tables[1])
    assert any("writes to pages" in problem for problem in books.check_integrity())
    first.num_followers = 2
    assert any("1 wait for sequence 1, it counts 2" in problem for problem in books.check_integrity())


class Families(RuleBasedStateMachine):
    """The ledger against counts: families open, read, fork, decode and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.next_uid = 1

    @initialize(num_pages=st.integers(5, 30), num_slots=st.integers(1, 6))
    def start(self, num_pages: int, num_slots: int) -> None:
        self.books = ledger(num_pages, num_slots)

    @rule(num_prompt=st.integers(1, 18), num_more=st.integers(1, 12), count=st.integers(1, 4))
    def open(self, num_prompt: int, num_more: int, count: int) -> None:
        num_reserved, num_shared = num_prompt + num_more, num_prompt - 1
        need = num_pages_together(num_reserved, PAGE_SIZE, count=count, num_shared=num_shared)
        room = self.books.can_open(num_reserved, count=count, num_shared=num_shared)
        fits = all(pool.num_free >= need for pool in self.books.pages.values())
        assert room == (self.books.slots.num_free >= count and fits)
        if not room:
            return
        before = {group: pool.num_free for group, pool in self.books.pages.items()}
        first = self.books.open(self.next_uid, tuple(range(num_prompt)), num_reserved)
        for i in range(1, count):
            if num_prompt == 1:
                self.books.open(self.next_uid + i, (0,), num_reserved)
            else:
                self.books.open_follower(self.next_uid + i, first)
        self.next_uid += count
        assert {group: pool.num_free + need for group, pool in self.books.pages.items()} == before

    def some(self, data: st.DataObject) -> RunningSequence | None:
        ready = [sequence for sequence in self.books if sequence.is_ready]
        return data.draw(st.sampled_from(ready)) if ready else None

    @rule(data=st.data(), count=st.integers(1, 20))
    def run(self, data: st.DataObject, count: int) -> None:
        sequence = self.some(data)
        if sequence is None:
            return
        if not sequence.is_prefilling:
            if len(sequence.log) < sequence.num_reserved:
                sequence.commit(1, (5,))
        elif chunk := min(count, sequence.num_prompt_left):
            last = sequence.num_prefilled + chunk == sequence.prompt_len
            sequence.commit(chunk, (5,) if last else ())
        else:
            followers = [other for other in self.books if other.first is sequence]
            assert len(followers) == sequence.num_followers > 0
            for follower in followers:
                self.books.fork(follower.uid)
                assert follower.committed_len == sequence.committed_len == sequence.prompt_len - 1

    @precondition(lambda self: len(self.books) > 0)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.books)))
        heirs = [other.uid for other in self.books if other.first is sequence]
        uid = sequence.uid
        if heirs:
            self.books.hand_over(uid, data.draw(st.sampled_from(heirs)))
        else:
            self.books.close(uid)
        assert uid not in self.books

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "books"):
            return
        assert self.books.check_integrity() == []
        assert self.books.slots.num_used == len(self.books)
        for index, pool in enumerate(self.books.pages.values()):
            held = {page for sequence in self.books for page in sequence.tables[index]}
            assert pool.num_used == len(held)


TestFamilies = Families.TestCase
TestFamilies.settings = settings(stateful_step_count=30)
