"""Where a sequence stands is a function of its tokens alone: whatever was drafted, walked and taken back before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path as File
from typing import Any

import pytest
from constraints.tiny_tokenizers import compiler_of, constraint, entered, ids, sequence, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from oracles.days import by_day

from workers.constraints import compiler as compiler_module
from workers.constraints.compiler import Compiler, mask_of
from workers.constraints.matchers import Followed, Matchers
from workers.constraints.path import REFUEL_EVERY, Path, Place
from workers.demands import Constraint
from workers.plan import RankEnd

WORDS = ["a", "b", "c", "d", "e", "bc", "be", "ab"]
END, MARK = len(WORDS), len(WORDS) + 1
V = MARK + 1
ANY_END = f"<[^0-{END - 1},{MARK}]>"
"""By its name an end is refused; among tokens that are not named it may be meant."""

TWO_PATHS = constraint("lark", 'start: x | y\nx: A B C\ny: D B E\nA: "a"\nB: "b"\nC: "c"\nD: "d"\nE: "e"')
"""After "a" and after "d" the same word comes, but not the same one behind it."""

GRAMMARS: dict[str, Constraint] = {
    "two paths to one place": TWO_PATHS,
    "regex": constraint("regex", "(ab|c)*a?(be|d){0,2}"),
    "anything": constraint("regex", "[a-e]*"),
    "choice": constraint("choice", ["a", "ab", "abc", "be", "bebe"]),
    "brackets": constraint("lark", 'start: "a" start "b" | "c" | '),
    "ignored words": constraint("lark", 'start: A+ B?\nA: /a|ab/\nB: "be"\n%ignore /[cd]+/'),
    "an end in the middle": constraint("lark", f'start: "a" {ANY_END}? "b" | "c"*'),
    "a special token": constraint("lark", f'start: ("a" <[{MARK}]> | "b")* "c"?'),
    "something between": constraint("lark", 'start: a "e"\na[suffix="c"]: /[abd]*/'),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return compiler_of(tmp_path_factory.mktemp("tokenizer"), WORDS, special=("<end>", "<mark>"))


class Fresh:
    """What may stand behind tokens, told by matchers that have never gone back, with lexers of their own."""

    def __init__(self, compiler: Compiler, of: Constraint) -> None:
        self._compiler, self._of = compiler, of
        self._told: dict[tuple[int, ...], frozenset[int]] = {}

    def __call__(self, tokens: Sequence[int]) -> frozenset[int]:
        if tuple(tokens) not in self._told:
            assert self._compiler._tokenizer is not None
            matcher = compiler_module.compile_matcher(self._compiler._tokenizer, self._of)
            for token in tokens:
                assert matcher.consume_token(token), matcher.get_error()
            told = {END} if matcher.is_stopped() else ids(mask_of(matcher, V))
            self._told[tuple(tokens)] = frozenset(told if matcher.is_accepting() else told - {END})
        return self._told[tuple(tokens)]

    def going(self, tokens: Sequence[int]) -> list[int]:
        """Which go on behind others."""
        return sorted(self(tokens) - {END})


def check_walks(compiler: Compiler, fresh: Fresh, of: Constraint, data: st.DataObject) -> None:
    path = Path(compiler, of)
    committed: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        drafts: list[int] = []
        for choice in data.draw(st.lists(st.integers(0, V - 1), max_size=4)):
            if going := fresh.going([*committed, *drafts]):
                drafts.append(going[choice % len(going)])
        stray = data.draw(st.lists(st.integers(0, V - 1), max_size=1))
        places = path.along([*drafts, *stray])
        expected = [fresh([*committed, *drafts[:j]]) for j in range(len(drafts) + 1)]
        assert [ids(place.mask) for place in places[: len(expected)]] == expected
        assert len(places) == len(expected) + (stray[:1] != [] and stray[0] in expected[-1])
        num_kept = data.draw(st.integers(0, len(drafts)))
        if num_kept:
            path.commit(drafts[:num_kept])
            committed += drafts[:num_kept]
        assert ids(path.along([])[0].mask) == fresh(committed)


@pytest.mark.parametrize("of", by_day(GRAMMARS, 2))
def test_places_do_not_depend_on_what_was_walked_before(compiler: Compiler, of: Constraint) -> None:
    compiler.prepare(of)
    fresh = Fresh(compiler, of)

    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_walks(compiler, fresh, of, data)

    check()


def test_a_mask_is_not_that_of_another_path_to_the_same_place(compiler: Compiler) -> None:
    """llguidance keeps one by the place alone; this fails where nothing is done about it."""
    a, d, b, bc, be = 0, 3, 1, 5, 6
    path = Path(compiler, TWO_PATHS)
    for _ in range(3):
        assert ids(path.along([a])[1].mask) == {b, bc}
        assert ids(path.along([d])[1].mask) == {b, be}


def test_an_end_within_a_grammar_is_none(compiler: Compiler) -> None:
    """Whoever draws it has ended the output, which would not meet the grammar."""
    path = Path(compiler, constraint("lark", f'start: "a" "a" {ANY_END} "b" | "a" "c"'))
    for _ in range(3):
        assert [place.mask is None for place in path.along([0, 0, END])] == [False, False, True]
        assert [ids(place.mask) for place in path.along([0])] == [{0}, {0, 2}]
        assert [ids(place.mask) for place in path.along([0, 2])] == [{0}, {0, 2}, {END}]


def test_an_end_that_the_tokenizer_takes_for_text_is_the_end(tmp_path: File) -> None:
    compiler = Compiler(write_tokenizer(tmp_path, ["a", "b", "c"]), 4, [1])
    path = Path(compiler, constraint("regex", "a[ab]{2}c?"))
    assert [ids(place.mask) for place in path.along([0, 0, 0, 1])] == [{0}, {0}, {0}, {1, 2}, {1}]


def test_what_was_walked_beyond_the_committed_tokens_is_taken_back(compiler: Compiler) -> None:
    path = Path(compiler, constraint("regex", "[ab]{6}"))
    path.along([0, 1, 0, 1])
    path.commit([0])
    assert [place.ends for place in path.along([1, 1, 1, 1, 1])] == [False] * 5 + [True]
    path.commit([1, 1])
    path.along([0])
    path.commit([0])
    assert [place.ends for place in path.along([0, 1])] == [False, False, True]


def test_a_walk_is_made_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting asks once per draft and verification once more: no mask and no token twice."""
    made: list[str] = []
    real = compiler_module.mask_of
    monkeypatch.setattr("workers.constraints.path.mask_of", lambda m, v: (made.append("mask"), real(m, v))[1])
    path = Path(compiler, GRAMMARS["anything"])
    drafts = [0, 1, 2, 3, 4, 0, 1, 2]
    for j in range(len(drafts)):
        path.along(drafts[:j])
    assert len(made) == len(drafts)
    assert len(path.along(drafts)) == len(made) == len(drafts) + 1
    path.along(drafts[:3])
    path.along([])
    assert len(made) == len(drafts) + 1


