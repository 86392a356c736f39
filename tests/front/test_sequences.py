"""Several sequences under one writer: whose turn it is, what comes of errors, and the sum of them all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
from fakes.front import TOKENIZER, in_loop

from configs.schema import ServerSettings, ServeSettings
from runtime.events import ErrorEvent, TokenEvent
from runtime.front.errors import InvalidRequest, SlowReader, Unavailable
from runtime.front.hub import StreamHub
from runtime.front.sequences import SequenceStreams, open_sequences
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason, StopParams, Usage, total_of
from runtime.stream.text_stream import TextStream

LENGTH = Finish(reason=FinishReason.LENGTH)
FIRST_UID = 7


@contextmanager
def opened(n: int, *, whole: bool = False, max_unread: int = 100) -> Iterator[tuple[StreamHub, SequenceStreams]]:
    hub = StreamHub(SettingsInForce(ServeSettings(server=ServerSettings(max_frame_tokens_unread=max_unread))))
    texts = [TextStream(TOKENIZER.detokenizer(), StopParams(max_tokens=99)) for _ in range(n)]
    with open_sequences(hub, FIRST_UID, texts, abort=lambda uid, error: None, whole=whole) as sequences:
        yield hub, sequences


def event(index: int, *tokens: int, finish: Finish | None = None) -> TokenEvent:
    usage = Usage(prompt=3, completion=len(tokens), rounds=1, accepted=len(tokens) - 1, seed=index)
    return TokenEvent(uid=FIRST_UID + index, tokens=tokens, usage=usage, finish=finish)


async def taken(sequences: SequenceStreams) -> tuple[int, tuple[int, ...]]:
    place, delta = await sequences.take()
    return place, delta.token_ids


@in_loop
async def test_whoever_has_something_is_read_in_turn() -> None:
    with opened(3) as (hub, sequences):
        hub.deliver([event(0, 65), event(1, 66), event(2, 67)])
        assert [await taken(sequences) for _ in range(2)] == [(0, (65,)), (1, (66,))]
        hub.deliver([event(0, 68), event(1, 69)])
        assert await taken(sequences) == (2, (67,)), "those that were just read come behind"
        assert [await taken(sequences) for _ in range(2)] == [(0, (68,)), (1, (69,))]
        taking = asyncio.create_task(taken(sequences))
        await asyncio.sleep(0)
        assert not taking.done()
        hub.deliver([event(1, 70, finish=LENGTH)])
        assert await taking == (1, (70,))
        assert not sequences.is_done
        assert sequences.unfinished() == [0, 2]
        hub.deliver([event(2, 71, finish=LENGTH), event(0, 72, finish=LENGTH)])
        assert {await taken(sequences), await taken(sequences)} == {(0, (72,)), (2, (71,))}
        assert sequences.is_done


@in_loop
async def test_whole_answers_come_in_order_once_all_have_ended() -> None:
    with opened(3, whole=True) as (hub, sequences):
        taking = asyncio.create_task(taken(sequences))
        for index in (2, 0, 1):
            await asyncio.sleep(0)
            assert not taking.done()
            hub.deliver([event(index, 65 + index), event(index, 75 + index, finish=LENGTH)])
        assert [await taking, await taken(sequences), await taken(sequences)] == [
            (index, (65 + index, 75 + index)) for index in range(3)
        ]
        assert sequences.is_done


@in_loop
async def test_an_error_of_one_ends_a_whole_answer_before_anything_went_out() -> None:
    with opened(2, whole=True) as (hub, sequences):
        hub.deliver([event(0, 65, finish=LENGTH)])
        hub.deliver([ErrorEvent(uid=FIRST_UID + 1, error=InvalidRequest("constraint", "too large"))])
        with pytest.raises(InvalidRequest, match="too large"):
            await sequences.take()
        assert sequences.unfinished() == []


@in_loop
async def test_an_error_of_one_ends_a_stream_behind_what_has_ended() -> None:
    with opened(4) as (hub, sequences):
        hub.deliver([event(0, 65), event(1, 66), event(2, 67, finish=LENGTH)])
        hub.deliver([ErrorEvent(uid=FIRST_UID + 1, error=Unavailable("lost"))])
        assert [await taken(sequences) for _ in range(2)] == [(0, (65,)), (1, (66,))]
        hub.deliver([event(0, 68)])
        assert await taken(sequences) == (2, (67,)), "what goes on could keep the error waiting for ever"
        with pytest.raises(Unavailable, match="lost"):
            await sequences.take()
        assert sequences.unfinished() == [0, 3], "these are to be aborted"


@in_loop
async def test_a_sequence_that_is_left_unread_fails_the_call() -> None:
    with opened(2, max_unread=2) as (hub, sequences):
        hub.deliver([event(0, 65), event(1, 66, 66)])
        hub.deliver([event(1, 66, 66)])
        with pytest.raises(SlowReader, match="4 tokens are unread and 2 may be"):
            await sequences.take()
        assert sequences.unfinished() == [0]


@in_loop
async def test_one_sequence_has_no_total_and_several_have_their_sum() -> None:
    with opened(1) as (hub, sequences):
        hub.deliver([event(0, 65, finish=LENGTH)])
        await sequences.take()
        assert sequences.total is None
    with opened(2) as (hub, sequences):
        hub.deliver([event(0, 65, 66, finish=LENGTH), event(1, 67, finish=LENGTH)])
        await sequences.take()
        await sequences.take()
        assert sequences.total == Usage(prompt=3, completion=3, rounds=2, accepted=1, seed=0)


def test_the_total_counts_what_is_shared_once_and_sums_the_rest() -> None:
    names = [each.name for each in fields(Usage)]
    usages = [Usage(**{name: 100 * index + place for place, name in enumerate(names)}) for index in range(3)]
    total = total_of(usages)
    for place, name in enumerate(names):
        shared = name in ("prompt", "cached", "seed")
        assert getattr(total, name) == (place if shared else 300 + 3 * place), name
