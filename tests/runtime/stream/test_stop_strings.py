"""The matcher against a search of the whole text: same place, same string, nothing held that need not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.stream.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What each push published (finish as the last one, if no match came), and the match."""
    matcher = StopMatcher(stops)
    published: list[str] = []
    for piece in pieces:
        published.append(matcher.push(piece))
        if matcher.matched is not None:
            return published, matcher.matched
    return [*published, matcher.finish()], None


def search(stops: list[str], text: str) -> tuple[str, str | None]:
    """First match by its end, the longest on a tie, by trying every place."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab한😀", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab한😀", min_size=1, max_size=5), max_size=5)


@given(stop_lists, st.lists(letters, max_size=12))
def test_agrees_with_a_search_of_the_whole_text_however_it_is_split(stops: list[str], pieces: list[str]) -> None:
    published, matched = run(stops, pieces)
    assert ("".join(published), matched) == search(stops, "".join(pieces))


@given(stop_lists, letters)
def test_holds_back_exactly_what_may_still_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    published = matcher.push(text)
    if matcher.matched is None:
        held = text[len(published) :]
        ends = (text[start:] for start in range(len(text)))
        assert held == next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["to the END of"], (["to the "], "END")),
        (["END"], ["the E", "N", "D."], (["the ", "", ""], "END")),
        (["END"], ["the E", "N", "ough"], (["the ", "", "ENough", ""], None)),
        (["aab"], ["aa", "a", "b"], (["", "a", ""], "aab")),
        (["abcd", "bc"], ["xabc"], (["xa"], "bc")),
        (["abc", "bc", "c"], ["xa", "b", "c"], (["x", "", ""], "abc")),
        (["한글"], ["가한", "글나"], (["가", ""], "한글")),
        ([], ["any", "thing"], (["any", "thing", ""], None)),
    ],
)
def test_cases(stops: list[str], pieces: list[str], expected: tuple[list[str], str | None]) -> None:
    assert run(stops, pieces) == expected


def test_held_text_is_released_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("an EN") == "an "
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""