def test_nothing_but_the_end_may_follow_where_nothing_may(compiler: Compiler) -> None:
    path = Path(compiler, GRAMMARS["choice"])
    places = path.along([0, 1, 2, END, END, 0])
    assert [ids(place.mask) for place in places[3:]] == [{END}] * 3
    assert [place.ends for place in places] == [False, False, False, True, True, True]


def run(compiler: Compiler, of: Constraint, emitted: Sequence[int], drafts: Sequence[int] = ()) -> Followed:
    matchers = entered(compiler, of)
    matchers.masks(1, drafts)
    return matchers.follow(1, emitted)


ENDS: dict[str, tuple[Constraint, list[int], Followed]] = {
    "goes on": (GRAMMARS["anything"], [0, 1, 5], Followed(3)),
    "met in the middle": (GRAMMARS["choice"], [0, 1, 2, END, 0], Followed(3, RankEnd.CONSTRAINT)),
    "met at once": (constraint("regex", "a"), [0, 1], Followed(1, RankEnd.CONSTRAINT)),
    "met at the last": (constraint("regex", "abc"), [0, 5], Followed(2, RankEnd.CONSTRAINT)),
    "an end in the middle": (GRAMMARS["regex"], [7, END, 7], Followed(2, RankEnd.CONSTRAINT)),
    "nothing but the end": (constraint("regex", ""), [END], Followed(1, RankEnd.CONSTRAINT)),
}


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
@pytest.mark.parametrize(("of", "emitted", "expected"), ENDS.values(), ids=ENDS)
def test_a_run_is_cut_behind_the_token_that_ends_it(
    compiler: Compiler, of: Constraint, emitted: list[int], expected: Followed, num_drafts: int
) -> None:
    """Whether all of it was drafted, a part, or something else."""
    assert run(compiler, of, emitted, emitted[:num_drafts]) == expected
    assert run(compiler, of, emitted, [emitted[0], 4, 4]) == expected


