"""Masks and shaping of a round's rows and of a drafter's: each row gets its own, padding none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from constraints.tiny_tokenizers import compiler_of, constraint
from sampling.tiny_rank import TinyRank, World, table
from torch import Tensor

from workers.constraints.compiler import Compiler
from workers.demands import Shaping
from workers.sampling.shaper import Rows

A, B, C, END, V = 0, 1, 2, 3, 4
EVERY = {A, B, C, END}
GRAMMAR = constraint("regex", "(ab|c)*")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return compiler_of(tmp_path_factory.mktemp("tokenizer"), ["a", "b", "c"])


@pytest.fixture
def rank(compiler: Compiler) -> TinyRank:
    """Three sequences: constrained, free, and one whose constraint cannot be followed."""
    rank = TinyRank(World(target=table(0, V), drafter=table(1, V), vocab_size=V), compiler, num_slots=4)
    rank.enter([1], constraint=GRAMMAR)
    rank.enter([2])
    rank.enter([3], constraint=constraint("regex", "("))
    return rank


def rows_of(counts: list[int], num_pad: int = 0) -> Rows:
    owners = [s for s, count in enumerate(counts) for _ in range(1 + count)]
    cells = [j for count in counts for j in range(1 + count)]
    return Rows(
        slots=list(range(1, 1 + len(counts))),
        slots_S=torch.arange(1, 1 + len(counts)),
        owners_R=torch.tensor([*owners, *[0] * num_pad]),
        index_R=torch.tensor([*[1 + cell for cell in cells], *[0] * num_pad]),
        first_S=torch.ones(len(counts), dtype=torch.int64),
        width=1 + max(counts),
        longest=2 + max(counts),
    )


def left(logits_RV: Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits_RV]


def window(
    rank: TinyRank, drafts: list[list[int]], counts: list[int], num_pad: int = 0
) -> tuple[list[set[int]], object]:
    rows = rows_of(counts, num_pad)
    for slot, own in enumerate(drafts, start=1):
        rank.write(slot, 0, own)
    raw_RV = torch.zeros(len(rows.owners_R), V)
    logits_RV, forbidden = rank.processing.of_window(raw_RV, rows, torch.tensor(drafts), torch.tensor(counts))
    assert not raw_RV.any(), "what the model gave was changed"
    return left(logits_RV), forbidden


def test_each_row_of_a_window_has_its_own_mask(rank: TinyRank) -> None:
    found, forbidden = window(rank, [[A, B, C], [B, B, B], [A, A, A]], [3, 3, 3], num_pad=2)
    assert found == [{A, C, END}, {B}, {A, C, END}, {A, C, END}, *[EVERY] * 8, *[EVERY] * 2]
    assert forbidden == (0, 0, 0)


def test_drafts_that_were_not_admitted_are_not_looked_at(rank: TinyRank) -> None:
    found, forbidden = window(rank, [[A, B, C], [B, B, B], [A, A, A]], [1, 0, 2], num_pad=3)
    assert found == [{A, C, END}, {B}, EVERY, *[EVERY] * 3, *[EVERY] * 3]
    assert forbidden == (0, 0, 0)


@pytest.mark.parametrize(
    ("drafts", "count", "expected"),
    [
        ([A, B, B], 3, 1),
        ([A, C, C], 3, 2),
        ([B, B, B], 3, 3),
        ([B, B, B], 1, 1),
        ([A, B, B], 2, 0),
        ([END, A, A], 3, 2),
    ],
)
def test_drafts_at_and_behind_one_that_is_forbidden_are_counted(
    rank: TinyRank, drafts: list[int], count: int, expected: int
) -> None:
    found, forbidden = window(rank, [drafts, [A] * 3, [A] * 3], [count, 1, 0])
    assert forbidden == (expected, 0, 0)
    reached = 1 + count - expected
    assert found[reached : 1 + count] == [EVERY] * expected, "no law is made of them, whatever stands there"
    assert found[0] == {A, C, END}


def test_a_drafters_rows_have_the_masks_behind_their_drafts(rank: TinyRank) -> None:
    for before, expected in (([], {A, C, END}), ([A], {B}), ([A, B], {A, C, END}), ([C, A], {B}), ([B], EVERY)):
        index_S = torch.full((3,), 1 + len(before))
        rows = replace(
            rows_of([0, 0, 0], num_pad=1),
            index_R=torch.tensor([*[1 + len(before)] * 3, 0]),
            first_S=index_S,
            longest=9,
        )
        before_SJ = torch.tensor([before] * 3, dtype=torch.int64)
        logits_RV = rank.processing.of_drafts(torch.zeros(4, V), rows, before_SJ)
        assert left(logits_RV) == [expected, EVERY, EVERY, EVERY]


def test_masks_meet_what_else_is_asked_for(compiler: Compiler) -> None:
    rank = TinyRank(World(target=table(0, V), drafter=table(1, V), vocab_size=V, stops=(END,)), compiler, num_slots=4)
    rank.enter([1], constraint=GRAMMAR, shaping=Shaping(min_tokens=2, banned=(C,), bad_words=((0, A),)))
    rank.enter([2], shaping=Shaping(min_tokens=1))
    rank.enter([3], constraint=constraint("regex", "c"), shaping=Shaping(banned=(C,)))
    found, _ = window(rank, [[A, B], [A, A], [A, A]], [2, 1, 0])
    # The prompt is one 0: behind it A would complete the bad word, and as nothing else is left, neither that nor
    # min_tokens counts. What is banned counts until the constraint lets nothing else stand.
    assert found == [{A, END}, {B}, {A, END}, {A, B, C}, EVERY, {C}]


def test_without_constraints_nothing_is_counted_and_nothing_read(rank: TinyRank) -> None:
    rank.enter([1, 3])

    class Unread:
        def tolist(self) -> list[int]:
            raise AssertionError("drafts were read")

    rows = rows_of([0, 0, 0])
    raw_RV = torch.ones(3, V)
    logits_RV, forbidden = rank.processing.of_window(raw_RV, rows, Unread(), Unread())  # type: ignore[arg-type]
    assert (logits_RV is raw_RV, forbidden) == (True, ())
    assert rank.processing.of_drafts(raw_RV, rows, Unread()) is raw_RV  # type: ignore[arg-type]


def test_who_leaves_takes_the_constraint_along(rank: TinyRank) -> None:
    rank.processing.leave([1, 3])
    assert not rank.processing.matchers.constrains([1, 2, 3])
