"""Where a text ends, in every way that a request may ask for: ids, text, log-probabilities, offsets, rounds and usage
are cut at one token, however the tokens were split into runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from configs.load import demo_checkpoint
from runtime.events import TokenEvent
from runtime.request import Finish, FinishReason, ReportParams, Round, StopParams, Usage
from runtime.stream.detokenizer import REPLACEMENT, Vocabulary
from runtime.stream.text_stream import Delta, TextStream
from workers.demands import TokenLogprob

TOKENIZER = tokenizers.Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
VOCABULARY = Vocabulary(TOKENIZER)
EOS = 0
LENGTH, END = Finish(reason=FinishReason.LENGTH), Finish(reason=FinishReason.EOS)
ALL = ReportParams(num_logprobs=0, offsets=True, rounds=True)
BYTE_TOKEN = {data[0]: i for i in reversed(range(4096)) if len(data := VOCABULARY.token_bytes(i)) == 1}
SCRIPTS = ["한국어 글", "e\u0301\u0302a\u0308", "👩‍👩‍👧‍👦", "🏳️‍🌈!", "🇰🇷🇫🇷", "汉字", "aé", "END", "the end"]
INVALID = [b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xff", b"\xc3", b"\x80\x80", b"\xe2\x82"]


@dataclass(slots=True, kw_only=True)
class Heard:
    """All deltas of one stream put together."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def finish(self) -> Finish:
        assert self.last.finish is not None
        return self.last.finish


def events(ids: Sequence[int], lengths: Sequence[int], finish: Finish) -> list[TokenEvent]:
    """Ids in runs of some lengths, each of one round whose drafts all stood; the rest is one run more."""
    made: list[TokenEvent] = []
    done = accepted = 0
    for length in [*lengths, len(ids)]:
        run = tuple(ids[done : done + length])
        if not run:
            break
        done, accepted = done + len(run), accepted + len(run) - 1
        made.append(
            TokenEvent(
                uid=1,
                tokens=run,
                usage=Usage(prompt=3, completion=done, rounds=len(made) + 1, accepted=accepted),
                rounds=(Round(drafted=run[:-1], accepted=len(run) - 1, emitted=run),),
                logprobs=tuple(TokenLogprob(token=token, logprob=-token / 4) for token in run),
                finish=finish if done == len(ids) else None,
            )
        )
    return made


def hear(
    ids: Sequence[int],
    lengths: Sequence[int] = (),
    finish: Finish = LENGTH,
    *,
    report: ReportParams = ALL,
    prompt: Sequence[int] = (),
    vocabulary: Vocabulary = VOCABULARY,
    **stopping: object,
) -> Heard:
    """A stream's deltas; checks what holds of every stream."""
    params = StopParams(max_tokens=1000, **stopping)  # type: ignore[arg-type]
    stream = TextStream(vocabulary.detokenizer(), params, report, prompt=prompt)
    heard = Heard()
    for event in events(ids, lengths, finish):
        delta = stream.take(event)
        heard.text += delta.text
        heard.ids += delta.token_ids
        heard.offsets += delta.offsets
        heard.logprobs += delta.logprobs
        heard.rounds += delta.rounds
        heard.deltas.append(delta)
        assert delta.usage.completion == delta.usage.accepted + delta.usage.rounds - delta.usage.trimmed
        assert stream.is_finished is (delta.finish is not None)
        if stream.is_finished:
            break
    assert stream.is_finished
    output = heard.ids[len(prompt) :] if report.echo else heard.ids
    assert output == list(ids[: len(output)])
    assert heard.last.usage.completion == len(output)
    assert [one.token for one in heard.logprobs] == output
    assert [token for one in heard.rounds for token in one.emitted] == output
    assert len(heard.offsets) == (len(heard.ids) if report.offsets else 0)
    assert heard.offsets == sorted(heard.offsets)
    return heard


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def spelled(text: str) -> list[int]:
    """One token per byte."""
    return [BYTE_TOKEN[byte] for byte in text.encode()]


run_lengths = st.lists(st.integers(1, 9), max_size=12)
texts = st.lists(st.sampled_from(SCRIPTS) | st.text(max_size=5), min_size=1, max_size=5).map("".join).filter(len)
# U+FFFD is also what half a character decodes to, which the oracle could not tell apart.
stop_lists = st.lists(
    st.sampled_from(["글", "\u0302", "‍👧", "字a", "END", "ENDthe", "e"])
    | st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), min_size=1, max_size=3),
    max_size=4,
)