def test_a_token_that_was_not_to_stand_breaks_the_sequence(compiler: Compiler) -> None:
    followed = run(compiler, GRAMMARS["choice"], [0, 3, 1])
    assert (followed.count, followed.end) == (2, RankEnd.BROKEN)
    assert followed.problem


def test_forbidden_drafts_end_the_walk_and_change_nothing(compiler: Compiler) -> None:
    matchers = entered(compiler, GRAMMARS["choice"])
    assert [ids(mask) for mask in matchers.masks(1, [0, 3, 1])] == [{0, 6, 7, 1}, {END, 1, 5}]
    assert matchers.reach(1, [0, 3, 1]) == 1
    assert matchers.reach(1, [3]) == 0
    assert matchers.follow(1, [0, 5]) == Followed(2, RankEnd.CONSTRAINT)


def test_sequences_come_and_go_by_slot(compiler: Compiler) -> None:
    matchers = Matchers(compiler)
    matchers.enter([sequence(1, GRAMMARS["choice"]), sequence(2, None), sequence(3, constraint("regex", "("))])
    assert [matchers.constrains([slot]) for slot in (1, 2, 3, 4)] == [True, False, True, False]
    assert matchers.masks(2, [1]) == [] == matchers.masks(3, [])
    assert (matchers.follow(2, [1, 2, 3]), matchers.reach(2, [1, 2])) == (Followed(3), 2)
    broken = matchers.follow(3, [1, 2])
    assert (broken.count, broken.end) == (1, RankEnd.BROKEN)
    assert "unclosed group" in broken.problem
    matchers.follow(1, [0])
    matchers.enter([sequence(1, GRAMMARS["choice"]), sequence(3, None)])
    assert matchers.reach(1, [6]) == 1
    assert not matchers.constrains([3])
    matchers.leave([1, 2])
    assert not matchers.constrains([1, 2, 3])


class Fragile:
    """A matcher that breaks where `breaks` says so of its tokens; else as the real one."""

    def __init__(self, real: LLMatcher, breaks: Callable[[tuple[int, ...]], bool]) -> None:
        self.real, self.breaks, self.tokens = real, breaks, ()
        self.told = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def deep_copy(self) -> Fragile:
        return Fragile(self.real.deep_copy(), self.breaks)

    def consume_token(self, token: int) -> bool:
        self.tokens = (*self.tokens, token)
        return not self.told and self.real.consume_token(token)

    def rollback(self, count: int) -> bool:
        self.tokens = self.tokens[:-count]
        return not self.told and self.real.rollback(count)

    def compute_bitmask(self) -> bytes:
        if self.breaks(self.tokens):
            self.told = "lexer error: too many states\n<non-verbose/>"
        return self.real.compute_bitmask()

    def is_error(self) -> bool:
        return bool(self.told) or self.real.is_error()

    def get_error(self) -> str:
        return self.told or self.real.get_error()


def breaking(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, of: Constraint, breaks: Callable[[tuple[int, ...]], bool]
) -> Matchers:
    real = compiler.matcher
    monkeypatch.setattr(compiler, "matcher", lambda of: Fragile(real(of), breaks))
    return entered(compiler, of)


