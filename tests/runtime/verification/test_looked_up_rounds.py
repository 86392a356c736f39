"""What the host learns of rounds whose drafts were looked up: how their sequences fare, and nothing of the drafter."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fakes.requests import request

from runtime.request import Usage
from runtime.settlement import Outcome, settle
from runtime.verification.history import History
from workers.plan import IDENTITY, BatchPlan, Origin, StepPlan

GAMMA = 3
STEPS = 200


def round_of(origin: Origin, scores: tuple[float, ...], accepted: int, looked_up: int | None = None) -> Outcome:
    """looked_up: how many of the drafts were, all of them if left out."""
    if origin is Origin.DRAFTER:
        looked_up = 0
    return Outcome(
        slot=1,
        epoch=1,
        num_known=1,
        num_drafts=len(scores),
        samples=True,
        drafted=tuple(range(len(scores))),
        num_admitted=len(scores),
        num_accepted=accepted,
        emitted=tuple(range(accepted + 1)),
        scores=scores,
        acceptance=(1.0,) * accepted + (0.0,) * (accepted < len(scores)),
        origin=origin,
        num_looked_up=len(scores) if looked_up is None else looked_up,
    )


def taught(*rounds: Outcome) -> History:
    """By sequence 1 alone, a round a step."""
    history, asked = History(GAMMA, capacity=4), request(1)
    for step, outcome in enumerate(rounds, start=1):
        batch = BatchPlan(slots=(1,), epochs=(1,), num_known=(1,), num_drafts=(outcome.num_drafts,), samples=(True,))
        history.note(
            history.witness(StepPlan(step_id=step, epoch=1, batches=(batch,), gamma=GAMMA), [(asked, outcome)])
        )
    return history


def survival_of(history: History) -> list[float]:
    evidence, _, _ = history.survivals.evidence([1], np.full((1, GAMMA), 0.5))
    return evidence[0].tolist()


@pytest.mark.parametrize("origin", [Origin.PREDICTION, Origin.NGRAM])
def test_they_teach_the_book_of_the_drafter_nothing(origin: Origin) -> None:
    """A drafter whose scores say too much, beside lookups whose scores say the opposite of what becomes of them, and
    beside rounds without drafts."""
    own = [round_of(Origin.DRAFTER, (2.0, 2.0, 2.0), n % 3) for n in range(STEPS)]
    alone, mixed = (
        taught(*itertools.chain.from_iterable((one, other) for one in own))
        for other in (round_of(origin, (), 0), round_of(origin, (-1.0, -1.0, -1.0), 3))
    )
    assert mixed.calibrator.calibration == alone.calibrator.calibration != IDENTITY
    assert np.array_equal(mixed.calibrator.rates(), alone.calibrator.rates())
    assert mixed.calibrator.errors() == alone.calibrator.errors()


@pytest.mark.parametrize("origin", [Origin.PREDICTION, Origin.NGRAM])
def test_they_are_evidence_of_their_sequence_by_their_scores_as_they_are(origin: Origin) -> None:
    own = [round_of(Origin.DRAFTER, (2.0, 2.0, 2.0), 0) for _ in range(STEPS)]
    chances = (0.9, 0.8, 0.75)
    scores = tuple(math.log(chance / (1 - chance)) for chance in chances)
    history = taught(*own, round_of(origin, scores, 3))
    assert survival_of(history) == pytest.approx(np.cumprod(chances).tolist())
    assert survival_of(taught(*own))[0] < 0.3, "inconclusive: calibration changes nothing"


@pytest.mark.parametrize("origin", [Origin.PREDICTION, Origin.NGRAM])
def test_what_the_drafter_drew_behind_them_is_its_own(origin: Origin) -> None:
    """Its scores are calibrated there as everywhere, and it learns of them."""
    own = [round_of(Origin.DRAFTER, (2.0, 2.0, 2.0), n % 2) for n in range(STEPS)]
    tails = [round_of(origin, (1.0, 2.0, 2.0), 1, looked_up=1) for _ in range(STEPS)]
    taught_both = taught(*itertools.chain(own, tails))
    untaught = taught(*own)
    assert taught_both.calibrator.rates()[:, 1].max() < untaught.calibrator.rates()[:, 1].max()
    # Rounds without drafts of the first position let what is known of it fade, no more.
    assert np.allclose(taught_both.calibrator.rates()[:, 0], untaught.calibrator.rates()[:, 0], atol=0.05)
    scores = (math.log(0.9 / 0.1), 2.0, 2.0)
    told, calibrator = survival_of(taught(*own, round_of(origin, scores, 1, looked_up=1))), untaught.calibrator
    usual = calibrator.confidence(np.array([[2.0] * GAMMA]), np.array([0]))[0]
    assert told == pytest.approx(np.cumprod([0.9, *usual[1:]]).tolist(), rel=0.05)
    assert told[1] != pytest.approx(0.9 / (1 + math.exp(-2.0)), rel=0.05), "inconclusive: calibration changes nothing"


def test_usage_counts_them_apart_from_the_drafters_behind_them() -> None:
    asked, usage = request(1, max_tokens=100), Usage(prompt=3)
    for looked_up, accepted in ((1, 0), (1, 1), (2, 3), (3, 3)):
        usage = settle(asked, usage, round_of(Origin.PREDICTION, (0.0,) * GAMMA, accepted, looked_up)).usage
    assert (usage.drafted, usage.accepted) == (12, 7)
    assert (usage.predicted_drafted, usage.predicted_admitted, usage.predicted_accepted) == (7, 7, 6)


def test_usage_counts_them_apart_from_the_drafters_and_among_all() -> None:
    asked, usage = request(1, max_tokens=100), Usage(prompt=3)
    for origin, accepted in ((Origin.DRAFTER, 1), (Origin.PREDICTION, 3), (Origin.NGRAM, 0), (Origin.PREDICTION, 2)):
        usage = settle(asked, usage, round_of(origin, (0.0,) * GAMMA, accepted)).usage
    assert (usage.drafted, usage.admitted, usage.accepted, usage.completion) == (12, 12, 6, 10)
    assert (usage.predicted_drafted, usage.predicted_admitted, usage.predicted_accepted) == (6, 6, 5)
    assert (usage.ngram_drafted, usage.ngram_admitted, usage.ngram_accepted) == (3, 3, 0)
