"""Unseeded requests whose logits are shaped follow the law that the fields spell, one by one and in pairs of one batch:
a G-test over real gRPC.

The law is enumerated with transformers' model, and the fields are applied to its logits here once more, in float64 and
one stream at a time. Requests look for drafts in prompt and output too, so drafts of two kinds are verified.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flow.gtest import holm_rejects, pair_p_values, table_p_values
from flow.house import House
from numpy.typing import NDArray
from oracles import tiny
from oracles.days import on_turn

from configs.load import demo_checkpoint
from outrider.v1 import inference_pb2, types_pb2

PROMPT = "for i in range(i):\n    for j in range("
DEPTH, TOKENS, GAMMA = 4, 5, 3
REPETITION, FREQUENCY, PRESENCE, TEMPERATURE, TOP_K, TOP_P, MIN_P = 1.2, 0.5, 0.3, 1.1, 7, 0.95, 0.02
BIAS = {12: 1.5, 78: 1.0, 312: -3.0}
BANNED = (10, 13)


def shaped(logits_V: NDArray[np.float64], prompt: list[int], output: tuple[int, ...]) -> NDArray[np.float64]:
    """The law of the next token."""
    logits = logits_V.copy()
    for token in {*prompt, *output}:
        logits[token] = logits[token] / REPETITION if logits[token] > 0 else logits[token] * REPETITION
    for token in set(output):
        logits[token] -= FREQUENCY * output.count(token) + PRESENCE
    for token, bias in BIAS.items():
        logits[token] += bias
    logits[list(BANNED)] = -np.inf
    law = np.exp((logits - logits.max()) / TEMPERATURE)
    law /= law.sum()
    order = np.argsort(-law, kind="stable")
    law[order[TOP_K:]] = 0
    law /= law.sum()
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= TOP_P]] = 0
    law[law < MIN_P * law.max()] = 0
    shaped_law: NDArray[np.float64] = law / law.sum()
    return shaped_law


@pytest.fixture(scope="module")
def law(house: House) -> dict[tuple[int, ...], float]:
    lm, _ = tiny.reference(demo_checkpoint())
    prompt = list(house.run(house.deployment.tokenizer.encode(PROMPT)))
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        streams = list(found)
        with torch.no_grad():
            logits_SV = [
                lm(input_ids=torch.tensor([[*prompt, *stream] for stream in streams[start : start + 64]])).logits[:, -1]
                for start in range(0, len(streams), 64)
            ]
        longer = {}
        for stream, logits_V in zip(streams, torch.cat(logits_SV).double().numpy(), strict=True):
            law_V = shaped(logits_V, prompt, stream)
            longer |= {(*stream, int(token)): found[stream] * law_V[token] for token in law_V.nonzero()[0]}
        found = longer
    assert abs(sum(found.values()) - 1) < 1e-6
    return found


def sample(house: House, count: int) -> list[list[int]]:
    sampling = types_pb2.Sampling(
        temperature=TEMPERATURE,
        top_k=TOP_K,
        top_p=TOP_P,
        min_p=MIN_P,
        repetition_penalty=REPETITION,
        frequency_penalty=FREQUENCY,
        presence_penalty=PRESENCE,
        logit_bias=BIAS,
        banned_token_ids=BANNED,
    )
    stopping = types_pb2.Stopping(max_tokens=TOKENS, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text=PROMPT, sampling=sampling, stopping=stopping, ngram=True)
    house.set_policy(GAMMA)
    replies = house.run(house.generate_all([request] * count, 32), timeout_s=3000)
    own = sum(reply.usage.drafted - reply.usage.ngram_drafted for reply in replies)
    looked_up = sum(reply.usage.ngram_drafted for reply in replies)
    accepted = sum(reply.usage.accepted for reply in replies)
    assert min(own, looked_up) > 0.05 * (own + looked_up), f"inconclusive: {own} own drafts, {looked_up} looked up"
    assert 0.05 < accepted / (own + looked_up) < 0.95, "inconclusive: nothing was rejected, or nothing accepted"
    return [reply.ids for reply in replies]


def p_values(streams: list[list[int]], law: dict[tuple[int, ...], float]) -> dict[str, float]:
    """Neighbours were sent together, and share their batches."""
    pairs = list(zip(streams[::2], streams[1::2], strict=True))
    return table_p_values(streams, law, 1, DEPTH - 1) | pair_p_values(pairs, law, 1, DEPTH - 2)


def check(house: House, law: dict[tuple[int, ...], float], count: int) -> None:
    first = p_values(sample(house, count), law)
    if rejected := holm_rejects(first, 1e-6):
        again = p_values(sample(house, 10 * count), law)
        assert not holm_rejects(again, 1e-9), f"first run rejected {rejected}: {first}; second run: {again}"


@on_turn(2, of=3)
@pytest.mark.timeout(3600)  # a re-run takes ten times as long
def test_shaped_tokens_follow_their_law(house: House, law: dict[tuple[int, ...], float]) -> None:
    check(house, law, 1200)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_shaped_tokens_follow_their_law_20000(house: House, law: dict[tuple[int, ...], float]) -> None:
    check(house, law, 20_000)
