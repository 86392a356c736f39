"""Requests with all fields: factors with their levels, rows that cover every pair of levels, what a reply must obey.

A level is a change made to a message. Pure; knows no server.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jsonschema

from outrider.v1 import inference_pb2, types_pb2

Request = inference_pb2.GenerateRequest
Change = Callable[[Request], None]
Row = Mapping[str, str]

TOKENS = 18
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
REGEX = r"(?:[a-z]{1,6} = \d{1,4}\n){1,8}"
LARK = 'start: "def " NAME "(" [NAME ("," NAME)*] "):" BODY\nNAME: /[a-z_]{1,8}/\nBODY: /( pass|\\n    return [a-z]+)/'
CHOICES = ("import os", "import os\nimport sys", "from typing import Any", "x = 1")


def _nothing(request: Request) -> None:
    pass


def _sampling(**fields: object) -> Change:
    return lambda request: request.sampling.MergeFrom(types_pb2.Sampling(**fields))  # type: ignore[arg-type]


def _stopping(**fields: object) -> Change:
    return lambda request: request.stopping.MergeFrom(types_pb2.Stopping(**fields))  # type: ignore[arg-type]


def _constraint(**kind: object) -> Change:
    return lambda request: request.MergeFrom(
        Request(constraint=types_pb2.Constraint(**kind))  # type: ignore[arg-type]
    )


def _request(**fields: object) -> Change:
    return lambda request: request.MergeFrom(Request(**fields))  # type: ignore[arg-type]


FACTORS: dict[str, dict[str, Change]] = {
    "temperature": {
        "greedy": _sampling(temperature=0.0, seed=5),
        "seeded": _sampling(temperature=0.8, seed=2**63 + 11),
        "hot": _sampling(temperature=1.6, seed=12),
    },
    "top_k": {"off": _nothing, "on": _sampling(top_k=7)},
    "top_p": {"off": _nothing, "on": _sampling(top_p=0.85)},
    "min_p": {"off": _nothing, "on": _sampling(min_p=0.05)},
    "typical_p": {"off": _nothing, "on": _sampling(typical_p=0.8)},
    "repetition": {"off": _nothing, "up": _sampling(repetition_penalty=1.3), "down": _sampling(repetition_penalty=0.8)},
    "frequency": {"off": _nothing, "up": _sampling(frequency_penalty=0.7), "down": _sampling(frequency_penalty=-0.4)},
    "presence": {"off": _nothing, "on": _sampling(presence_penalty=1.1)},
    "bias": {"off": _nothing, "on": _sampling(logit_bias={65: 2.5, 300: 4.0, 301: -100.0, 500: 1.25})},
    "ids": {
        "all": _nothing,
        "banned": _sampling(banned_token_ids=range(200, 700)),
        "allowed": _sampling(allowed_token_ids=range(20, 900)),
    },
    "bad_words": {"off": _nothing, "on": _sampling(bad_words=["self", "return", "import os", "def f"])},
    "min_tokens": {"off": _nothing, "on": _stopping(min_tokens=9)},
    "end": {
        "eos": _nothing,
        "ignored": _stopping(ignore_eos=True),
        "tokens": _stopping(stop_token_ids=[198, 10, 261, 262]),
        "string": _stopping(stop=["\n", "    r", "(s"]),
        "with": _stopping(stop=["e", "turn"], include_stop=True),
    },
    "constraint": {
        "none": _nothing,
        "schema": _constraint(json_schema=json.dumps(SCHEMA)),
        "object": _constraint(json_object=True),
        "regex": _constraint(regex=REGEX),
        "lark": _constraint(lark=LARK),
        "choice": _constraint(choice=types_pb2.Choices(texts=CHOICES)),
    },
    "n": {"one": _nothing, "three": _request(n=3)},
    "logprobs": {"off": _nothing, "alone": _request(logprobs=0), "top": _request(logprobs=4)},
    "prompt_logprobs": {"off": _nothing, "top": _request(prompt_logprobs=2)},
    "text": {
        "plain": _nothing,
        "echo": _request(echo=True, report_offsets=True),
        "offsets": _request(report_offsets=True),
    },
    "lookup": {"off": _nothing, "ngram": _request(ngram=True)},
    "limit": {"policy": _nothing, "one": _request(max_drafts=1), "none": _request(max_drafts=0)},
}


def build(row: Row, prompt: str) -> Request:
    request = Request(text=prompt, stopping=types_pb2.Stopping(max_tokens=TOKENS))
    for factor, level in row.items():
        FACTORS[factor][level](request)
    return request


def each_alone() -> Iterator[Row]:
    """Every level of every factor beside the first of all others, greedy and seeded."""
    first = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}
    for factor, levels in FACTORS.items():
        for level in levels:
            for temperature in ("greedy", "seeded") if factor != "temperature" else (level,):
                yield {**first, "temperature": temperature, factor: level}


def covering(seed: int) -> list[Row]:
    """Rows in which every pair of levels of two factors occurs; others for another seed."""
    rng = random.Random(seed)
    names = list(FACTORS)
    open_pairs = {
        (one, a, other, b)
        for one, other in itertools.combinations(names, 2)
        for a in FACTORS[one]
        for b in FACTORS[other]
    }
    rows: list[Row] = []
    while open_pairs:
        best = max((_grown(rng, names, open_pairs) for _ in range(12)), key=lambda row: len(_pairs(row) & open_pairs))
        open_pairs -= _pairs(best)
        rows.append(best)
    return rows


def _grown(rng: random.Random, names: list[str], open_pairs: set[tuple[str, str, str, str]]) -> dict[str, str]:
    """A row that starts from an open pair; each further level closes the most."""
    one, a, other, b = rng.choice(sorted(open_pairs))
    row = {one: a, other: b}
    for name in rng.sample(names, len(names)):
        if name not in row:
            row[name] = max(
                rng.sample(list(FACTORS[name]), len(FACTORS[name])),
                key=lambda level: len(_pairs({**row, name: level}) & open_pairs),
            )
    return {name: row[name] for name in names}


def _pairs(row: Row) -> set[tuple[str, str, str, str]]:
    order = {name: i for i, name in enumerate(FACTORS)}
    named = sorted(row.items(), key=lambda item: order[item[0]])
    return {(one, a, other, b) for (one, a), (other, b) in itertools.combinations(named, 2)}


@dataclass(frozen=True, slots=True)
class Sequence:
    """What came of one sequence, as far as it must not depend on speculation."""

    text: str
    ids: tuple[int, ...]
    reason: int
    matched: str
    seed: int
    logprobs: tuple[object, ...]
    prompt_logprobs: tuple[object, ...]
    offsets: tuple[int, ...]


def sequences_of(frames: list[inference_pb2.GenerateResponse]) -> tuple[Sequence, ...]:
    """The frames of one call, put together by index. Asserts what every call must obey."""
    by_index: dict[int, list[inference_pb2.GenerateResponse]] = {}
    for frame in frames:
        mine = by_index.setdefault(frame.index, [])
        assert not mine or not mine[-1].HasField("finish"), "a frame behind the last one"
        mine.append(frame)
    assert sorted(by_index) == list(range(len(by_index)))
    found = []
    for index in sorted(by_index):
        mine = by_index[index]
        finish = mine[-1].finish
        assert mine[-1].HasField("finish")
        found.append(
            Sequence(
                text="".join(frame.text for frame in mine),
                ids=tuple(token for frame in mine for token in frame.token_ids),
                reason=finish.reason,
                matched=f"{finish.WhichOneof('matched')} {finish.stop} {finish.stop_token_id}",
                seed=mine[-1].usage.seed,
                logprobs=tuple(_told(one) for frame in mine for one in frame.logprobs),
                prompt_logprobs=tuple(_told(one) for frame in mine for one in frame.prompt_logprobs),
                offsets=tuple(offset for frame in mine for offset in frame.offsets),
            )
        )
    if len(by_index) > 1:
        assert [frame.HasField("total") for frame in frames] == [False] * (len(frames) - 1) + [True]
        total, usages = frames[-1].total, [mine[-1].usage for mine in by_index.values()]
        assert total.completion_tokens == sum(usage.completion_tokens for usage in usages)
        assert total.prompt_tokens == usages[0].prompt_tokens
    return tuple(found)


def check_usage(usage: types_pb2.Usage) -> None:
    """Every sub-count is at most its total."""
    assert usage.completion_tokens == usage.accepted + usage.rounds - usage.trimmed
    assert usage.accepted <= usage.admitted <= usage.drafted
    assert usage.forbidden <= usage.admitted - usage.accepted
    assert usage.cached_tokens <= usage.prompt_tokens
    for kind in ("predicted", "ngram"):
        drafted, admitted, accepted = (getattr(usage, f"{kind}_{what}") for what in ("drafted", "admitted", "accepted"))
        assert accepted <= admitted <= drafted
        assert drafted <= usage.drafted
        assert admitted <= usage.admitted
        assert accepted <= usage.accepted
    assert usage.predicted_drafted + usage.ngram_drafted <= usage.drafted


def check_reply(row: Row, prompt_ids: list[int], found: tuple[Sequence, ...]) -> None:
    """What a row's levels promise of each sequence."""
    assert len(found) == (3 if row["n"] == "three" else 1)
    assert len({one.seed for one in found}) == len(found)
    for index, one in enumerate(found):
        ids = one.ids
        if row["text"] == "echo":
            assert list(ids[: len(prompt_ids)]) == prompt_ids
            ids = ids[len(prompt_ids) :]
        assert 1 <= len(ids) <= TOKENS
        assert len(one.logprobs) == (0 if row["logprobs"] == "off" else len(ids))
        wants_prompt = row["prompt_logprobs"] == "top" and index == 0
        assert len(one.prompt_logprobs) == (len(prompt_ids) - 1 if wants_prompt else 0)
        assert len(one.offsets) == (0 if row["text"] == "plain" else len(one.ids))
        assert list(one.offsets) == sorted(one.offsets)
        if row["constraint"] == "none":
            if row["ids"] == "banned":
                assert not set(ids) & set(range(200, 700))
            if row["ids"] == "allowed":
                assert set(ids) <= set(range(20, 900))
            if row["min_tokens"] == "on":
                assert len(ids) >= 9
        elif one.reason in (types_pb2.FINISH_REASON_CONSTRAINT, types_pb2.FINISH_REASON_EOS) and row["text"] != "echo":
            check_constraint(row["constraint"], one.text)


def check_constraint(kind: str, text: str) -> None:
    match kind:
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert re.fullmatch(REGEX, text), text
        case "lark":
            assert re.fullmatch(
                r"def [a-z_]{1,8}\(([a-z_]{1,8}(,[a-z_]{1,8})*)?\):( pass|\n    return [a-z]+)", text
            ), text
        case "choice":
            assert text in CHOICES


def _told(one: types_pb2.TokenLogprob) -> object:
    return one.token_id, one.logprob, tuple((other.token_id, other.logprob) for other in one.top)
