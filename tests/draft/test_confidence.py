"""Scores of drafts: log-odds of the drafter's own law, the same on one rank and on many, and what calibration makes of
them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.threads import Ranks
from torch import Tensor

from configs.schema import SpeculationSettings
from parallel.mesh import Mesh
from parallel.rendezvous import RankGroups
from parallel.vocabulary import Vocabulary, best_of
from workers.draft.confidence import SCORE_LIMIT, Calibrator, Measure, Scorer, choose_measure
from workers.plan import IDENTITY, NUM_TEMPERATURE_CLASSES, Calibration, LoadError

CPU = torch.device("cpu")
OF_THE_LAW: list[Measure] = ["margin", "max_probability", "entropy"]
NAN, INF = float("nan"), float("inf")


def score(measure: Measure, logits: Tensor) -> Tensor:
    scorer = Scorer(measure=measure)
    return scorer.score(best_of(logits, **scorer.needs), logits)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_scores_are_log_odds_of_the_law() -> None:
    laws = [[0.5, 0.25, 0.125, 0.125], [0.25] * 4, [0.9, 0.04, 0.03, 0.03]]
    logits = torch.tensor(laws).log() + torch.tensor([[3.0], [-2.0], [0.0]])
    entropies = [-sum(p * math.log(p) for p in law) for law in laws]
    expected: dict[Measure, list[float]] = {
        "margin": [math.log(2), 0.0, math.log(0.9 / 0.04)],
        "max_probability": [0.0, logit(0.25), logit(0.9)],
        "entropy": [logit(math.exp(-entropy)) for entropy in entropies],
    }
    for measure, values in expected.items():
        found = score(measure, logits)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("measure", OF_THE_LAW)
def test_sure_laws_are_told_apart_up_to_the_limit(measure: Measure) -> None:
    """Their largest probability is 1 in float32 from a lead of 17 on."""
    leads = torch.tensor([16.0, 18.0, 20.0, 24.0, 28.0, 34.0, 200.0])
    found = score(measure, F.pad(leads[:, None], (0, 9)))
    assert (found.diff()[:4] > 1).all()
    assert found[-1] == SCORE_LIMIT
    assert (found <= SCORE_LIMIT).all()


@pytest.mark.parametrize("measure", OF_THE_LAW)
@pytest.mark.parametrize("row", [[NAN, 0.0], [INF, INF], [-INF, -INF], [0.0, NAN]])
def test_a_law_that_is_no_number_has_the_lowest_score_and_no_confidence(measure: Measure, row: list[float]) -> None:
    found = score(measure, torch.tensor([row]))
    assert found.tolist() == [-SCORE_LIMIT]
    assert Calibrator(1, CPU).confidence(found, torch.tensor([0]), 0, IDENTITY).tolist() == [0.0]


@pytest.mark.parametrize("measure", OF_THE_LAW)
def test_forbidden_tokens_take_no_part(measure: Measure) -> None:
    logits = torch.tensor([[1.0, 0.5, -1.0, -2.0]])
    among = torch.tensor([[-INF, 1.0, 0.5, -INF, -1.0, -2.0, -INF]])
    torch.testing.assert_close(score(measure, logits), score(measure, among), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("logit", "expected"), [(2.5, 2.5), (-31.0, -30.0), (99.0, 30.0), (NAN, -30.0)])
def test_the_head_s_word_is_clipped(logit: float, expected: float) -> None:
    scorer = Scorer(measure="head", head=lambda hidden_RD: hidden_RD.sum(-1))
    hidden = torch.tensor([[logit, 0.0]])
    assert scorer.score(best_of(torch.zeros(1, 4), **scorer.needs), hidden).tolist() == [expected]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(Mesh(tp=2))
    yield ranks
    ranks.close()


@given(
    count=st.sampled_from([130, 509, 64]),
    scale=st.sampled_from([0.0, 1.0, 8.0, 40.0]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=15)
def test_two_ranks_score_as_one_does_with_all_columns(pair: Ranks, count: int, scale: float, seed: int) -> None:
    """A batch of greedy rows asks each rank for its best; one sampled row among them has all logits gathered."""
    logits = torch.randn(5, count, generator=torch.Generator().manual_seed(seed)) * scale
    width = -(-count // 128) * 64
    for measure in OF_THE_LAW:
        scorer = Scorer(measure=measure)

        def work(groups: RankGroups, scorer: Scorer = scorer) -> tuple[Tensor, Tensor] | None:
            vocabulary = Vocabulary(count, groups.tp)
            held = F.pad(logits, (0, 2 * width - count)).narrow(1, groups.rank * width, width).contiguous()
            held = vocabulary.without_padding(held)
            best, whole = vocabulary.best(held, **scorer.needs), vocabulary.gather(held)
            if best is None or whole is None:
                return None
            return scorer.score(best, logits), scorer.score(best_of(whole, **scorer.needs), logits)

        leader, follower = pair(work)
        assert follower is None
        assert leader is not None
        greedy, sampled = leader
        torch.testing.assert_close(greedy, sampled, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sampled, score(measure, logits), rtol=0, atol=0)


@pytest.mark.parametrize("has_head", [False, True])
def test_auto_takes_the_head_where_there_is_one(has_head: bool) -> None:
    assert choose_measure("auto", has_head=has_head) == ("head" if has_head else "margin")
    for measure in OF_THE_LAW:
        assert choose_measure(measure, has_head=has_head) == measure


def test_a_head_that_is_not_there_is_refused_by_the_setting_s_name() -> None:
    assert choose_measure("head", has_head=True) == "head"
    with pytest.raises(LoadError, match=r"speculation\.confidence is head, .* set it to auto"):
        choose_measure("head", has_head=False)


GAMMA = 3
CELLS = NUM_TEMPERATURE_CLASSES * GAMMA
CALIBRATION = Calibration(
    version=7, slopes=tuple(0.5 + i / 8 for i in range(CELLS)), offsets=tuple(i / 4 - 2 for i in range(CELLS))
)


def test_the_identity_is_the_plain_probability() -> None:
    scores = torch.tensor([-29.0, -1.0, 0.0, 2.5, 30.0])
    classes = torch.tensor([0, 1, 2, 3, 4])
    found = Calibrator(GAMMA, CPU).confidence(scores, classes, 1, IDENTITY)
    assert torch.equal(found, torch.sigmoid(scores))


@pytest.mark.parametrize("position", range(GAMMA))
def test_coefficients_are_those_of_class_and_position(position: int) -> None:
    scores = torch.tensor([0.5, -1.0, 2.0, 3.0, -4.0])
    classes = torch.tensor([4, 0, 2, 2, 1])
    found = Calibrator(GAMMA, CPU).confidence(scores, classes, position, CALIBRATION)
    for value, x, c in zip(found.tolist(), scores.tolist(), classes.tolist(), strict=True):
        cell = c * GAMMA + position
        logit = CALIBRATION.slopes[cell] * x + CALIBRATION.offsets[cell]
        assert value == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-6)


def test_each_step_has_the_calibration_of_its_plan() -> None:
    calibrator, at = Calibrator(GAMMA, CPU), (torch.tensor([1.0]), torch.tensor([0]), 0)
    flat = Calibration(version=8, slopes=(0.0,) * CELLS, offsets=(0.0,) * CELLS)
    plain, fitted = calibrator.confidence(*at, IDENTITY), calibrator.confidence(*at, CALIBRATION)
    assert plain != fitted
    assert calibrator.confidence(*at, flat).tolist() == [0.5]
    # The same version from another life of the runtime.
    assert calibrator.confidence(*at, replace(CALIBRATION, version=8)) == fitted
    assert calibrator.confidence(*at, IDENTITY) == plain
    assert calibrator.confidence(*at, Calibration(version=9)) == plain


@pytest.mark.parametrize(("slopes", "offsets"), [(CELLS, CELLS - 1), (CELLS - 1, CELLS - 1), (0, CELLS), (1, 1)])
def test_coefficients_that_do_not_fit_are_refused(slopes: int, offsets: int) -> None:
    wrong = Calibration(version=3, slopes=(1.0,) * slopes, offsets=(0.0,) * offsets)
    with pytest.raises(ValueError, match=f"calibration 3 has {slopes} slopes and {offsets} offsets"):
        Calibrator(GAMMA, CPU).confidence(torch.zeros(1), torch.zeros(1).long(), 0, wrong)


def test_measures_are_those_of_the_settings() -> None:
    offered = get_args(SpeculationSettings.model_fields["confidence"].annotation)
    assert set(offered) == {"auto", *get_args(Measure)}