def test_a_matcher_that_others_broke_is_replaced_at_its_place(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of one constraint share a lexer, and its end."""
    of, shared = GRAMMARS["regex"], {"broken": False}
    matchers = entered(compiler, of, [7] * (2 * REFUEL_EVERY + 3))
    path = matchers._by_slot[1]
    path._matcher = Fragile(path._matcher, lambda tokens: shared["broken"])
    expected = [ids(mask) for mask in entered(compiler, of, [7]).masks(1, [7, 3, 3])]
    shared["broken"] = True
    assert [ids(mask) for mask in matchers.masks(1, [7, 3, 3])] == expected
    assert not isinstance(path._matcher, Fragile)
    assert matchers.follow(1, [7, 0]) == Followed(2)


def test_a_lexer_that_has_all_its_states_is_replaced_for_all_who_share_it(
    tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With states for a part of what two sequences come to, both go on as with states for all of it."""
    of = constraint("regex", "[ab]*a[ab]{9}c")
    plain = compiler_of(tmp_path, ["a", "b", "c"])
    with monkeypatch.context() as patched:
        patched.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=450, verbose_errors=False))
        tight = compiler_of(tmp_path, ["a", "b", "c"])
        first = tight.matcher(of)
        rng = random.Random(0)
        paths = [(Path(tight, of), Path(plain, of)) for _ in range(2)]
        for _ in range(60):
            for path, expected in paths:
                drafts = [rng.randrange(2) for _ in range(3)]
                assert [ids(place.mask) for place in path.along(drafts)] == [
                    ids(place.mask) for place in expected.along(drafts)
                ]
                kept = drafts[: rng.randrange(4)]
                if kept:
                    path.commit(kept)
                    expected.commit(kept)
    first.compute_bitmask()
    assert first.is_error(), "inconclusive: there were states for all of it"


def test_a_broken_prototype_is_compiled_anew(compiler: Compiler) -> None:
    of = constraint("regex", "a{3}b?")
    compiler.matcher(of)
    compiler._ready[of] = Fragile(compiler._ready[of], lambda tokens: True)
    assert ids(mask_of(compiler.matcher(of), V)) == {0}
    assert not isinstance(compiler._ready[of], Fragile)


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 4])
def test_a_sequence_breaks_at_the_same_token_whatever_is_drafted(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """The mask behind three tokens cannot be told: the token that is drawn without it is the last."""
    matchers = breaking(compiler, monkeypatch, GRAMMARS["anything"], lambda tokens: len(tokens) == 3)
    out: list[int] = []
    end = RankEnd.NONE
    while end is RankEnd.NONE:
        drafts = [0, 1, 2, 3][:num_drafts]
        masks = matchers.masks(1, drafts)
        assert [mask is None for mask in masks] == [len(out) + j == 3 for j in range(len(masks))]
        followed = matchers.follow(1, [*drafts[: len(masks) - 1], 4])
        out += [*drafts[: len(masks) - 1], 4][: followed.count]
        end = followed.end
    assert (len(out), end) == (4, RankEnd.BROKEN)
    assert followed.problem == "the constraint became too costly to follow: lexer error: too many states"


def test_a_place_that_breaks_on_a_way_not_taken_breaks_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers = breaking(compiler, monkeypatch, GRAMMARS["anything"], lambda tokens: tokens[-2:] == (0, 1))
    for drafts, emitted in (([0, 1, 2], [0, 2]), ([3, 0, 1], [3]), ([0, 1], [4, 4]), ([2, 2], [2, 2, 2])):
        masks = matchers.masks(1, drafts)
        assert masks[0] is not None
        assert matchers.follow(1, emitted) == Followed(len(emitted))


def test_an_output_that_comes_to_a_dead_end_breaks_with_the_reason(tmp_path: File) -> None:
    """No token writes what must come next."""
    compiler = compiler_of(tmp_path, ["a", "b"])
    matchers = entered(compiler, constraint("regex", "a(b|ax)"))
    assert [None if mask is None else ids(mask) for mask in matchers.masks(1, [0, 0])] == [{0}, {0, 1}, None]
    assert matchers.follow(1, [0]) == Followed(1)
    assert matchers.follow(1, [0, 1]) == Followed(
        2, RankEnd.BROKEN, "the output came to where the constraint lets nothing follow and is not met either"
    )
    other = entered(compiler, constraint("regex", "a(b|ax)"))
    other.masks(1, [0, 0, 1])
    assert other.follow(1, [0, 1]) == Followed(2, RankEnd.CONSTRAINT)


def test_places_know_their_tokens() -> None:
    import numpy as np

    bits = np.array([1, 0, 0, 1, 0, 0, 0, 0, 0, 1], np.uint8)
    place = Place(mask=np.packbits(bits, bitorder="little"))
    assert [place.allows(token) for token in range(10)] == bits.astype(bool).tolist()
    assert not Place(mask=None).allows(3)