def expected_end(ids: Sequence[int], stops: Sequence[str], min_tokens: int) -> tuple[int, str, str] | None:
    """By brute force: how many ids stay, the text before the stop string, and the string; None where none counts."""
    best = None
    for count in range(max(1, min_tokens), len(ids) + 1):
        before, text = VOCABULARY.decode(list(ids[: count - 1])), VOCABULARY.decode(list(ids[:count]))
        start = len(before.rstrip(REPLACEMENT))
        for end in range(start + 1, len(text.rstrip(REPLACEMENT)) + 1):
            for stop in sorted(stops, key=len, reverse=True):
                if text[:end].endswith(stop) and best is None:
                    best = count, text[: end - len(stop)], stop
        if best is not None:
            return best
    return None


@given(texts, st.booleans(), run_lengths, stop_lists, st.integers(0, 12), st.booleans())
def test_a_stop_string_cuts_everything_at_the_token_that_completes_it(
    text: str, by_byte: bool, lengths: list[int], stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    ids = spelled(text) if by_byte else encode(text)
    if not ids or REPLACEMENT in text or EOS in ids:
        return
    stops = [*dict.fromkeys(stops)]
    heard = hear(ids, lengths, stop_strings=tuple(stops), min_tokens=min_tokens, include_stop=include_stop)
    end = expected_end(ids, stops, min_tokens)
    if end is None:
        assert (heard.text, heard.ids, heard.finish) == (text, ids, LENGTH)
        return
    count, before, stop = end
    assert heard.text == before + (stop if include_stop else "")
    assert heard.ids == ids[:count]
    assert heard.finish == Finish(reason=FinishReason.STOP_STRING, stop_string=stop)


@given(st.lists(st.sampled_from([*(s.encode() for s in SCRIPTS), *INVALID]) | st.binary(max_size=6), max_size=6))
def test_text_is_the_same_in_runs_of_any_length_and_whole(parts: list[bytes]) -> None:
    ids = [BYTE_TOKEN[byte] for byte in b"".join(parts)]
    if not ids:
        return
    whole = VOCABULARY.decode(ids)
    for lengths in ([], [1] * len(ids), [2, 5, 3] * len(ids)):
        heard = hear(ids, lengths, stop_strings=("no such text",))
        assert heard.text.encode() == whole.encode()
        assert heard.offsets == places_of_bytes(b"".join(parts))


def places_of_bytes(data: bytes) -> list[int]:
    """The character of the text that each byte is part of; of a sequence that forms none, its U+FFFD."""
    places: list[int] = []
    place = 0
    while len(places) < len(data):
        rest = data[len(places) :]
        try:
            size = len(rest.decode()[0].encode())
        except UnicodeDecodeError as error:
            size = error.end if error.start == 0 else len(rest[: error.start].decode()[0].encode())
        places += [place] * size
        place += 1
    return places


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        ([b"\xff", "And"], [0, 1]),
        ([b"\xc3", "And"], [0, 1]),
        ([b"\xf0", b"\x9f", "And"], [0, 0, 1]),
        ([b"\xf0", b"\x9f", b"\xc3", b"\xa9"], [0, 0, 1, 1]),
        ([b"\xc3", b"\xc3", "And"], [0, 1, 2]),
        (["a", b"\xef", b"\xbf", b"\xbd", "b"], [0, 1, 1, 1, 2]),
    ],
)
@pytest.mark.parametrize("num_echoed", [0, 1])
def test_a_token_behind_bytes_that_form_no_character_begins_behind_them(
    tokens: list[bytes | str], offsets: list[int], num_echoed: int
) -> None:
    ids = [token for one in tokens for token in ([BYTE_TOKEN[one[0]]] if isinstance(one, bytes) else encode(one))]
    assert len(ids) == len(tokens)
    echoing = replace(ALL, echo=True)
    heard = hear(ids[num_echoed:], [1, 2], report=echoing, prompt=ids[:num_echoed])
    assert heard.offsets == offsets
    assert heard.text == VOCABULARY.decode(ids)


