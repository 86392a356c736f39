"""The end of a stream that no pass brings: an event without tokens, which releases what was held back, once."""

from __future__ import annotations

import pytest
from fakes.front import TOKENIZER, in_loop

from configs.schema import ServerSettings, ServeSettings
from runtime.events import TokenEvent, Verdict
from runtime.front.hub import StreamHub
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason, ReportParams, StopParams, Usage
from runtime.stream.text_stream import TextStream

TIME_LIMIT = Finish(reason=FinishReason.TIME_LIMIT)
IDS = tuple(TOKENIZER.encode_word("return xyz"))
HANGUL = tuple(TOKENIZER.encode_word("한국"))
assert len(HANGUL) > 2, "the tokens cut characters"


def stream_of(*stops: str, prompt: tuple[int, ...] = (), include_stop: bool = False) -> TextStream:
    """With offsets, and an echo where there is a prompt."""
    return TextStream(
        TOKENIZER.detokenizer(),
        StopParams(max_tokens=100, stop_strings=stops, include_stop=include_stop),
        ReportParams(echo=bool(prompt), offsets=True),
        prompt=prompt,
    )


def event(tokens: tuple[int, ...], num_before: int = 0, finish: Finish | None = None) -> TokenEvent:
    done = num_before + len(tokens)
    return TokenEvent(
        uid=1,
        tokens=tokens,
        usage=Usage(prompt=3, completion=done, rounds=min(1, done), accepted=max(0, done - 1)),
        finish=finish,
        needs_verdict=True,
    )


@pytest.mark.parametrize("stops", [(), ("xyzzy",), (" xyz!", "z?")])
@pytest.mark.parametrize("ids", [IDS, HANGUL[:1], HANGUL[:-1], HANGUL])
def test_what_was_held_back_comes_with_it_once(ids: tuple[int, ...], stops: tuple[str, ...]) -> None:
    stream = stream_of(*stops)
    first = stream.take(event(ids))
    last = stream.take(event((), len(ids), TIME_LIMIT))
    assert first.text + last.text == TOKENIZER.decode(ids)
    assert (first.token_ids, last.token_ids) == (ids, ())
    assert (len(first.offsets), last.offsets, last.rounds, last.logprobs) == (len(ids), (), (), ())
    assert (last.finish, stream.is_finished) == (TIME_LIMIT, True)
    assert last.usage == event((), len(ids)).usage


def test_of_a_sequence_without_any_token_it_is_the_echo_and_the_end() -> None:
    assert stream_of().take(event((), finish=TIME_LIMIT)).text == ""
    delta = stream_of(prompt=IDS).take(event((), finish=TIME_LIMIT))
    assert (delta.text, delta.token_ids, len(delta.offsets)) == (TOKENIZER.decode(IDS), IDS, len(IDS))
    assert delta.finish == TIME_LIMIT


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_that_ends_with_the_text_goes_before_and_cuts_no_token(include_stop: bool) -> None:
    """A character that never becomes whole turns into U+FFFD only there."""
    stream = stream_of("\ufffd", include_stop=include_stop)
    assert stream.take(event(HANGUL[:1])).text == ""
    last = stream.take(event((), 1, TIME_LIMIT))
    assert last.finish == Finish(reason=FinishReason.STOP_STRING, stop_string="\ufffd")
    assert last.text == ("\ufffd" if include_stop else "")
    assert (last.usage.completion, last.usage.trimmed) == (1, 0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 4])
@in_loop
async def test_its_reader_is_woken_and_gets_the_end(num_tokens: int, whole: bool) -> None:
    """Also while what came before is unread."""
    hub = StreamHub(SettingsInForce(ServeSettings(server=ServerSettings(max_frame_tokens_unread=4))))
    with hub.stream(1, stream_of("xyz!"), abort=pytest.fail, whole=whole) as stream:
        if num_tokens:
            hub.deliver([event(IDS[:num_tokens])])
        verdicts = hub.deliver([event((), num_tokens, TIME_LIMIT)])
        assert verdicts == [Verdict(uid=1, stop=False)]
        delta = await stream.take()
        assert (delta.token_ids, delta.text) == (IDS[:num_tokens], TOKENIZER.decode(IDS[:num_tokens]))
        assert (delta.finish, delta.usage.completion, stream.is_over) == (TIME_LIMIT, num_tokens, True)


@in_loop
async def test_its_verdict_tells_a_stop_string_that_it_completed() -> None:
    hub = StreamHub(SettingsInForce(ServeSettings(server=ServerSettings())))
    with hub.stream(1, stream_of("\ufffd"), abort=pytest.fail) as stream:
        hub.deliver([event(HANGUL[:1])])
        assert hub.deliver([event((), 1, TIME_LIMIT)]) == [Verdict(uid=1, stop=True, num_cut=0)]
        assert (await stream.take()).finish == Finish(reason=FinishReason.STOP_STRING, stop_string="\ufffd")
    # And a client that has left wants none.
    assert hub.deliver([event((), 1, TIME_LIMIT)]) == [Verdict(uid=1, stop=False, gone=True)]
