"""Intake: what is refused, by which name, with which numbers; and that a refusal leaves no trace."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.requests import request
from fakes.worker import describe

from runtime.front.errors import DuplicateRequest, InvalidRequest, Overloaded
from runtime.intake import Intake, check_servable
from runtime.request import Request

LIMITS = describe(max_model_len=40, num_pages=(12, 10))


def accept(intake: Intake, wanted: Request, *, num_waiting: int = 0, num_openings: int = 0) -> None:
    intake.accept(wanted, LIMITS, num_waiting=num_waiting, num_openings=num_openings)


def test_uids_are_never_given_twice() -> None:
    intake = Intake(lambda: 1)
    assert len({intake.next_uid() for _ in range(100)}) == 100


def test_the_longest_sequence_is_served_and_one_token_more_is_not() -> None:
    limits = describe(max_model_len=40)
    check_servable(request(1, num_prompt=30, max_tokens=10), limits)
    with pytest.raises(
        InvalidRequest, match=r"stopping.max_tokens: .*30 tokens and max_tokens is 11, 41 in all.* has 40"
    ):
        check_servable(request(1, num_prompt=30, max_tokens=11), limits)
    with pytest.raises(InvalidRequest, match="input: the prompt has 40 tokens"):
        check_servable(request(1, num_prompt=40, max_tokens=1), limits)


def test_what_the_smallest_cache_group_can_never_hold_is_refused_with_the_numbers() -> None:
    """10 pages of 4 tokens hold 35 tokens and 5 for drafts."""
    check_servable(request(1, num_prompt=20, max_tokens=15), LIMITS)
    with pytest.raises(InvalidRequest, match=r"20 prompt.*16 max_tokens.*5 for drafts need 11 pages.*drafter has 10"):
        check_servable(request(1, num_prompt=20, max_tokens=16), LIMITS)


@pytest.mark.parametrize("token", [-1, 61])
def test_ids_outside_the_vocabulary_never_reach_the_worker(token: int) -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids: ids must lie in 0..60"):
        check_servable(dataclasses.replace(request(1), prompt=(1, token, 2)), LIMITS)


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("input", request(1, num_prompt=0)),
        ("stopping.max_tokens", request(1, max_tokens=0)),
        ("stopping.stop_token_ids", request(1, stop_token_ids=tuple(range(17)))),
    ],
)
def test_a_refusal_names_the_field(field: str, wanted: Request) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_servable(wanted, LIMITS)
    assert refusal.value.field == field


def test_a_live_name_is_refused_until_it_is_forgotten() -> None:
    intake = Intake(lambda: 5)
    accept(intake, request(1, request_id="a"))
    with pytest.raises(DuplicateRequest, match="'a' is live"):
        accept(intake, request(2, request_id="a"))
    accept(intake, request(3, request_id="b"))
    intake.forget("a")
    accept(intake, request(4, request_id="a"))


def test_the_queue_holds_max_waiting_beside_what_the_next_step_takes() -> None:
    intake = Intake(lambda: 2)
    accept(intake, request(1), num_waiting=1)
    with pytest.raises(Overloaded, match="2 requests wait, the queue holds 2"):
        accept(intake, request(2), num_waiting=2)
    accept(intake, request(2), num_waiting=2, num_openings=1)


def test_without_a_queue_only_open_slots_count() -> None:
    intake = Intake(lambda: 0)
    accept(intake, request(1), num_waiting=0, num_openings=1)
    with pytest.raises(Overloaded):
        accept(intake, request(2), num_waiting=1, num_openings=1)


def test_a_refused_request_leaves_its_name_free() -> None:
    intake = Intake(lambda: 0)
    with pytest.raises(Overloaded):
        accept(intake, request(1, request_id="a"))
    with pytest.raises(InvalidRequest):
        accept(intake, request(1, request_id="a", num_prompt=99), num_openings=1)
    accept(intake, request(1, request_id="a"), num_openings=1)


def test_a_family_gets_uids_in_a_row() -> None:
    intake = Intake(lambda: 1)
    first = intake.next_uid(3)
    assert [intake.next_uid(), intake.next_uid(2), intake.next_uid()] == [first + 3, first + 4, first + 6]


def test_a_family_that_can_never_run_together_is_refused_with_the_numbers() -> None:
    """10 pages of 4 tokens. 13 + 3 + 5 tokens are 6 pages, of which 3 are shared: two sequences need 9, three 12."""
    check_servable(request(1, num_prompt=13, max_tokens=3, n=2), LIMITS)
    with pytest.raises(InvalidRequest, match=r"n: 3 sequences of 21 .* prompt of 13 need 12 pages.*drafter has 10"):
        check_servable(request(1, num_prompt=13, max_tokens=3, n=3), LIMITS)
    with pytest.raises(InvalidRequest, match="n: 5 sequences run at the same time, and there are slots for 4"):
        check_servable(request(1, num_prompt=1, max_tokens=1, n=5), LIMITS)
    with pytest.raises(InvalidRequest, match="max_tokens: 20 prompt"):
        check_servable(request(1, num_prompt=20, max_tokens=16, n=5), LIMITS)


def test_a_family_keeps_its_name_until_the_last_of_it_has_ended() -> None:
    intake = Intake(lambda: 5)
    accept(intake, request(1, request_id="a", n=2, max_tokens=3))
    intake.forget("a")
    with pytest.raises(DuplicateRequest):
        accept(intake, request(3, request_id="a"))
    intake.forget("a")
    accept(intake, request(3, request_id="a"))


def test_a_family_is_taken_in_where_one_more_may_wait() -> None:
    intake = Intake(lambda: 3)
    accept(intake, request(1, num_prompt=2, n=4, max_tokens=1), num_waiting=2)
    with pytest.raises(Overloaded, match="6 requests wait, the queue holds 3"):
        accept(intake, request(5), num_waiting=6)
