"""A drafter whose head gives the target's own logits: whatever requests have done to them, no draft of its falls.

Outputs show nothing of what drafts are drawn from; acceptance does. A draft law that misses a token of the history, a
position or a cut is not the target's, and drafts fall.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.driver import Driver, Live
from oracles.make_tiny_models import write_checkpoint
from oracles.ranks import load_worker
from safetensors.torch import load_file, save_file

from workers.demands import Shaping
from workers.step import Worker

VOCAB_SIZE, LIMIT, END = 48, 16, 5
PROMPTS = [[9, 30, 9, 41], [33, 2, 40, 11]]


@functools.cache
def worker() -> Worker:
    """Layers of target and module that add nothing a float32 holds, and a module that reads the token alone: both give
    the head the norm of the last token's embedding."""
    shape = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        write_checkpoint(path, shape, agree=1e-30)
        tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
        tensors["mtp.fc.weight"][:, tensors["mtp.fc.weight"].shape[0] :] = 0
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return load_worker(path, max_running=64, max_model_len=48, page_size=4)


VERIFICATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0},
    "standard": {"temperature": 1.0, "coupled": False},
}
PAIRS = tuple((a, b) for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if (a * 5 + b) % 3 == 0)
TRIPLES = tuple((a, (a * 7 + b) % VOCAB_SIZE, b) for a in range(VOCAB_SIZE) for b in range(0, VOCAB_SIZE, 2))
DEMANDS: dict[str, dict[str, Any]] = {
    "repetition": {"shaping": Shaping(repetition=1.6)},
    "frequency": {"shaping": Shaping(frequency=1.5)},
    "presence": {"shaping": Shaping(presence=1.9)},
    "wished for again": {"shaping": Shaping(repetition=0.8, frequency=-0.7)},
    "bias": {"shaping": Shaping(bias=((3, 2.5), (8, 3.0), (20, -100.0)))},
    "bad words": {"shaping": Shaping(bad_words=PAIRS + TRIPLES)},
    "min_tokens": {"shaping": Shaping(bias=((END, 4.0),), min_tokens=8), "stop_token_ids": (END,)},
    "typical_p": {"typical_p": 0.4},
    "all": {
        "shaping": Shaping(repetition=1.2, frequency=0.6, presence=0.4, bad_words=TRIPLES, bias=((8, 2.0),)),
        "typical_p": 0.7,
        "top_p": 0.95,
    },
}


CASES = list(itertools.product(DEMANDS, VERIFICATIONS))
Case = tuple[str, str]


def decode(gamma: int, cases: Iterable[Case], *, demanding: bool = True) -> dict[Case, list[Live]]:
    """Sequences of all cases in one batch, one for each prompt. All of their drafts stand."""
    driver = Driver(worker(), seed=3)
    lives = {
        (demand, verification): [
            driver.add(
                prompt, LIMIT, seed=20 + i, **(DEMANDS[demand] if demanding else {}), **VERIFICATIONS[verification]
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        for demand, verification in cases
    }
    while driver.unfinished:
        result = driver.step(gamma=gamma)
        assert result.num_accepted == result.num_admitted
        chances = torch.tensor([share for shares in result.acceptance for share in shares])
        torch.testing.assert_close(chances, torch.ones_like(chances), rtol=0, atol=1e-4)
    for live in list(driver.live):
        driver.remove(live)
    driver.step([])
    return lives


@functools.cache
def plain() -> dict[Case, list[list[int]]]:
    return {case: [live.out for live in lives] for case, lives in decode(0, CASES).items()}


def check(cases: Iterable[Case], gamma: int) -> None:
    for (demand, verification), lives in decode(gamma, cases).items():
        assert any(drafts == gamma for live in lives for drafts, _ in live.results)
        if verification != "standard":
            assert [live.out for live in lives] == plain()[demand, verification]


def test_something_is_done_to_each_law() -> None:
    for (demand, verification), lives in decode(0, CASES, demanding=False).items():
        if (demand, verification) != ("typical_p", "greedy"):
            assert [live.out for live in lives] != plain()[demand, verification], (demand, verification)


@pytest.mark.parametrize("demand", DEMANDS)
def test_every_draft_stands_where_all_ask_for_the_same(demand: str) -> None:
    check([(demand, verification) for verification in VERIFICATIONS], 4)


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_every_draft_stands_where_all_are_verified_alike(verification: str) -> None:
    check([(demand, verification) for demand in DEMANDS], 3)


def test_every_draft_stands_in_the_company_of_all_others() -> None:
    check(CASES, 1)
