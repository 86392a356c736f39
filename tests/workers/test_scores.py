"""Scores, confidences and acceptance of a rank's steps: those of the oracle, whoever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from oracles import tiny
from oracles.driver import Driver, Live
from oracles.make_tiny_models import MtpHead
from oracles.ranks import load_worker
from torch import Tensor

from workers.draft.confidence import Measure
from workers.plan import NUM_TEMPERATURE_CLASSES, BatchResult, Calibration, LoadError, temperature_class
from workers.probe import trace_sequences
from workers.sampling.processors import RowParams, target_law
from workers.step import Worker

GAMMA = 3
PROMPT = [5, 9, 200, 31, 31, 7]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint with a confidence head, and what its modules are."""

    path: Path
    lm: Any
    mtp: MtpHead
    weight: Tensor
    bias: Tensor


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("scores") / "base"
    lm, mtp = tiny.write(path, "base", agree=0.7)
    return Tiny(path, lm, mtp, *tiny.add_confidence_head(path))


@pytest.fixture(scope="module")
def worker(made: Tiny) -> Worker:
    """Scores by margins."""
    return load(made, "margin")


def load(made: Tiny, confidence: str) -> Worker:
    return load_worker(made.path, max_running=4, max_model_len=96, confidence=confidence)


OF_A_LAW: dict[str, Callable[[Tensor], Tensor]] = {
    "margin": lambda log_p: log_p.topk(2).values @ torch.tensor([1.0, -1.0], dtype=torch.float64),
    "max_probability": lambda log_p: log_p.max().exp().logit(),
    "entropy": lambda log_p: (log_p.exp() @ log_p).exp().logit(),
}


@torch.no_grad()
def chain_scores(made: Tiny, measure: str, known: list[int], drafts: list[int]) -> list[float]:
    """Score of each draft, by transformers' target and the reference module."""
    hidden = made.lm(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True).hidden_states[
        -1
    ][0]
    tokens, scores = torch.tensor(known[1:]), []
    for draft in drafts:
        logits, recycled = made.mtp(tokens, hidden)
        if measure == "head":
            scores.append(float(made.weight @ recycled[-1] + made.bias))
        else:
            scores.append(float(OF_A_LAW[measure](logits[-1].double().log_softmax(-1))))
        tokens = torch.cat([tokens, torch.tensor([draft])])
        hidden = torch.cat([hidden, recycled[-1:]])
    return scores


@pytest.mark.parametrize("measure", get_args(Measure))
@pytest.mark.parametrize(
    "neighbour", [None, {"temperature": 1.0, "coupled": False}], ids=["alone", "sampled neighbour"]
)
def test_reported_scores_are_those_of_the_oracles_chain(
    made: Tiny, measure: str, neighbour: dict[str, object] | None
) -> None:
    """A batch of greedy rows never sees whole laws; one with a sampled row does."""
    driver = Driver(load(made, measure))
    live = driver.add(PROMPT, 40)
    if neighbour is not None:
        driver.add([3, 4], 40, seed=5, **neighbour)  # type: ignore[arg-type]
    expected: list[float] = []
    for _ in range(5):
        result = driver.step(gamma=GAMMA)
        assert list(result.scores[0]) == pytest.approx(expected, rel=1e-3, abs=1e-3)
        known, pools = live.prompt + live.out, driver.worker.rank.pools
        drafts = pools.token_log[live.slot, len(known) : len(known) + GAMMA].tolist()
        expected = chain_scores(made, measure, known, drafts)
        assert pools.confidence[live.slot, :GAMMA].tolist() == pytest.approx(
            torch.tensor(expected).sigmoid().tolist(), rel=1e-3, abs=1e-4
        )


def test_the_head_of_a_checkpoint_is_taken_unless_told_otherwise(made: Tiny, tmp_path: Path) -> None:
    def score_of_first(path: Path, confidence: str) -> float:
        driver = Driver(load_worker(path, max_running=2, max_model_len=96, confidence=confidence))
        live = driver.add(PROMPT, 9)
        driver.step(gamma=1)
        return float(driver.worker.rank.pools.score[live.slot, 0])

    by_head, by_margin = score_of_first(made.path, "head"), score_of_first(made.path, "margin")
    assert by_head != by_margin
    assert score_of_first(made.path, "auto") == by_head
    tiny.write(tmp_path, "base", agree=0.7)
    assert score_of_first(tmp_path, "auto") == by_margin
    with pytest.raises(LoadError, match=r"speculation\.confidence is head, but the checkpoint"):
        load_worker(tmp_path, confidence="head")
    tiny.add_confidence_head(tmp_path, bias=False)
    assert score_of_first(tmp_path, "auto") == pytest.approx(by_head - float(made.bias), abs=1e-5)


