"""Logits equal transformers' Qwen3NextForCausalLM, and the MTP head its oracle, however the tokens are fed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from oracles import tiny
from oracles.ranks import load_model
from tokenizers import Tokenizer
from torch import Tensor

from configs.load import demo_checkpoint
from workers.probe import trace_sequences

TOLERANCE = 1e-4
"""Largest difference over the largest magnitude, float32."""
LENGTH = 70
CHUNKS = (*range(1, 10), 16, 17, 33, 64, LENGTH)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module", params=["demo", *tiny.SHAPES])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensor, Tensor, Tensor]:
    """Checkpoint, token ids [T], transformers' logits [T, V], and the oracle's MTP logits [T − 1, V]."""
    if request.param == "demo":
        path = demo_checkpoint()
    else:
        path = tmp_path_factory.mktemp(request.param)
        tiny.write(path, request.param, seed=3)
    lm, mtp = tiny.reference(path)
    ids = torch.tensor(random.Random(1).choices(range(lm.config.vocab_size), k=LENGTH))
    with torch.no_grad():
        out = lm(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        mtp_logits, _ = mtp(ids[1:], out.hidden_states[-1][0, :-1])
    return path, ids, out.logits[0], mtp_logits


@pytest.mark.parametrize(
    ("chunk", "numerics"),
    [*((chunk, "default") for chunk in CHUNKS), (1, "reference"), (9, "reference"), (LENGTH, "reference")],
)
def test_logits_do_not_depend_on_how_a_prompt_is_cut(
    subject: tuple[Path, Tensor, Tensor, Tensor], chunk: int, numerics: str
) -> None:
    path, ids, logits, mtp_logits = subject
    model, ops = load_model(path, numerics)
    (trace,) = trace_sequences(model, ops, [ids.tolist()], lambda _: chunk)
    assert relative(trace.logits, logits) < TOLERANCE
    assert trace.drafter is not None
    padded = torch.nn.functional.pad(trace.drafter, (0, 0, 0, -len(trace.drafter) % ops.row_multiple))
    assert relative(model.logits(padded)[: len(trace.drafter)], mtp_logits) < TOLERANCE


def test_sequences_of_one_batch_do_not_touch_each_other(subject: tuple[Path, Tensor, Tensor, Tensor]) -> None:
    path, ids, logits, _ = subject
    model, ops = load_model(path)
    others = [random.Random(i).choices(range(model.config.vocab_size), k=20 + 13 * i) for i in range(3)]
    rng = random.Random(4)
    traces = trace_sequences(model, ops, [others[0], ids.tolist(), *others[1:]], lambda _: rng.randint(1, 25))
    assert relative(traces[1].logits, logits) < TOLERANCE


def test_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    tiny.write(tmp_path, "base", seed=3)
    lm, _ = tiny.reference(tmp_path)
    ids = torch.arange(40) % lm.config.vocab_size
    with torch.no_grad():
        logits = lm(input_ids=ids[None], use_cache=False).logits[0]
    tiny.shard(tmp_path, 3)
    model, ops = load_model(tmp_path)
    (trace,) = trace_sequences(model, ops, [ids.tolist()], lambda _: 11)
    assert relative(trace.logits, logits) < TOLERANCE


def test_bfloat16_stays_near_float32() -> None:
    text = "".join(
        json.loads(line)["prompt"] for line in (demo_checkpoint() / "heldout.jsonl").read_text().splitlines()[:4]
    )
    ids = Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json")).encode(text).ids[:120]
    exact, rounded = (
        trace_sequences(*load_model(demo_checkpoint(), dtype=dtype), [ids], lambda _: 7)[0].logits
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert float((rounded - exact).abs().mean() / exact.abs().mean()) < 0.03
    assert (rounded.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9
