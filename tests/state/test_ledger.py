"""The ledger: a slot's tenant is found by slot and epoch, and an answer that does not fit changes nothing."""

from __future__ import annotations

import pytest

from state.ledger import Ledger


def ledger() -> Ledger:
    return Ledger(cache_groups=("target", "drafter"), num_pages=(8, 8), page_size=4, num_slots=1, first_epoch=5)


def test_a_result_for_an_earlier_tenant_finds_nobody() -> None:
    books = ledger()
    first = books.open(1, (7, 8, 9), 10)
    assert books.find(first.slot, first.epoch) is first
    books.close(1)
    assert books.find(first.slot, first.epoch) is None
    second = books.open(2, (7, 8, 9), 10)
    assert (second.slot, second.epoch) == (first.slot, first.epoch + 1)
    assert books.find(first.slot, first.epoch) is None
    assert books.find(second.slot, second.epoch) is second
    assert books.find(second.slot + 1, second.epoch) is None


@pytest.mark.parametrize(
    ("num_known", "emitted"), [(4, (1,)), (3, ()), (3, (1, 2)), (2, (1,))], ids=["long", "none", "two", "early"]
)
def test_a_prefill_that_does_not_add_up_is_refused_and_changes_nothing(
    num_known: int, emitted: tuple[int, ...]
) -> None:
    sequence = ledger().open(1, (7, 8, 9), 10)
    sequence.draft_limit = 2
    with pytest.raises(ValueError, match="of 3 prompt tokens"):
        sequence.commit(num_known, emitted)
    assert (sequence.num_prefilled, sequence.log.tokens, sequence.num_waiting_drafts) == (0, (7, 8, 9), 0)


@pytest.mark.parametrize("emitted", [(), (1, 2, 3, 4)])
def test_a_round_emits_one_token_at_least_and_one_beyond_its_drafts_at_most(emitted: tuple[int, ...]) -> None:
    sequence = ledger().open(1, (7, 8, 9), 10)
    sequence.draft_limit = 2
    sequence.commit(3, (5,))
    sequence.draft_limit = 0
    with pytest.raises(ValueError, match="from 2 waiting drafts"):
        sequence.commit(1, emitted)
    assert (sequence.log.tokens, sequence.num_waiting_drafts) == ((7, 8, 9, 5), 2)
    sequence.commit(1, (1, 2, 3))
    assert (sequence.log.tokens, sequence.committed_len) == ((7, 8, 9, 5, 1, 2, 3), 6)
    assert sequence.num_waiting_drafts == 0
