"""`outrider bench` with predictions and constraints, as its users meet it: what is asked for, and the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.bench_process import ITSELF, LIMIT_S, TINY, bench, start
from oracles.days import on_turn

from runtime.bench.asked import Asked
from runtime.bench.document import Group, Report
from runtime.bench.load import Closed
from runtime.cli import bench as bench_module


@pytest.mark.parametrize(
    ("arguments", "variants", "max_tokens", "edit_every"),
    [
        ((), [None], 48, None),
        (("--ngram",), ["with+ngram"], 48, None),
        (("--workload", "chat", "--variant", "with,with+ngram"), ["with", "with+ngram"], 48, None),
        (("--workload", "json-schema", "--variant", "without,with"), ["without", "with"], 128, None),
        (("--workload", "json-schema", "--ngram", "--max-tokens", "9"), ["with+ngram"], 9, None),
        (("--workload", "code-edit"), [None], 128, 16),
        (
            ("--workload", "code-edit", "--edit-every", "0", "--ngram", "--variant", "with+ngram,without,with"),
            ["with+ngram", "without+ngram"],
            128,
            0,
        ),
    ],
)
def test_each_load_is_asked_for_once_in_each_variant(arguments, variants, max_tokens, edit_every, monkeypatch):
    asked: list[Asked] = []

    async def noted(what, outputs, address) -> None:
        asked.append(what)

    monkeypatch.setattr(bench_module, "bench_run", noted)
    assert bench(*arguments, "--concurrency", "1,4", "--rate", "2").exit_code == 0
    [one] = asked
    found = [None if load.variant is None else str(load.variant) for load in one.loads]
    assert found == variants * 3
    assert [load.concurrency for load in one.loads if isinstance(load, Closed)] == [
        number for number in (1, 4) for _ in variants
    ]
    assert (one.max_tokens, one.edit_every, one.records) == (max_tokens, edit_every, edit_every is not None)


def side_by_side(tmp_path: Path, *arguments: str) -> tuple[Group, Group]:
    """The real model without and with what prompts bring."""
    cells = (*TINY, "--concurrency", "2", "--policy", "fixed:3", "--variant", "without,with", "--json", "own.json")
    process = start("bench", *arguments, *cells, cwd=tmp_path, program=ITSELF)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0, err
    assert "what requests bring" in out
    without, with_it = Report.model_validate_json((tmp_path / "own.json").read_text()).groups
    assert [group.load.variant for group in (without, with_it)] == ["without", "with"]
    assert without.figures.origins.prediction.drafted == 0
    assert without.figures.finishes == {"LENGTH": 2}
    return without, with_it


@on_turn(2, of=3)
def test_what_the_real_model_said_is_its_own_prediction(tmp_path):
    without, with_it = side_by_side(tmp_path, "--workload", "code-edit", "--edit-every", "0")
    assert with_it.figures.recording.identical == with_it.figures.recording.compared == 2
    origins = with_it.figures.origins
    assert (origins.drafter.drafted, origins.ngram.drafted) == (0, 0)
    assert origins.prediction.accepted == origins.prediction.admitted > 0
    assert with_it.figures.tokens_per_pass >= without.figures.tokens_per_pass


@on_turn(1, of=3)
def test_a_file_brings_the_real_model_conversations_constraints_and_predictions(tmp_path):
    schema = {"type": "object", "properties": {"a": {"enum": ["some", "none"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    line = {
        "messages": [{"role": "user", "content": "import os"}],
        "json_schema": schema,
        "prediction": '{"a":"none"}',
        "max_tokens": 40,
    }
    (tmp_path / "some.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    _, with_it = side_by_side(tmp_path, "--prompts", "some.jsonl")
    assert with_it.figures.finishes == {"CONSTRAINT": 2}
    assert with_it.figures.origins.prediction.drafted > 0
