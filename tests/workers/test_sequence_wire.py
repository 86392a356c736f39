"""New sequences and log-probabilities survive the wire; what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import worker_pb2
from workers.demands import Constraint, ConstraintKind, Fork, Shaping, TokenLogprob, Typical
from workers.plan import NewSequence, OracleDrafts
from workers.sequence_wire import (
    constraint_from_wire,
    logprobs_from_wire,
    logprobs_to_wire,
    sequence_from_wire,
    sequence_to_wire,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
unit = st.floats(0, 1, width=32)
reals = st.floats(-30, 30, width=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
pages = st.none() | st.tuples(u32, st.integers(1, 2**32 - 1))
optional = st.none() | u32


def some(elements: st.SearchStrategy, most: int = 3) -> st.SearchStrategy:
    return st.lists(elements, max_size=most).map(tuple)


shapings = st.builds(
    Shaping,
    repetition=st.floats(0, 10, width=32),
    frequency=reals,
    presence=reals,
    bias=some(st.tuples(u32, reals)),
    allowed=some(u32),
    banned=some(u32),
    bad_words=some(some(u32)),
    min_tokens=u32,
)

sequences = st.builds(
    NewSequence,
    slot=u32,
    epoch=u64,
    uid=u64,
    prompt=some(u32),
    tables=some(some(u32)),
    temperature=st.floats(0, 100, width=32),
    top_k=u32,
    top_p=unit,
    min_p=unit,
    seed=u64,
    coupled=st.booleans(),
    stop_token_ids=some(u32),
    max_tokens=u32,
    typical_p=unit,
    shaping=shapings,
    constraint=st.none() | st.builds(Constraint, kind=st.sampled_from(get_args(ConstraintKind)), text=texts),
    typical=st.none() | st.builds(Typical, epsilon=unit, delta=unit),
    num_logprobs=optional,
    num_prompt_logprobs=optional,
    prediction=some(u32),
    looks_back=st.booleans(),
    fork=st.none() | st.builds(Fork, slot=u32, epoch=u64, pages=some(pages)),
    oracle=st.none() | st.builds(OracleDrafts, continuation=some(u32), acceptance=unit),
)


@given(sequences)
def test_a_new_sequence_arrives_as_it_left(sequence: NewSequence) -> None:
    data = sequence_to_wire(sequence).SerializeToString()
    assert sequence_from_wire(worker_pb2.NewSequence.FromString(data)) == sequence


logprobs = st.floats(max_value=0, allow_nan=False, width=32)
told = st.integers(0, 3).flatmap(
    lambda num_top: some(
        st.builds(
            TokenLogprob,
            token=u32,
            logprob=logprobs,
            top=st.lists(st.tuples(u32, logprobs), min_size=num_top, max_size=num_top).map(tuple),
        )
    )
)


@given(told)
def test_log_probabilities_arrive_as_they_left(tokens: tuple[TokenLogprob, ...]) -> None:
    data = logprobs_to_wire(tokens).SerializeToString()
    assert logprobs_from_wire(worker_pb2.RankLogprobs.FromString(data)) == tokens


PAIR = tuple(TokenLogprob(token=token, logprob=-0.5, top=((3, -1.0), (4, -2.0))) for token in (7, 8))


@pytest.mark.parametrize("column", ["ids", "logprobs", "top_ids", "top_logprobs"])
def test_log_probabilities_whose_columns_do_not_fit_are_refused_on_arrival(column: str) -> None:
    message = logprobs_to_wire(PAIR)
    getattr(message, column).append(3)
    with pytest.raises(ValueError, match="do not fit their columns"):
        logprobs_from_wire(message)


def test_tokens_with_different_numbers_of_others_do_not_leave_the_worker() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        logprobs_to_wire((PAIR[0], replace(PAIR[1], top=((3, -1.0),))))


def test_a_constraint_of_an_unknown_kind_is_refused_on_arrival() -> None:
    with pytest.raises(ValueError, match="unknown kind 'prose'"):
        constraint_from_wire(worker_pb2.RankConstraint(kind="prose", text="x"))
