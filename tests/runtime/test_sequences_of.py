"""A request told apart into its sequences: uids in a row, and seeds made of the request's and the index."""

from __future__ import annotations

from fakes.requests import request
from hypothesis import given
from hypothesis import strategies as st

from runtime.request import seed_of_sequence, sequences_of

seeds = st.integers(0, 2**64 - 1)


def test_sequences_have_uids_in_a_row_and_all_else_in_common() -> None:
    family = request(7, n=4)
    found = sequences_of(family)
    assert [(one.uid, one.index, one.n) for one in found] == [(7, 0, 4), (8, 1, 4), (9, 2, 4), (10, 3, 4)]
    assert {one.prompt for one in found} == {family.prompt}
    assert [one.sampling.seed for one in found] == [seed_of_sequence(7, index) for index in range(4)]


@given(seed=seeds, index=st.integers(1, 63))
def test_a_seed_is_a_uint64_and_another_for_each_index(seed: int, index: int) -> None:
    assert seed_of_sequence(seed, 0) == seed
    assert 0 <= seed_of_sequence(seed, index) < 2**64
    assert len({seed_of_sequence(seed, each) for each in range(index + 1)}) == index + 1


@given(one=seeds, other=seeds, index=st.integers(0, 63))
def test_other_requests_have_other_seeds(one: int, other: int, index: int) -> None:
    assert (seed_of_sequence(one, index) == seed_of_sequence(other, index)) == (one == other)


def test_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert [seed_of_sequence(42, index) for index in range(3)] == [42, 3149184669566377051, 11054173886744635266]
