"""Every field means the same with and without speculation: replies over real gRPC are equal token by token.

Reference numerics, greedy and seeded. The rows of a covering array, in which every pair of levels of two fields occurs,
are decoded plainly; then under each draft length, all in one batch, with drafts that are the drafter's own, right
throughout (the reply itself as prediction) or wrong at once (one that goes wrong behind every pair of tokens).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from flow import field_cases as cases
from flow.house import House, heldout, open_house
from oracles.days import SEED, on_turn

from outrider.v1 import inference_pb2

GAMMAS = (1, 3, 8)
Frames = list[inference_pb2.GenerateResponse]


def replies(house: House, requests: Sequence[inference_pb2.GenerateRequest], gamma: int | None) -> list[Frames]:
    house.set_policy(gamma)
    found = house.run(house.generate_all(requests, 12), timeout_s=3000)
    for reply in found:
        for frame in reply.frames:
            cases.check_usage(frame.usage)
    return [reply.frames for reply in found]


def check_drafts(replies: Sequence[Frames], drafts: str) -> None:
    """That there were drafts of the kind that a test is about: of right ones most stand, of wrong ones few."""
    usages = [frames[-1].usage for frames in replies]
    own = sum(usage.drafted - usage.predicted_drafted - usage.ngram_drafted for usage in usages)
    predicted, stood = (
        sum(getattr(usage, f"predicted_{what}") for usage in usages) for what in ("drafted", "accepted")
    )
    found = sum(usage.ngram_drafted for usage in usages)
    assert own > 0, "inconclusive: the drafter drafted nothing"
    assert found > 0 or drafts != "own", "inconclusive: nothing was looked up"
    assert (predicted > 0) == (drafts != "own"), f"inconclusive: {predicted} drafts of predictions"
    if drafts == "right":
        assert stood > 0.5 * predicted, f"inconclusive: {stood} of {predicted} right drafts stood"
    if drafts == "wrong":  # one right token goes before each wrong one
        assert stood < 0.7 * predicted, f"inconclusive: {stood} of {predicted} wrong drafts stood"


def predicting(request: inference_pb2.GenerateRequest, ids: Sequence[int]) -> inference_pb2.GenerateRequest:
    changed = inference_pb2.GenerateRequest()
    changed.CopyFrom(request)
    changed.prediction.token_ids.ids.extend(ids)
    return changed


def misled(ids: Sequence[int], rng: random.Random, vocab_size: int) -> list[int]:
    """A prediction that goes wrong behind every pair of tokens of the output."""
    pairs = pairwise(ids)
    wrong = ((token + rng.randrange(1, vocab_size)) % vocab_size for token in ids[2:])
    return [token for pair, other in zip(pairs, wrong, strict=False) for token in (*pair, other)]


def check(
    house: House,
    rows: Sequence[cases.Row],
    gammas: Sequence[int],
    kinds: Sequence[str] = ("own", "right", "wrong"),
) -> None:
    """kinds: of drafts."""
    # Some repeat themselves, so that there is something to be looked up.
    prompts = [text + text[: len(text) * 2 // 3] if i % 2 else text for i, text in enumerate(heldout(len(rows), 5))]
    requests = [cases.build(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    plain = [cases.sequences_of(frames) for frames in replies(house, requests, None)]
    tokenizer = house.deployment.tokenizer
    outputs = []
    for row, prompt, sequences in zip(rows, prompts, plain, strict=True):
        prompt_ids = list(house.run(tokenizer.encode(prompt)))
        cases.check_reply(row, prompt_ids, sequences)
        outputs.append(sequences[0].ids[len(prompt_ids) if row["text"] == "echo" else 0 :])
    vocab_size = house.deployment.engine.description.vocab_size
    rng = random.Random(SEED)
    right = [predicting(request, ids) for request, ids in zip(requests, outputs, strict=True)]
    wrong = [predicting(request, misled(ids, rng, vocab_size)) for request, ids in zip(requests, outputs, strict=True)]
    for gamma in gammas:
        for name in kinds:
            found = replies(house, {"own": requests, "right": right, "wrong": wrong}[name], gamma)
            check_drafts(found, name)
            for row, expected, frames in zip(rows, plain, found, strict=True):
                assert cases.sequences_of(frames) == expected, (gamma, name, dict(row))
    house.check_baseline()


def test_rows_cover_every_pair() -> None:
    rows = cases.covering(SEED)
    pairs = {(one, a, other, b) for row in rows for one, a in row.items() for other, b in row.items() if one < other}
    every = {
        (one, a, other, b)
        for one in cases.FACTORS
        for other in cases.FACTORS
        if one < other
        for a in cases.FACTORS[one]
        for b in cases.FACTORS[other]
    }
    assert pairs == every
    assert len(rows) < 80


@pytest.mark.timeout(900)
def test_pairs_of_fields_mean_the_same_with_and_without_drafts(reference_house: House) -> None:
    gamma = GAMMAS[SEED % len(GAMMAS)]
    check(reference_house, cases.covering(SEED), [gamma], ["own", ("right", "wrong")[SEED % 2]])


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("turn", range(5))
def test_pairs_of_fields_mean_the_same_under_every_draft_length(reference_house: House, turn: int) -> None:
    check(reference_house, cases.covering(SEED + 1 + turn), GAMMAS)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_each_field_alone_means_the_same_with_and_without_drafts(reference_house: House) -> None:
    check(reference_house, list(cases.each_alone()), GAMMAS)


@on_turn(1, of=2)
@pytest.mark.timeout(900)
def test_drafts_that_all_stand_and_that_all_fall_change_nothing() -> None:
    """An oracle's drafts: the reply itself, or other tokens in its place."""
    rows = [{**row, "temperature": "greedy", "lookup": "off", "limit": "policy"} for row in cases.covering(SEED)]
    requests = [cases.build(row, prompt) for row, prompt in zip(rows, heldout(len(rows), 5), strict=True)]
    with open_house(model__numerics="reference", speculation__drafter="oracle") as house:
        plain = [cases.sequences_of(frames) for frames in replies(house, requests, None)]
        prompts = [frames[-1].usage.prompt_tokens for frames in replies(house, requests, None)]
        for acceptance in (0.0, 1.0):
            for request, row, found, prompt in zip(requests, rows, plain, prompts, strict=True):
                ids = found[0].ids[prompt if row["text"] == "echo" else 0 :]
                request.oracle.CopyFrom(inference_pb2.Oracle(continuation=ids, acceptance=acceptance))
            told = replies(house, requests, 3)
            for row, expected, frames in zip(rows, plain, told, strict=True):
                assert cases.sequences_of(frames) == expected, (acceptance, row)
            # The other sequences of a request have outputs of their own only where they sample, and these are greedy.
            usages = [frame.usage for frames in told for frame in frames if frame.HasField("finish")]
            stood = sum(usage.accepted for usage in usages) / sum(usage.admitted for usage in usages)
            assert stood < 0.05 if acceptance == 0 else stood > 0.6, f"inconclusive: {stood:.0%} of the drafts stood"
        house.check_baseline()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [{"parallel__tp": 2}, {"parallel__dp": 2}])
def test_fields_mean_the_same_on_several_ranks(layout: dict[str, int]) -> None:
    with open_house(model__numerics="reference", **layout) as house:
        check(house, cases.covering(SEED), [3])
