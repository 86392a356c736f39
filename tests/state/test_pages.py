"""Pages: nobody holds one twice, none is lost, the null page stays out of reach."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from state.pages import NULL_PAGE, PagePool, num_pages_for, num_reserved_tokens

NUM_PAGES = 9


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_tokens_round_up(tokens: int, pages: int) -> None:
    assert num_pages_for(tokens, 16) == pages


def test_a_reservation_holds_the_drafts_and_the_newest_token() -> None:
    assert num_reserved_tokens(100, 4) == 105


def test_pages_are_handed_out_once_and_never_the_null_page() -> None:
    pool = PagePool(4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert NULL_PAGE not in range(1, 5)
    assert not pool.can_allocate(1)
    assert pool.can_allocate(0)


def test_more_than_is_free_is_an_assertion_and_takes_nothing() -> None:
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="4 pages wanted, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.num_used == 1
    pool.release(pages)
    assert pool.num_free == 1


def test_what_is_not_held_cannot_be_given_back_or_shared() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    for act in (pool.release, pool.share):
        with pytest.raises(AssertionError, match="is not held"):
            act(pages)
        with pytest.raises(AssertionError, match="page 0 is not held"):
            act((NULL_PAGE,))


def test_integrity_names_a_page_that_is_free_and_held() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool._free.append(page)
    assert pool.check_integrity() == [f"page {page} has 1 owners and is free"]


class Pages(RuleBasedStateMachine):
    """The pool against a plain multiset of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.owners: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        held = {page for pages in self.owners for page in pages}
        assert self.pool.can_allocate(count) == (count <= NUM_PAGES - len(held))
        if self.pool.can_allocate(count):
            pages = self.pool.allocate(count)
            assert len(set(pages)) == count
            assert not held & set(pages)
            self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.owners))
        self.pool.share(pages)
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        held = [page for pages in self.owners for page in pages]
        assert self.pool.check_integrity() == []
        assert self.pool.num_used == len(set(held))
        assert self.pool.num_free + self.pool.num_used == NUM_PAGES
        assert all(self.pool.ref_count(page) == held.count(page) for page in range(NUM_PAGES + 1))


TestPages = Pages.TestCase
TestPages.settings = settings(stateful_step_count=30)
