"""Events to deltas: text, ids, rounds and usage are cut at one place, and the counts always add up."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from configs.load import demo_checkpoint
from runtime.events import TokenEvent
from runtime.request import Finish, FinishReason, Round, StopParams, Usage
from runtime.stream.detokenizer import Vocabulary
from runtime.stream.text_stream import Delta, TextStream

TOKENIZER = tokenizers.Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
VOCABULARY = Vocabulary(TOKENIZER)
EOS = 0
LENGTH = Finish(reason=FinishReason.LENGTH)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def margins_of(ids: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(i / 8 for i in ids)


def events(ids: list[int], run_lengths: list[int], finish: Finish) -> list[TokenEvent]:
    """Splits ids into rounds that accept all but their last token; the last round carries `finish`."""
    made: list[TokenEvent] = []
    done = rounds = accepted = 0
    for length in [*run_lengths, len(ids)]:
        run = tuple(ids[done : done + length])
        if not run:
            break
        done, rounds, accepted = done + len(run), rounds + 1, accepted + len(run) - 1
        made.append(
            TokenEvent(
                uid=1,
                tokens=run,
                usage=Usage(
                    prompt=3, completion=done, rounds=rounds, drafted=accepted, admitted=accepted, accepted=accepted
                ),
                rounds=(Round(drafted=run[:-1], accepted=len(run) - 1, emitted=run, margins=margins_of(run)),),
                finish=finish if done == len(ids) else None,
            )
        )
    return made


def stream_of(*stops: str) -> TextStream:
    return TextStream(VOCABULARY.detokenizer(), StopParams(max_tokens=1000, stop_strings=stops))


def deltas(stream: TextStream, some_events: list[TokenEvent]) -> list[Delta]:
    got: list[Delta] = []
    for event in some_events:
        got.append(stream.take(event))
        if stream.is_finished:
            break
    return got


def text_of(got: list[Delta]) -> str:
    return "".join(delta.text for delta in got)


def ids_of(got: list[Delta]) -> list[int]:
    return [token_id for delta in got for token_id in delta.token_ids]


run_lengths = st.lists(st.integers(1, 9), max_size=20)
# U+FFFD is also what half a character decodes to, which the oracle below could not tell apart.
stop_lists = st.lists(
    st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), min_size=1, max_size=4), max_size=4
)


@given(st.text(min_size=1, max_size=60), run_lengths, stop_lists)
def test_stop_strings_cut_everything_at_one_place(text: str, lengths: list[int], stops: list[str]) -> None:
    ids = encode(text)
    got = deltas(stream_of(*stops), events(ids, lengths, LENGTH))
    last = got[-1]
    assert last.finish is not None
    assert all(delta.finish is None for delta in got[:-1])
    kept = ids_of(got)
    assert kept == ids[: len(kept)]
    for delta in got:
        usage = delta.usage
        assert usage.completion == usage.accepted + usage.rounds - usage.trimmed
        assert [i for one in delta.rounds for i in one.emitted] == list(delta.token_ids)
        assert all(one.margins == margins_of(one.emitted) for one in delta.rounds)
    assert last.usage.completion == len(kept)
    if last.finish.reason is FinishReason.STOP_STRING:
        stop = last.finish.stop_string
        assert stop is not None
        assert TOKENIZER.decode(kept).startswith(text_of(got) + stop)
        assert stop in TOKENIZER.decode(kept)
        assert not any(each in TOKENIZER.decode(kept[:-1]) for each in stops), (
            "an earlier token completed a stop string"
        )
    else:
        assert text_of(got) == text
        assert kept == ids
        assert not any(stop in text for stop in stops)


def test_a_match_inside_an_accepted_run_trims_the_run() -> None:
    ids = encode("def f(x):\n    return x\n")
    stream = stream_of("return")
    [delta] = deltas(stream, events(ids, [len(ids)], LENGTH))
    kept = len(delta.token_ids)
    assert 1 < kept < len(ids), "the match must lie inside the run"
    assert delta.text == "def f(x):\n    "
    assert delta.finish == Finish(reason=FinishReason.STOP_STRING, stop_string="return")
    assert delta.usage == Usage(
        prompt=3,
        completion=kept,
        rounds=1,
        drafted=len(ids) - 1,
        admitted=len(ids) - 1,
        accepted=len(ids) - 1,
        trimmed=len(ids) - kept,
    )
    emitted = tuple(ids[:kept])
    assert delta.rounds == (
        Round(drafted=tuple(ids[:-1]), accepted=len(ids) - 1, emitted=emitted, margins=margins_of(emitted)),
    )


def test_trimming_adds_to_what_the_worker_has_trimmed() -> None:
    ids = encode("one two three")
    event = TokenEvent(
        uid=1, tokens=tuple(ids), usage=Usage(prompt=1, completion=len(ids), rounds=1, accepted=len(ids) + 1, trimmed=2)
    )
    delta = stream_of("two").take(event)
    assert delta.usage.trimmed == 2 + len(ids) - len(delta.token_ids)
    assert delta.usage.completion == delta.usage.accepted + delta.usage.rounds - delta.usage.trimmed


def test_rounds_wholly_beyond_the_match_are_left_out() -> None:
    ids = tuple(encode("one two three four"))
    rounds = tuple(Round(drafted=(), accepted=0, emitted=(token_id,)) for token_id in ids)
    event = TokenEvent(uid=1, tokens=ids, usage=Usage(prompt=1, completion=len(ids), rounds=len(ids)), rounds=rounds)
    delta = stream_of("two").take(event)
    assert delta.rounds == rounds[: len(delta.token_ids)]
    assert 0 < len(delta.rounds) < len(rounds)


def test_end_tokens_are_returned_as_ids_and_add_no_text() -> None:
    ids = [*encode("done"), EOS]
    finish = Finish(reason=FinishReason.EOS, stop_token_id=EOS)
    got = deltas(stream_of(), events(ids, [2], finish))
    assert (text_of(got), ids_of(got), got[-1].finish) == ("done", ids, finish)


def test_the_text_of_a_stop_token_is_neither_returned_nor_searched() -> None:
    ids = encode("done!")
    bang = ids[-1]
    assert TOKENIZER.decode([bang]) == "!"
    finish = Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=bang)
    got = deltas(stream_of("!"), events(ids, [], finish))
    assert (text_of(got), ids_of(got), got[-1].finish) == ("done", ids, finish)


def test_held_text_comes_once_when_the_end_comes_by_length() -> None:
    ids = encode("the EN")
    stream = stream_of("END")
    got = deltas(stream, events(ids, [1] * len(ids), LENGTH))
    assert text_of(got) == "the EN"
    assert got[-1].finish == LENGTH


def test_a_stop_string_beats_the_length_limit_at_the_same_token() -> None:
    ids = encode("the END")
    got = deltas(stream_of("END"), events(ids, [], LENGTH))
    assert got[-1].finish == Finish(reason=FinishReason.STOP_STRING, stop_string="END")


def test_a_stop_string_of_replacements_can_complete_at_the_end() -> None:
    half = next(i for i in range(4096) if VOCABULARY.token_bytes(i) == b"\xe2")
    got = deltas(stream_of("\ufffd"), events([*encode("a"), half], [], LENGTH))
    assert text_of(got) == "a"
    assert got[-1].finish == Finish(reason=FinishReason.STOP_STRING, stop_string="\ufffd")
    assert got[-1].usage.completion == 2