CELLS = NUM_TEMPERATURE_CLASSES * 8
CALIBRATION = Calibration(
    version=3,
    slopes=tuple(0.25 + i % 7 / 16 for i in range(CELLS)),
    offsets=tuple(i % 5 / 4 - 0.5 for i in range(CELLS)),
)


def test_confidence_is_calibrated_by_temperature_and_position_and_scores_are_not(worker: Worker) -> None:
    driver = Driver(worker)
    lives = {t: driver.add(PROMPT, 30, temperature=t, seed=1) for t in (0.0, 0.2, 1.0, 1.5)}
    driver.step(gamma=GAMMA, calibration=CALIBRATION)
    pools = worker.rank.pools
    for temperature, live in lives.items():
        first = temperature_class(temperature) * worker.description.gamma_max
        slopes, offsets = (
            torch.tensor(table[first : first + GAMMA]) for table in (CALIBRATION.slopes, CALIBRATION.offsets)
        )
        score = pools.score[live.slot, :GAMMA]
        torch.testing.assert_close(pools.confidence[live.slot, :GAMMA], (slopes * score + offsets).sigmoid())
    greedy, warm = lives[0.0], lives[0.2]
    assert greedy.out == warm.out, "inconclusive: they have not drafted from one law"
    torch.testing.assert_close(pools.score[greedy.slot, 0], pools.score[warm.slot, 0])


def overlaps(worker: Worker, live: Live, fields: dict[str, float], result: BatchResult, laws_GV: Tensor) -> list[float]:
    """Σ min(p, q) at each draft that the result names. laws_GV: those that they were drawn from."""
    (drafts,), rank = result.drafted, worker.rank
    before = live.prompt + live.out[: len(live.out) - len(result.emitted[0])]
    trace = trace_sequences(rank.model, rank.ops, [before + list(drafts)], lambda i: 99)[0]
    logits_GV = trace.logits[len(before) - 1 : len(before) - 1 + len(drafts)]
    ones = torch.ones(len(drafts))
    cuts = RowParams(
        temperature=ones * fields["temperature"],
        top_k=(ones * fields["top_k"]).long(),
        top_p=ones * fields["top_p"],
        min_p=ones * 0,
        typical_p=ones,
    )
    p_GV = target_law(logits_GV, cuts, any_sampled=True, any_sorted=True)
    return torch.minimum(p_GV, laws_GV[: len(drafts)]).sum(-1).tolist()


def test_acceptance_of_drawn_drafts_is_the_overlap_of_the_laws_they_are_sampled_from(worker: Worker) -> None:
    driver = Driver(worker, seed=3)
    fields = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
    live = driver.add(PROMPT, 50, seed=11, coupled=False, **fields)  # type: ignore[arg-type]
    seen: list[float] = []
    while not live.finished:
        laws_GV = worker.rank.pools.draft_law[live.slot].clone()
        result = driver.step(gamma=GAMMA, budget=2)
        if not result.drafted[0]:
            continue
        told = result.acceptance[0]
        assert list(told) == pytest.approx(
            overlaps(worker, live, fields, result, laws_GV)[: len(told)], rel=1e-3, abs=1e-4
        )
        seen += told
    assert max(seen) - min(seen) > 0.2, "inconclusive: all drafts were alike"


def test_a_rank_tells_the_scores_of_all_drafts_that_the_plan_names_and_of_no_more(worker: Worker) -> None:
    driver = Driver(worker, seed=4)
    free, capped = driver.add(PROMPT, 40), driver.add(PROMPT, 40)
    capped.cap = 1
    driver.step(gamma=GAMMA)
    result = driver.step(gamma=GAMMA, budget=1, forced=1)
    assert list(map(len, result.scores)) == list(map(len, result.drafted)) == [GAMMA, 1]
    assert result.scores[0][:1] == result.scores[1]
    assert result.num_admitted == (1, 0), "of two forced drafts at one position the older request's"
    result = driver.step(gamma=GAMMA, budget=0)
    assert list(map(len, result.scores)) == [GAMMA, 1]
    assert result.acceptance == ((), ())
    assert free.out == capped.out


def test_the_floor_holds_though_the_budget_covers_everything(worker: Worker) -> None:
    """What is admitted is held against `admit` in every step."""
    driver = Driver(worker, seed=5)
    lives = [driver.add(PROMPT[i:], 30) for i in range(3)]
    results = [driver.step(gamma=GAMMA, floor=0.4) for _ in range(4)]
    admitted = {n for result in results[1:] for n in result.num_admitted}
    assert admitted & set(range(1, GAMMA)), "inconclusive: no draft in the middle of a run was below the floor"
    plain = Driver(worker, seed=6)
    expected = [plain.add(PROMPT[i:], 30) for i in range(3)]
    plain.run()
    for live, whole in zip(lives, expected, strict=True):
        assert live.out == whole.out[: len(live.out)]
