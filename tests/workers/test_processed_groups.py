"""Constraints and shaping where several ranks share the sequences: one of them decides, and all emit the same."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from constraints.tiny_tokenizers import write_tokenizer
from oracles import tiny
from oracles.days import by_day
from oracles.driver import Live
from oracles.group import GroupOfWorkers
from oracles.group_driver import GroupDriver

from parallel.mesh import ONE_RANK, Mesh
from workers.demands import Constraint, Shaping
from workers.plan import RankEnd

WORDS = [*"abcdefghijklmnopqrstuvwxyz", "ab", "abc", "th", "the", "in", "ing"]
PATTERN = "([a-m]{2,4}x){1,2}(the|abc)"
FIELDS: dict[str, Any] = {
    "temperature": 0.9,
    "constraint": Constraint(kind="regex", text=PATTERN),
    "shaping": Shaping(repetition=1.2, frequency=0.5, bias=((0, 1.0),), bad_words=((0, 1), (2, 2))),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model has many more rows than the tokenizer tokens."""
    path = tmp_path_factory.mktemp("group") / "base"
    tiny.write(path, "base", agree=0.7)
    write_tokenizer(path, WORDS)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": len(WORDS)}))
    return path


@contextmanager
def loaded(checkpoint: Path, mesh: Mesh) -> Iterator[GroupOfWorkers]:
    group = GroupOfWorkers.load(mesh, checkpoint, numerics="reference", page_size=4, max_model_len=64, hidden_window=5)
    try:
        yield group
    finally:
        group.close()


def outputs(group: GroupOfWorkers, gamma: int) -> list[Live]:
    driver, rng = GroupDriver(group, seed=1), random.Random(3)
    lives = []
    for i in range(4):
        prompt = [rng.randrange(1, 250) for _ in range(3 + i)]
        part = driver.drivers[i % len(driver.drivers)]
        lives.append(part.add(prompt, 16, seed=70 + i, **FIELDS if i != 3 else {}))
    driver.run(gamma)
    return lives


MESHES = {"tp2": Mesh(tp=2), "dp2": Mesh(dp=2), "tp2_ep2": Mesh(tp=2, ep=2)}


@pytest.mark.parametrize("mesh", by_day(MESHES))
def test_ranks_that_share_sequences_emit_what_one_rank_does(checkpoint: Path, mesh: Mesh) -> None:
    with loaded(checkpoint, ONE_RANK) as alone:
        plain = outputs(alone, 0)
    assert [live.end for live in plain] == [RankEnd.CONSTRAINT] * 3 + [RankEnd.NONE]
    for live in plain[:3]:
        ends = alone.workers[0].rank.description.eos_token_ids
        text = "".join(WORDS[token] for token in live.out if token not in ends)
        assert re.fullmatch(PATTERN, text), text
        assert not set(live.out[:-1]) & set(ends)
    with loaded(checkpoint, mesh) as group:
        drafted = outputs(group, 3)
        assert [(live.out, live.end) for live in drafted] == [(live.out, live.end) for live in plain]
        assert sum(accepted for live in drafted[:3] for _, accepted in live.results) > 0
        for worker in group.workers:
            assert (worker.rank.processing is not None) == worker.rank.groups.tp.leads
