"""Log-probabilities on their way through the engine: with their tokens, and a prompt's with the first of these."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.arithmetic import logprob_of
from fakes.engine_house import LENGTH, House, asynchronous, house
from fakes.requests import request
from fakes.worker import true_stream

from runtime.events import TokenEvent
from runtime.front.errors import InternalError
from runtime.live import LiveRequests
from runtime.request import ReportParams, Request, Usage
from workers.demands import TokenLogprob


def curious(uid: int, *, num_prompt: int = 3, output: int | None = None, prompt: int | None = None) -> Request:
    report = ReportParams(num_logprobs=output, num_prompt_logprobs=prompt)
    return replace(request(uid, num_prompt=num_prompt), report=report)


def of(tokens: tuple[int, ...], num_top: int) -> tuple[TokenLogprob, ...]:
    return tuple(logprob_of(token, num_top) for token in tokens)


def events_of(h: House, uid: int) -> list[TokenEvent]:
    return [event for event in h.sink.token_events if event.uid == uid]


@asynchronous
async def test_each_event_has_those_of_its_tokens_and_the_first_those_of_the_prompt() -> None:
    """Though prompts are read in parts, beside others."""
    async with house(max_model_len=60, context_length=60, num_pages=(60, 60)) as h:
        wanted = [
            curious(1, num_prompt=27, output=2, prompt=1),
            curious(2, num_prompt=25, prompt=0),
            curious(3, num_prompt=1, output=0, prompt=3),
            curious(4, num_prompt=20),
        ]
        for each in wanted:
            h.engine.submit(each)
        await h.sink.wait_for_end(1, 2, 3, 4)
        chunks = [sum(known > 1 for known in batch.num_known) for plan in h.source.plans for batch in plan.batches]
        assert sum(chunks) > len(wanted), "inconclusive: no prompt was read in parts"
        for each in wanted:
            first, *later = events_of(h, each.uid)
            width = each.report.num_prompt_logprobs
            assert first.prompt_logprobs == (() if width is None else of(each.prompt[1:], width))
            assert all(event.prompt_logprobs == () for event in later)
            for event in (first, *later):
                width = each.report.num_logprobs
                assert event.logprobs == (() if width is None else of(event.tokens, width))
            assert h.sink.end_of(each.uid) == LENGTH
            assert tuple(h.sink.tokens[each.uid]) == true_stream(each)


@pytest.mark.parametrize("wish", [{"output": 1}, {"prompt": 1}])
def test_a_request_ends_alone_where_what_it_wants_does_not_come(wish: dict[str, int]) -> None:
    @asynchronous
    async def scene() -> None:
        async with house() as h:
            h.source.group.dp_ranks[0].silent_uids.add(1)
            h.engine.submit(curious(1, **wish))
            h.engine.submit(curious(2, **wish))
            await h.sink.wait_for_end(1, 2)
            error = h.sink.end_of(1)
            assert isinstance(error, InternalError)
            assert "log-probabilities do not fit" in str(error)
            assert h.sink.tokens[1] == []
            assert h.sink.end_of(2) == LENGTH

    scene()


@asynchronous
async def test_what_a_prompt_has_told_goes_with_the_request() -> None:
    """An abort between two parts of a prompt leaves nothing behind."""
    async with house(gated=True, max_model_len=60, context_length=60, num_pages=(60, 60)) as h:
        h.engine.submit(curious(1, num_prompt=50, prompt=1))
        await h.step()
        assert len(h.engine.live_requests(9)[0]) == 1
        h.engine.abort(1)
        assert h.engine.live_requests(9)[0] == []
        await h.step()
        assert h.sink.token_events == []


def test_they_are_kept_no_longer_than_until_the_first_round() -> None:
    live, one = LiveRequests(lambda: 0.0), curious(1, prompt=0)
    live.add(one)
    live.note_prompt(1, of(one.prompt[1:2], 0))
    live.note_prompt(1, of(one.prompt[2:], 0))
    assert tuple(live[1].prompt_logprobs) == of(one.prompt[1:], 0)
    live.note_round(1, Usage(prompt=3, completion=1, rounds=1))
    assert live[1].prompt_logprobs == []
