"""Buffers between engine and writers: merging, distance under load, limits, verdicts, and one bad stream among good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes.front import TOKENIZER, in_loop

from configs.schema import ServerSettings, ServeSettings
from runtime.events import ErrorEvent, TokenEvent, Verdict
from runtime.front.errors import InternalError, SlowReader, Unavailable
from runtime.front.hub import BUSY_STREAMS, Pace, StreamHub
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason, ReportParams, StopParams, Usage
from runtime.stream.text_stream import NO_REPORT, TextStream
from workers.demands import TokenLogprob

SETTINGS = SettingsInForce(ServeSettings(server=ServerSettings(max_frame_tokens_unread=4, coalesce_ms=2)))
LENGTH = Finish(reason=FinishReason.LENGTH)


def event(
    uid: int, tokens: tuple[int, ...], *, finish: Finish | None = None, needs_verdict: bool = False
) -> TokenEvent:
    usage = Usage(prompt=1, completion=len(tokens), rounds=1, accepted=len(tokens) - 1)
    return TokenEvent(uid=uid, tokens=tokens, usage=usage, finish=finish, needs_verdict=needs_verdict)


def text(*stops: str, report: ReportParams = NO_REPORT, prompt: tuple[int, ...] = ()) -> TextStream:
    stopping = StopParams(max_tokens=1000, stop_strings=stops)
    return TextStream(TOKENIZER.detokenizer(), stopping, report, prompt=prompt)


class VirtualTime:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []
        self.on_sleep: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s
        self.on_sleep()


@in_loop
async def test_what_comes_before_a_take_is_one_delta() -> None:
    hub = StreamHub(SETTINGS)
    with hub.stream(1, text(), abort=pytest.fail) as stream:
        hub.deliver([event(1, (65,)), event(1, (66, 67))])
        delta = await stream.take()
        assert delta.token_ids == (65, 66, 67)
        assert delta.text == TOKENIZER.decode([65, 66, 67])
        taking = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        assert not taking.done()
        hub.deliver([event(1, (68,), finish=LENGTH)])
        last = await taking
        assert (last.token_ids, last.finish) == ((68,), LENGTH)
        assert stream.is_over


@in_loop
async def test_frames_keep_their_distance_only_while_many_streams_are_open() -> None:
    time = VirtualTime()
    hub = StreamHub(SETTINGS, Pace(lambda: 0.002, clock=time.clock, sleep=time.sleep))
    with hub.stream(1, text(), abort=pytest.fail) as stream:
        for token in (65, 66):
            hub.deliver([event(1, (token,))])
            await stream.take()
        assert time.slept_s == []
        others = [hub.stream(uid, text(), abort=pytest.fail) for uid in range(2, BUSY_STREAMS + 2)]
        for other in others:
            other.__enter__()
        hub.deliver([event(1, (67,))])
        time.on_sleep = lambda: hub.deliver([event(1, (68,))])
        assert (await stream.take()).token_ids == (67, 68), "what came during the pause goes along"
        assert time.slept_s == [pytest.approx(0.002)]
        hub.deliver([event(1, (69,), finish=LENGTH)])
        await stream.take()
        assert len(time.slept_s) == 1, "the end waits for nothing"
        for other in others:
            other.__exit__(None, None, None)


@in_loop
async def test_a_slow_reader_fails_alone_and_is_aborted_after_the_delivery() -> None:
    hub, aborted = StreamHub(SETTINGS), []
    with (
        hub.stream(1, text("never"), abort=lambda uid, error: aborted.append(uid)) as slow,
        hub.stream(2, text("never"), abort=lambda uid, error: aborted.append(uid)) as fine,
    ):
        step = [event(uid, (65, 66, 67), needs_verdict=True) for uid in (1, 2)]
        assert hub.deliver(list(step)) == [Verdict(uid=1, stop=False), Verdict(uid=2, stop=False)]
        await fine.take()
        gone, other = hub.deliver(list(step))
        assert (gone.uid, gone.stop, gone.gone) == (1, False, True)
        assert isinstance(gone.error, SlowReader)
        assert other == Verdict(uid=2, stop=False)
        assert aborted == []
        await asyncio.sleep(0)
        assert aborted == [1]
        with pytest.raises(SlowReader, match="6 tokens are unread and 4 may be"):
            await slow.take()
        assert (await fine.take()).token_ids == (65, 66, 67)


@in_loop
async def test_an_echoed_prompt_does_not_make_a_slow_reader() -> None:
    hub = StreamHub(SETTINGS)
    with hub.stream(1, text(report=ReportParams(echo=True), prompt=(70,) * 9), abort=pytest.fail) as stream:
        hub.deliver([event(1, (65,)), event(1, (66,))])
        assert (await stream.take()).token_ids == (*(70,) * 9, 65, 66)


@in_loop
async def test_what_is_told_of_the_prompt_waits_for_the_first_token() -> None:
    hub = StreamHub(SETTINGS)
    told = (TokenLogprob(token=5, logprob=-1.5), TokenLogprob(token=6, logprob=-2.5))
    with hub.stream(1, text(), abort=pytest.fail) as stream:
        for one in told:
            hub.deliver([replace(event(1, ()), prompt_logprobs=(one,), usage=Usage(prompt=3))])
        assert not stream.is_ready
        said = TokenLogprob(token=65, logprob=-0.5)
        hub.deliver([replace(event(1, (65,)), logprobs=(said,))])
        delta = await stream.take()
        assert (delta.token_ids, delta.logprobs, delta.prompt_logprobs) == ((65,), (said,), told)
        hub.deliver([event(1, (66,), finish=LENGTH)])
        delta = await stream.take()
        assert (delta.logprobs, delta.prompt_logprobs) == ((), ())


@in_loop
async def test_a_time_limit_ends_a_stream_that_nothing_had_come_to() -> None:
    hub = StreamHub(SETTINGS)
    late = Finish(reason=FinishReason.TIME_LIMIT)
    for whole in (False, True):
        with hub.stream(1, text("END"), abort=pytest.fail, whole=whole) as stream:
            nothing = replace(event(1, (), finish=late, needs_verdict=True), usage=Usage(prompt=3, seed=5))
            assert hub.deliver([nothing]) == [Verdict(uid=1, stop=False)]
            delta = await stream.take()
            assert (delta.text, delta.token_ids, delta.usage, delta.finish) == ("", (), Usage(prompt=3, seed=5), late)


@in_loop
async def test_one_large_event_does_not_make_a_slow_reader() -> None:
    hub = StreamHub(SETTINGS)
    with hub.stream(1, text(), abort=pytest.fail) as stream:
        hub.deliver([event(1, (65,) * 9)])
        assert len((await stream.take()).token_ids) == 9


@in_loop
async def test_a_whole_stream_waits_for_its_end_without_limit() -> None:
    hub = StreamHub(SETTINGS)
    with hub.stream(1, text(), abort=pytest.fail, whole=True) as stream:
        taking = asyncio.create_task(stream.take())
        for _ in range(5):
            hub.deliver([event(1, (65, 66))])
            await asyncio.sleep(0)
            assert not taking.done()
        hub.deliver([event(1, (67,), finish=LENGTH)])
        delta = await taking
        assert (len(delta.token_ids), delta.finish) == (11, LENGTH)


@in_loop
async def test_a_stop_string_is_answered_in_the_same_call() -> None:
    hub = StreamHub(SETTINGS)
    ids = tuple(await TOKENIZER.encode("go END on"))
    with hub.stream(1, text("END"), abort=pytest.fail) as stream:
        [verdict] = hub.deliver([event(1, ids, needs_verdict=True)])
        delta = await stream.take()
        assert verdict == Verdict(uid=1, stop=True, num_cut=len(ids) - len(delta.token_ids))
        assert verdict.num_cut > 0
        assert delta.text == "go "
        assert delta.finish == Finish(reason=FinishReason.STOP_STRING, stop_string="END")
        assert hub.deliver([event(1, (65,))]) == [], "late events are dropped"


@in_loop
async def test_an_end_without_a_match_is_no_stop() -> None:
    hub = StreamHub(SETTINGS)
    with hub.stream(1, text("END"), abort=pytest.fail) as stream:
        last = event(1, (65, 66), finish=LENGTH, needs_verdict=True)
        assert hub.deliver([last]) == [Verdict(uid=1, stop=False)]
        assert (await stream.take()).finish == LENGTH


@in_loop
async def test_events_of_a_stream_that_is_gone_let_its_sequence_stop() -> None:
    hub = StreamHub(SETTINGS)
    events = [event(7, (65,), needs_verdict=True), event(7, (65,)), ErrorEvent(uid=7, error=Unavailable("gone"))]
    assert hub.deliver(events) == [Verdict(uid=7, stop=False, gone=True)]


@in_loop
async def test_an_error_comes_after_what_is_unread() -> None:
    hub = StreamHub(SETTINGS)
    with hub.stream(1, text(), abort=pytest.fail) as stream:
        hub.deliver([event(1, (65,)), ErrorEvent(uid=1, error=Unavailable("worker lost"))])
        assert (await stream.take()).token_ids == (65,)
        with pytest.raises(Unavailable, match="worker lost"):
            await stream.take()
    with hub.stream(2, text(), abort=pytest.fail, whole=True) as whole:
        hub.deliver([event(2, (65,)), ErrorEvent(uid=2, error=Unavailable("worker lost"))])
        with pytest.raises(Unavailable):
            await whole.take()


@in_loop
async def test_a_defect_in_one_stream_spares_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def push(self, token_id: int) -> str:
            raise KeyError(token_id)

        def finish(self) -> str:
            return ""

    hub, aborted = StreamHub(SETTINGS), []
    with (
        hub.stream(
            1, TextStream(Broken(), StopParams(max_tokens=9)), abort=lambda uid, error: aborted.append(uid)
        ) as broken,
        hub.stream(2, text(), abort=lambda uid, error: aborted.append(uid)) as fine,
    ):
        verdicts = hub.deliver([event(1, (65,), needs_verdict=True), event(2, (66,))])
        [gone] = verdicts
        assert (gone.uid, gone.stop, gone.gone, type(gone.error)) == (1, False, True, InternalError)
        with pytest.raises(InternalError):
            await broken.take()
        assert (await fine.take()).token_ids == (66,)
        await asyncio.sleep(0)
        assert aborted == [1]
    assert "stream of uid 1 failed" in caplog.text


@in_loop
async def test_failing_all_ends_open_streams_only() -> None:
    hub, aborted = StreamHub(SETTINGS), []
    with (
        hub.stream(1, text(), abort=lambda uid, error: aborted.append(uid)) as done,
        hub.stream(2, text(), abort=lambda uid, error: aborted.append(uid)) as running,
    ):
        hub.deliver([event(1, (65,), finish=LENGTH)])
        hub.fail_all(Unavailable("stopping"))
        assert (await done.take()).finish == LENGTH
        with pytest.raises(Unavailable, match="stopping"):
            await running.take()
        assert aborted == [2]
