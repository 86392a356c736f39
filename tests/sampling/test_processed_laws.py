"""The law of processed outputs is the same with drafts and without, exactly: each processor alone, and those that meet.

Four tokens, three words and an end. Fractions are equal, or they are not; and wrong ways to do it are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constraints.tiny_tokenizers import compiler_of, constraint
from oracles.days import by_day
from sampling.exact_laws import total_variation
from sampling.processed_laws import Laws, SharedNoise
from sampling.tiny_rank import TinyRank, World, table
from torch import Tensor

from workers.constraints.compiler import Compiler
from workers.demands import Shaping
from workers.sampling.shaper import Rows

A, B, C, END = range(4)
V, GAMMA, LENGTH = 4, 2, 4

PENALTIES = Shaping(repetition=1.5, frequency=0.75, presence=0.5)
WORDS = Shaping(bad_words=((A, B), (B, B), (C, A, A)))
SOON = Shaping(min_tokens=3)
GRAMMAR = constraint("regex", "(ab|c|ba?)+")

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.6},
    "repetition": {"shaping": Shaping(repetition=1.7)},
    "frequency": {"shaping": Shaping(frequency=1.1)},
    "presence": {"shaping": Shaping(presence=-0.9)},
    "logit_bias": {"shaping": Shaping(bias=((A, 1.5), (END, -2.0)))},
    "bad_words": {"shaping": WORDS},
    "banned": {"shaping": Shaping(banned=(B,))},
    "allowed": {"shaping": Shaping(allowed=(A, C, END))},
    "min_tokens": {"shaping": SOON},
    "regex": {"constraint": GRAMMAR},
    "choice": {"constraint": constraint("choice", ["a", "ab", "abc", "cab", "bcca"])},
    "lark": {"constraint": constraint("lark", 'start: x | y\nx: "a" "b" C\ny: "c" "b" A\nA: "a"+\nC: "c"+')},
    "grammar and penalties": {"constraint": GRAMMAR, "shaping": PENALTIES},
    "min_tokens and a likely end": {"shaping": Shaping(min_tokens=2, bias=((END, 3.0),))},
    "logit_bias and top_p": {"shaping": Shaping(bias=((A, 1.0), (B, -1.0))), "top_p": 0.8},
    "min_p and temperature": {"min_p": 0.4, "temperature": 1.7},
    "typical_p and top_k": {"typical_p": 0.7, "top_k": 3},
    "bad_words and penalties": {"shaping": replace(WORDS, frequency=1.5, repetition=0.8)},
    "allowed and grammar": {"constraint": GRAMMAR, "shaping": Shaping(allowed=(A, B))},
    "allowed against grammar": {"constraint": constraint("regex", "(ac|b)*"), "shaping": Shaping(allowed=(A, B, END))},
    "min_tokens and grammar": {"constraint": constraint("regex", "(ab?){1,2}|c*"), "shaping": SOON},
    "bad_words and grammar": {"constraint": constraint("regex", "(abb|c)*"), "shaping": WORDS},
    "everything": {
        "temperature": 1.3,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 0.9,
        "constraint": GRAMMAR,
        "shaping": replace(PENALTIES, bias=((C, 0.5),), bad_words=((A, B),), min_tokens=2, banned=(B,)),
    },
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return compiler_of(tmp_path_factory.mktemp("tokenizer"), ["a", "b", "c"])


def world(seed: int, fields: dict[str, Any]) -> World:
    return World(
        target=table(seed, V, memory=1),
        drafter=table(seed + 1, V, memory=1),
        vocab_size=V,
        prompt=(C, A),
        stops=(END,),
        fields=fields,
    )


@pytest.mark.parametrize("fields", by_day(CASES, 4))
def test_the_law_of_outputs_is_the_same_with_drafts(compiler: Compiler, fields: dict[str, Any]) -> None:
    found = Laws(TinyRank(world(11, fields), compiler, num_slots=V**GAMMA), LENGTH)
    plain = found.output(0)
    assert found.output(GAMMA) == plain
    assert len(plain) > 3, "inconclusive: hardly anything to draw"
    assert 0 < found.num_accepted < found.num_verdicts


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", [21, 31])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_the_law_is_the_same_for_other_models_and_draft_lengths(
    compiler: Compiler, fields: dict[str, Any], seed: int, gamma: int
) -> None:
    found = Laws(TinyRank(world(seed, fields), compiler, num_slots=V**3), LENGTH)
    assert found.output(gamma) == found.output(0)


SCHEDULES: list[Callable[[int], int]] = [lambda _: 1, lambda _: 3, lambda index: (2, 0, 3, 1)[index % 4]]


@pytest.mark.parametrize("fields", by_day(CASES, 5))
def test_with_shared_noise_the_outputs_themselves_are_the_same(compiler: Compiler, fields: dict[str, Any]) -> None:
    rank = TinyRank(world(11, fields), compiler, num_slots=48, max_length=32)
    shared = SharedNoise(rank, 7, 48, V)
    plain = shared.outputs(lambda _: 0)
    assert len(set(plain)) > 3, "inconclusive: hardly anything to draw"
    for gamma_of_round in SCHEDULES:
        assert shared.outputs(gamma_of_round) == plain
        assert shared.num_accepted > 0


@pytest.mark.parametrize("fields", by_day(CASES, 5))
def test_greedy_outputs_are_the_same(compiler: Compiler, fields: dict[str, Any]) -> None:
    """A slot each for many models; noise moves no point mass."""
    outputs = []
    for gamma in (0, 1, 3):
        found = []
        for seed in range(6):
            rank = TinyRank(world(seed, {**fields, "temperature": 0.0}), compiler, num_slots=1, max_length=32)
            found += SharedNoise(rank, 8, 1, V).outputs(lambda _, gamma=gamma: gamma)  # type: ignore[misc]
        outputs.append(found)
    assert outputs[1] == outputs[0] == outputs[2]


def ignore_drafts(rows: Rows) -> Rows:
    """Every row of a window has the history of its first."""
    return replace(rows, index_R=rows.first_S[rows.owners_R])


def end_of_window(rows: Rows) -> Rows:
    """Every row of a window has the history of its last."""
    last_S = rows.first_S + rows.width - 1
    return replace(rows, index_R=last_S[rows.owners_R])


def forget_output(rows: Rows) -> Rows:
    """No row has a history."""
    return replace(rows, index_R=torch.zeros_like(rows.index_R), first_S=torch.zeros_like(rows.first_S))


def only_last(masks: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(slot: int, drafts: Sequence[int]) -> list[Any]:
        found = masks(slot, drafts)
        return [*[None] * len(drafts), found[-1] if len(found) == 1 + len(drafts) else None] if drafts else found

    return wrong


def only_first(masks: Callable[..., Any]) -> Callable[..., Any]:
    return lambda slot, drafts: [masks(slot, [])[0]] * (1 + len(drafts)) if masks(slot, []) else []


def warmer(law_RV: Tensor) -> Tensor:
    return law_RV.sqrt()


WRONG: dict[str, tuple[dict[str, Any], str, Callable[..., Any]]] = {
    "penalties without drafts": (CASES["frequency"], "distort", ignore_drafts),
    "penalties of the whole window": (CASES["repetition"], "distort", end_of_window),
    "penalties of nothing": (CASES["presence"], "distort", forget_output),
    "bad words without drafts": (CASES["bad_words"], "distort", ignore_drafts),
    "min_tokens from the round's start": (CASES["min_tokens and a likely end"], "distort", ignore_drafts),
    "min_tokens of the whole window": (CASES["min_tokens and a likely end"], "distort", end_of_window),
    "a mask at the last position alone": (CASES["regex"], "masks", only_last),
    "the first position's mask everywhere": (CASES["regex"], "masks", only_first),
    "drafts of another law than told": (CASES["top_k"], "claim", warmer),
    "drafts of another law than told, processed": (CASES["grammar and penalties"], "claim", warmer),
}


@pytest.mark.parametrize(("fields", "what", "wrong"), WRONG.values(), ids=WRONG)
def test_wrong_ways_are_told(
    compiler: Compiler, fields: dict[str, Any], what: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Laws(TinyRank(world(11, fields), compiler, num_slots=V**GAMMA), 3)
    plain = found.output(0)
    if what == "masks":
        # Drafts are masked as they should be, the rows that verify them are not.
        matchers, right = found.rank.processing.matchers, found.rank.window_laws

        def window_laws(*args: Any, **kwargs: Any) -> Tensor:
            with monkeypatch.context() as patched:
                patched.setattr(matchers, "masks", wrong(matchers.masks))
                return right(*args, **kwargs)

        monkeypatch.setattr(found.rank, "window_laws", window_laws)
    else:
        setattr(found.rank, what, wrong)
    assert total_variation(found.output(GAMMA), plain) > 0


def test_the_plain_law_is_what_the_words_say(compiler: Compiler, tmp_path: Path) -> None:
    """By hand: two tokens that weigh the same, an end that must wait, a grammar that lets `c` follow `a` alone."""
    flat = World(
        target=lambda tokens: [0.0] * V,
        drafter=lambda tokens: [0.0, 1.0, 0.0, 0.0],
        vocab_size=V,
        stops=(END,),
        fields={"constraint": constraint("regex", "(ac|b)*"), "shaping": Shaping(min_tokens=1)},
    )
    law = Laws(TinyRank(flat, compiler, num_slots=16), 2).output(2)
    third, half = law[(B, B), ""], law[(A, C), ""]
    assert (half.limit_denominator(100), third.limit_denominator(100)) == (half, third)
    assert {outcome: float(mass) for outcome, mass in law.items()} == pytest.approx(
        {((A, C), ""): 1 / 2, ((B, A), ""): 1 / 6, ((B, B), ""): 1 / 6, ((B, END), "stop"): 1 / 6}
    )