@given(texts, run_lengths)
def test_offsets_say_where_each_token_begins(text: str, lengths: list[int]) -> None:
    ids = encode(text)
    if REPLACEMENT in text or EOS in ids:
        return
    heard = hear(ids, lengths)
    for index, offset in enumerate(heard.offsets):
        before = VOCABULARY.decode(ids[:index]).rstrip(REPLACEMENT)
        assert offset == len(before)
    whole_tokens = [i for i in ids if REPLACEMENT not in VOCABULARY.decode([i])]
    if whole_tokens == ids:
        ends = [*heard.offsets[1:], len(text)]
        pieces = [text[start:end] for start, end in zip(heard.offsets, ends, strict=True)]
        assert pieces == [VOCABULARY.decode([i]) for i in ids]


@given(texts, texts, run_lengths, stop_lists)
def test_an_echo_comes_first_once_and_is_not_searched(
    prompt: str, text: str, lengths: list[int], stops: list[str]
) -> None:
    ids, prompt_ids = encode(text), encode(prompt)
    if REPLACEMENT in prompt + text or EOS in ids + prompt_ids:
        return
    stopping = {"stop_strings": tuple(dict.fromkeys(stops))}
    plain = hear(ids, lengths, **stopping)
    echoed = hear(ids, lengths, report=replace(ALL, echo=True), prompt=prompt_ids, **stopping)
    assert echoed.text == prompt + plain.text
    assert echoed.ids == prompt_ids + plain.ids
    assert echoed.offsets[len(prompt_ids) :] == [len(prompt) + offset for offset in plain.offsets]
    assert echoed.last.usage == plain.last.usage
    assert (echoed.logprobs, echoed.finish) == (plain.logprobs, plain.finish)
    assert echoed.deltas[0].text.startswith(prompt)


def test_a_character_that_begins_in_the_prompt_is_completed_by_the_output() -> None:
    heard = hear([BYTE_TOKEN[0xA9]], report=replace(ALL, echo=True), prompt=[*encode("caf"), BYTE_TOKEN[0xC3]])
    assert (heard.text, heard.offsets[-2:]) == ("café", [3, 3])
    assert hear([BYTE_TOKEN[0xA9]]).text == REPLACEMENT


@pytest.mark.parametrize("finish", [LENGTH, END, Finish(reason=FinishReason.CONSTRAINT)])
@pytest.mark.parametrize("last_run", [1, 2, 20])
def test_held_back_text_is_released_once_whatever_ends_the_text(finish: Finish, last_run: int) -> None:
    ids = [*encode("the EN"), *([EOS] if finish is END else [])]
    heard = hear(ids, [len(ids) - last_run] if len(ids) > last_run else [], finish, stop_strings=("END",))
    assert heard.text == "the EN"
    assert heard.finish == finish
    assert heard.ids == ids


def test_half_a_character_is_released_at_the_end_and_at_no_other_time() -> None:
    ids = [*encode("a"), BYTE_TOKEN[0xF0], BYTE_TOKEN[0x9F], EOS]
    heard = hear(ids, [1, 1, 1], END)
    assert [delta.text for delta in heard.deltas] == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("position", range(6))
def test_a_stop_string_is_found_at_each_position_of_an_accepted_run(position: int) -> None:
    filler = [BYTE_TOKEN[ord("x")]] * 5
    ids = [*filler[:position], BYTE_TOKEN[ord("!")], *filler[position:]]
    heard = hear(ids, [], stop_strings=("!",))
    assert heard.text == "x" * position
    assert len(heard.ids) == position + 1
    assert heard.last.usage.trimmed == 5 - position


def test_overlapping_beginnings_do_not_hide_each_other() -> None:
    for stops, text, expected in (
        (("aab",), "aaab", "a"),
        (("abab", "babb"), "ababb", ""),
        (("abc", "bcd"), "abcd", ""),
        (("abd", "bcd"), "abcd", "a"),
    ):
        for lengths in ([], [1] * 9, [2, 1, 2]):
            heard = hear(spelled(text), lengths, stop_strings=stops)
            assert heard.text == expected
            assert heard.finish.reason is FinishReason.STOP_STRING


