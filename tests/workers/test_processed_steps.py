"""Constraints and shaping on a real rank: outputs are the same whatever is drafted, and drafts are made under both."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from oracles.days import by_day, on_turn
from oracles.driver import Driver, Live
from oracles.ranks import load_worker
from tokenizers import Tokenizer

from configs.load import demo_checkpoint
from workers.constraints.compiler import UNTRIED
from workers.demands import Constraint, Shaping
from workers.draft.mtp import MtpProposer
from workers.plan import RankEnd
from workers.sampling.processing import Processing
from workers.step import Worker

END = 0
LIMIT = 36

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "bird"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "old": {"type": "boolean"},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
PHRASE = r"[A-Z][a-z]{1,7}( [a-z]{1,7}){2,4}\."
SUM = 'start: term ("+" term){1,3} "=" NUMBER\nterm: NUMBER | "(" NUMBER "-" NUMBER ")"\nNUMBER: /[1-9][0-9]?/'
NUMBER = "[1-9][0-9]?"
CHOICES = ["the end of it", "the end", "then", "a long way to go", "nothing"]


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_sum(text: str) -> bool:
    term = rf"({NUMBER}|\({NUMBER}-{NUMBER}\))"
    return re.fullmatch(rf"{term}(\+{term}){{1,3}}={NUMBER}", text) is not None


KINDS: dict[str, tuple[Constraint, Callable[[str], bool]]] = {
    "json_schema": (
        Constraint(kind="json_schema", text=json.dumps(SCHEMA | {"x-guidance": {"whitespace_pattern": " "}})),
        is_json,
    ),
    "regex": (Constraint(kind="regex", text=PHRASE), lambda text: re.fullmatch(PHRASE, text) is not None),
    "lark": (Constraint(kind="lark", text=SUM), is_sum),
    "choice": (Constraint(kind="choice", text=json.dumps(CHOICES)), CHOICES.__contains__),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0},
    "coupled, cut and penalised": {
        "temperature": 0.8,
        "top_p": 0.9,
        "shaping": Shaping(repetition=1.1, presence=0.5, min_tokens=4),
    },
}


@pytest.fixture(scope="module")
def worker() -> Worker:
    return load_worker(numerics="reference", max_running=8, max_model_len=160)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))


@functools.cache
def prompts() -> list[list[int]]:
    lines = (demo_checkpoint() / "heldout.jsonl").read_text().splitlines()
    return [tokenizer().encode(json.loads(line)["prompt"]).ids[-12:] for line in lines[:3]]


def decode(worker: Worker, gamma: int, limit: int = LIMIT, **fields: Any) -> list[Live]:
    """A sequence for each prompt, and one in their company that asks for nothing."""
    driver = Driver(worker, seed=3)
    lives = [
        driver.add(prompt, limit, seed=70 + i, stop_token_ids=(END,), **fields) for i, prompt in enumerate(prompts())
    ]
    company = driver.add(prompts()[0], 12)
    driver.run(gamma)
    for live in (*lives, company):
        driver.remove(live)
    driver.step([])
    assert worker.check_integrity() == []
    assert company.num_forbidden == 0
    return lives


@pytest.mark.parametrize("fields", by_day(MODES))
@pytest.mark.parametrize("kind", by_day(KINDS))
def test_outputs_meet_the_constraint_and_do_not_depend_on_drafts(
    worker: Worker, kind: tuple[Constraint, Callable[[str], bool]], fields: dict[str, Any]
) -> None:
    of, is_met = kind
    plain = decode(worker, 0, constraint=of, **fields)
    for live in plain:
        assert live.end is RankEnd.CONSTRAINT, live
        assert is_met(tokenizer().decode([token for token in live.out if token != END]))
    for gamma in (1, 3, 8):
        drafted = decode(worker, gamma, constraint=of, **fields)
        assert [(live.out, live.end) for live in drafted] == [(live.out, live.end) for live in plain]
        assert [live.num_forbidden for live in drafted] == [0] * len(drafted), "the drafter is masked, too"
        rounds = [outcome for live in drafted for outcome in live.results]
        assert sum(accepted for _, accepted in rounds) > 0


@on_turn(0, of=2)
def test_an_object_that_is_not_at_its_end_is_the_beginning_of_one(worker: Worker) -> None:
    """json_object bounds nothing: the limit comes first, for some."""
    outputs = [decode(worker, gamma, constraint=Constraint(kind="json_object"), temperature=1.0) for gamma in (0, 3)]
    assert [live.out for live in outputs[0]] == [live.out for live in outputs[1]]
    for live in outputs[0]:
        text = tokenizer().decode([token for token in live.out if token != END])
        assert text.startswith("{")
        if live.end is RankEnd.CONSTRAINT:
            assert isinstance(json.loads(text), dict)
        else:
            assert len(live.out) == LIMIT


@on_turn(1, of=2)
def test_a_drafter_without_the_constraint_drafts_what_falls(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """So acceptance is what the masks of drafts make it; the output does not depend on them."""
    of, _ = KINDS["json_schema"]

    def accepted(lives: list[Live]) -> float:
        rounds = [outcome for live in lives for outcome in live.results]
        return sum(count for _, count in rounds) / len(rounds)

    masked = decode(worker, 3, constraint=of)
    with monkeypatch.context() as patched:
        patched.setattr(Processing, "of_drafts", lambda self, logits_RV, rows, before_SJ: logits_RV)
        free = decode(worker, 3, constraint=of)
    assert [live.out for live in free] == [live.out for live in masked]
    assert sum(live.num_forbidden for live in free) > 0
    assert accepted(masked) > accepted(free)


def test_a_constraint_that_cannot_be_followed_ends_its_sequence_and_no_other(worker: Worker) -> None:
    alone = decode(worker, 0, constraint=KINDS["choice"][0])[1]
    driver = Driver(worker, seed=3)
    broken = driver.add(prompts()[0], LIMIT, constraint=Constraint(kind="regex", text="("))
    good = driver.add(prompts()[1], LIMIT, seed=71, constraint=KINDS["choice"][0], stop_token_ids=(END,))
    result = driver.step(gamma=3)
    assert broken.end is RankEnd.BROKEN
    assert len(broken.out) == 1
    assert result.problems == (UNTRIED,)
    driver.run(3)
    assert (good.out, good.end) == (alone.out, RankEnd.CONSTRAINT)
    for live in (broken, good):
        driver.remove(live)
    driver.step([])


def test_min_tokens_and_the_end_of_a_constraint(worker: Worker) -> None:
    """It keeps the end out while the grammar lets anything else follow, and gives way where it does not."""
    of = Constraint(kind="regex", text="[a-z]{2,60}")
    for live in decode(worker, 3, constraint=of, shaping=Shaping(min_tokens=9, bias=((END, 100.0),))):
        assert live.out.index(END) == 9
    short = Constraint(kind="choice", text='["cat"]')
    for live in decode(worker, 3, constraint=short, shaping=Shaping(min_tokens=9)):
        assert tokenizer().decode(live.out) == "cat"
        assert live.end is RankEnd.CONSTRAINT


def test_drawn_tokens_stand_in_a_grammar_under_standard_verification(worker: Worker) -> None:
    of, is_met = KINDS["regex"]
    for live in decode(worker, 3, constraint=of, temperature=1.0, coupled=False):
        assert live.end is RankEnd.CONSTRAINT
        assert live.num_forbidden == 0
        assert is_met(tokenizer().decode([token for token in live.out if token != END]))


SHAPINGS: dict[str, dict[str, Any]] = {
    "penalties": {"shaping": Shaping(repetition=1.3, frequency=0.8, presence=0.5)},
    "penalties, drawn": {"temperature": 1.0, "shaping": Shaping(repetition=0.8, frequency=1.5), "typical_p": 0.9},
    "bans": {"temperature": 0.7, "shaping": Shaping(allowed=tuple(range(0, 4096, 3)), banned=(3, 6), min_tokens=20)},
    "bias": {"temperature": 0.9, "top_p": 0.8, "shaping": Shaping(bias=((12, 4.0), (END, 2.0)), min_tokens=8)},
}


@pytest.mark.parametrize("fields", by_day(SHAPINGS))
def test_shaped_outputs_do_not_depend_on_drafts(worker: Worker, fields: dict[str, Any]) -> None:
    plain = [live.out for live in decode(worker, 0, 20, **fields)]
    unshaped = {name: value for name, value in fields.items() if name != "shaping"}
    assert plain != [live.out for live in decode(worker, 0, 20, **unshaped)], "inconclusive: the shaping does nothing"
    for gamma in (3, 8):
        drafted = decode(worker, gamma, 20, **fields)
        assert [live.out for live in drafted] == plain
        assert sum(accepted for live in drafted for _, accepted in live.results) > 0


def test_drafts_have_the_drafts_before_them_in_their_history(worker: Worker) -> None:
    """Of pairs that were drafted before, none is drafted again where they are bad words."""

    def drafted_pairs(**fields: Any) -> set[tuple[int, int]]:
        driver = Driver(worker, seed=3)
        lives = [driver.add(prompt, 16, **fields) for prompt in prompts()]
        pairs = set()
        while driver.unfinished:
            for drafts in driver.step(gamma=4).drafted:
                pairs |= set(pairwise(drafts))
        for live in lives:
            driver.remove(live)
        driver.step([])
        return pairs

    bad = tuple(sorted(drafted_pairs()))[:64]
    assert len(bad) > 20, "inconclusive: hardly anything was drafted"
    assert not drafted_pairs(shaping=Shaping(bad_words=bad)) & set(bad)


def test_who_leaves_takes_along_all_that_was_kept_for_it(worker: Worker) -> None:
    """In the step that frees its slot, whether or not anybody takes it."""
    processing, proposer = worker.rank.processing, worker.rank.proposer
    assert processing is not None
    assert isinstance(proposer, MtpProposer)
    assert proposer._lookups is not None
    fields: dict[str, Any] = {
        "constraint": KINDS["regex"][0],
        "shaping": Shaping(bias=((12, 4.0),), banned=(3, 6), bad_words=((5, 7), (5, 7, 9)), presence=0.5),
        "prediction": (5, 7, 9, 11),
        "looks_back": True,
    }
    driver = Driver(worker, seed=3)
    lives = [driver.add(prompt, LIMIT, seed=70 + i, **fields) for i, prompt in enumerate(prompts())]
    broken = driver.add(prompts()[0], LIMIT, constraint=Constraint(kind="regex", text="("))
    shaper, matchers, lookups = processing._shaper, processing.matchers, proposer._lookups
    kept: list[dict[int, Any]] = [shaper._shapings, shaper._biases, shaper._bans, shaper._words]
    kept += [matchers._by_slot, lookups._by_slot]
    driver.step(gamma=3)
    slots = {live.slot for live in lives}
    assert [set(one) for one in kept] == [slots] * len(kept)
    assert set(matchers._problems) == {broken.slot}
    for live in (lives[0], broken):
        driver.remove(live)
    driver.step(lives[1:], gamma=3)
    assert [set(one) for one in kept] == [slots - {lives[0].slot}] * len(kept)
    assert not matchers._problems
    for live in lives[1:]:
        driver.remove(live)
    driver.step([])
    assert not any(kept)
    assert shaper._last is None