class TestIncludeStop:
    def test_the_stop_string_is_returned_and_what_its_token_says_behind_it_is_not(self) -> None:
        ids = encode("def f(x):\n    return x\n")
        plain, full = (hear(ids, stop_strings=("retu",), include_stop=include) for include in (False, True))
        assert (plain.text, full.text) == ("def f(x):\n    ", "def f(x):\n    retu")
        assert (plain.ids, plain.offsets, plain.finish) == (full.ids, full.offsets, full.finish)

    def test_a_stop_tokens_text_is_returned_and_not_searched(self) -> None:
        ids = encode("done!")
        finish = Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=ids[-1])
        for stops in ((), ("!",), ("e!",)):
            plain, full = (
                hear(ids, [2], finish, stop_strings=stops, include_stop=include) for include in (False, True)
            )
            assert (plain.text, full.text) == ("done", "done!")
            assert plain.finish == full.finish == finish

    def test_half_a_character_of_a_stop_token_completes_no_stop_string(self) -> None:
        ids = [*encode("a"), BYTE_TOKEN[0xF0]]
        finish = Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=ids[-1])
        for include, text in ((False, "a"), (True, "a" + REPLACEMENT)):
            heard = hear(ids, [], finish, stop_strings=(REPLACEMENT,), include_stop=include)
            assert (heard.text, heard.finish) == (text, finish)

    def test_a_special_token_has_no_text(self) -> None:
        assert hear([*encode("done"), EOS], [], END, include_stop=True).text == "done"

    def test_a_character_that_the_stop_token_completes_is_whole(self) -> None:
        ids = [BYTE_TOKEN[0xC3], BYTE_TOKEN[0xA9]]
        finish = Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=ids[-1])
        assert hear(ids, [], finish, include_stop=True).text == "é"
        assert hear(ids, [], finish).text == REPLACEMENT


class TestMinTokens:
    def test_a_stop_string_that_completes_too_early_passes(self) -> None:
        ids = spelled("ab!cd!ef")
        for min_tokens, kept in ((0, 3), (3, 3), (4, 6), (6, 6), (7, 8)):
            heard = hear(ids, [3, 3], stop_strings=("!",), min_tokens=min_tokens)
            assert len(heard.ids) == kept
            assert heard.text == ("ab!cd!ef" if kept == 8 else "ab!cd!"[: kept - 1])

    def test_one_that_begins_before_and_completes_behind_ends_the_text(self) -> None:
        heard = hear(spelled("xxENDyy"), [1] * 7, stop_strings=("END",), min_tokens=5)
        assert (heard.text, len(heard.ids)) == ("xx", 5)
        heard = hear(spelled("xxENDyy"), [1] * 7, stop_strings=("END",), min_tokens=6)
        assert heard.text == "xxENDyy"

    def test_what_has_passed_is_not_held_back(self) -> None:
        stream = TextStream(VOCABULARY.detokenizer(), StopParams(max_tokens=99, stop_strings=("END",), min_tokens=4))
        assert stream.take(events(spelled("xEND") + [65] * 9, [3], LENGTH)[0]).text == "x"
        stream = TextStream(VOCABULARY.detokenizer(), StopParams(max_tokens=99, stop_strings=("END",), min_tokens=9))
        assert stream.take(events(spelled("xEND") + [65] * 9, [4], LENGTH)[0]).text == "xEND"

    def test_the_longer_of_two_counts_where_the_shorter_has_passed(self) -> None:
        heard = hear(spelled("abcd"), [], stop_strings=("abc", "abcd"), min_tokens=4)
        assert (heard.text, heard.finish.stop_string) == ("", "abcd")


def test_a_time_limit_may_end_a_text_with_no_token_at_all() -> None:
    late = Finish(reason=FinishReason.TIME_LIMIT)
    stream = TextStream(
        VOCABULARY.detokenizer(), StopParams(max_tokens=9, stop_strings=("END",)), ReportParams(echo=True), prompt=[65]
    )
    delta = stream.take(TokenEvent(uid=1, tokens=(), usage=Usage(prompt=1), finish=late))
    assert (delta.text, delta.token_ids, delta.finish) == (VOCABULARY.decode([65]), (65,), late)
    stream = TextStream(VOCABULARY.detokenizer(), StopParams(max_tokens=9, stop_strings=("END",)))
    first, *_ = events(spelled("xEN"), [2], LENGTH)
    assert stream.take(first).text == "x"
    delta = stream.take(TokenEvent(uid=1, tokens=(), usage=first.usage, finish=late))
    assert (delta.text, delta.finish) == ("E", late)
