"""A rank whose drafts are looked up: what is emitted is what it was, what is right stands, and what made it is told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constraints.tiny_tokenizers import write_tokenizer
from oracles import tiny
from oracles.days import by_day
from oracles.driver import Driver, Live
from oracles.group import GroupOfWorkers
from oracles.group_driver import GroupDriver
from oracles.ranks import load_worker

from configs.schema import SpeculationSettings
from parallel.mesh import Mesh
from workers.demands import Constraint, Shaping
from workers.draft import lookups as lookups_module
from workers.plan import NUM_TEMPERATURE_CLASSES, BatchResult, Calibration, Origin
from workers.step import Worker

MAX_TOKENS = 24
WORDS = [*"ab~cdefghijklmnopqrstuvwxyz"]
"""The third ends an output, as the checkpoint has it."""
PROMPT = [3, 7, 11, 5, 3, 7, 11, 9, 5, 3, 7]
REAL, DRAWN = {}, {"temperature": 0.8, "top_p": 0.95, "seed": 11}
MODES: dict[str, dict[str, Any]] = {"greedy": REAL, "coupled": DRAWN, "standard": {**DRAWN, "coupled": False}}
NUM_COEFFICIENTS = NUM_TEMPERATURE_CLASSES * SpeculationSettings().gamma_max
SURE = Calibration(version=1, slopes=(0.0,) * NUM_COEFFICIENTS, offsets=(9.0,) * NUM_COEFFICIENTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lookups") / "tied"
    tiny.write(path, "tied", agree=0.5)
    write_tokenizer(path, WORDS)
    return path


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Worker:
    return load_worker(checkpoint, numerics="reference", max_model_len=96, page_size=4, max_running=6)


def add(
    driver: Driver, prompt: Sequence[int] = PROMPT, *, max_tokens: int = MAX_TOKENS, mode: str = "greedy", **asks: Any
) -> Live:
    live = driver.add(prompt, max_tokens, **MODES[mode])
    driver.new[-1] = replace(driver.new[-1], **asks)
    return live


@dataclass
class Told:
    """A sequence decoded alone: its tokens, and its rounds as the rank told them."""

    out: list[int]
    results: list[BatchResult]

    @property
    def origins(self) -> list[Origin]:
        return [result.origins[0] if result.origins else Origin.DRAFTER for result in self.results]

    @property
    def tokens_per_round(self) -> list[int]:
        return [len(result.emitted[0]) for result in self.results]


def decode(worker: Worker, gamma: int | Callable[[int], int], **asks: Any) -> Told:
    driver, results = Driver(worker), []
    live = add(driver, **asks)
    while not live.finished:
        results.append(driver.step(gamma=gamma if isinstance(gamma, int) else gamma(len(results))))
    return Told(live.out, results)


@pytest.fixture(scope="module")
def plain(worker: Worker) -> dict[str, list[int]]:
    """What is emitted without a draft, by mode."""
    return {mode: decode(worker, 0, mode=mode).out for mode in MODES}


def asks_about(true: list[int]) -> dict[str, dict[str, Any]]:
    other = [(token + 1) % 509 for token in true]
    return {
        "right": {"prediction": (*true,)},
        "right and longer": {"prediction": (*true, *range(60))},
        "right at first": {"prediction": (*true[:7],)},
        "wrong": {"prediction": (*other,)},
        "edited": {"prediction": (*true[:6], *other[6:8], *true[8:14], *true[17:])},
        "of one token": {"prediction": (true[0],)},
        "empty": {"prediction": ()},
        "looks back": {"looks_back": True},
        "both": {"prediction": (*true[:9],), "looks_back": True},
    }


@pytest.mark.parametrize("mode", by_day({"greedy": "greedy", "coupled": "coupled"}))
@pytest.mark.parametrize("gamma", by_day({"0": 0, "1": 1, "3": 3, "8": 8}, 2))
def test_no_prediction_changes_a_token(worker: Worker, plain: dict[str, list[int]], mode: str, gamma: int) -> None:
    """All at once in one batch, and each beside others than itself."""
    asks = asks_about(plain[mode])
    names = random.Random(gamma).sample(list(asks), len(asks))
    seen = set()
    for part in (names[:5], names[5:]):
        driver = Driver(worker)
        lives = {name: add(driver, mode=mode, **asks[name]) for name in part}
        while driver.unfinished:
            seen |= set(driver.step(gamma=gamma).origins)
        assert {name: live.out for name, live in lives.items()} == dict.fromkeys(part, plain[mode])
    assert Origin.PREDICTION in seen or not gamma


@pytest.mark.parametrize("gamma", by_day({"1": 1, "3": 3, "8": 8}))
def test_ngrams_stand_where_an_output_repeats_itself(worker: Worker, gamma: int) -> None:
    shaping = Shaping(allowed=(5, 6))
    plain, told = (decode(worker, many, looks_back=True, shaping=shaping) for many in (0, gamma))
    assert told.out == plain.out
    accepted = [result.num_accepted[0] for result in told.results if Origin.NGRAM in result.origins]
    assert sum(accepted) > 0


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("gamma", by_day({"1": 1, "3": 3, "8": 8}))
def test_all_drafts_of_a_right_prediction_stand(
    worker: Worker, plain: dict[str, list[int]], mode: str, gamma: int
) -> None:
    """Behind the first token, which the prompt's last chunk emits, each round brings gamma + 1."""
    told = decode(worker, gamma, mode=mode, prediction=(*plain[mode], 1, 2, 3, 4, 5, 6, 7, 8))
    rounds, rest = divmod(MAX_TOKENS - 1, gamma + 1)
    assert told.out == plain[mode]
    assert told.tokens_per_round == [1, *[gamma + 1] * rounds, *([rest] if rest else [])]
    assert told.origins == [Origin.DRAFTER, *[Origin.PREDICTION] * (len(told.results) - 1)]
    assert all(result.acceptance[0] == (1.0,) * len(result.acceptance[0]) for result in told.results[:-1])


def test_where_a_prediction_ends_the_head_goes_on_behind_it(worker: Worker, plain: dict[str, list[int]]) -> None:
    """As behind the same tokens of its own: given a prediction of what it drafts, it drafts that."""
    true = plain["greedy"]
    alone = decode(worker, 4)
    told = decode(worker, 4, prediction=(*true[:3],))
    first = told.results[1]
    assert (first.origins, first.num_looked_up) == ((Origin.PREDICTION,), (2,))
    assert first.drafted[0][:2] == tuple(true[1:3])
    driver = Driver(worker)
    for longer in (2, 3):
        drafted = alone.results[1].drafted[0]
        add(driver, prediction=(true[0], *drafted[:longer]))
    driver.step(gamma=4)
    assert driver.step(gamma=4).drafted == (drafted, drafted)


def test_scores_are_of_the_past_alone_and_confidences_are_set_beside_the_calibration(
    worker: Worker, plain: dict[str, list[int]]
) -> None:
    true = plain["greedy"]
    driver, pools = Driver(worker), worker.rank.pools
    right = add(driver, prediction=(*true,))
    wrong = add(driver, prediction=(true[0], *[400] * 30))
    none = add(driver)
    driver.step(gamma=3, calibration=SURE)
    scores, confidence = (x[[right.slot, wrong.slot, none.slot], :3] for x in (pools.score, pools.confidence))
    assert torch.equal(scores[0], scores[1]), "nothing is known yet of what tells them apart"
    assert torch.equal(confidence[:2], torch.sigmoid(scores[:2]))
    assert confidence[2].tolist() == pytest.approx([1 / (1 + math.exp(-9.0))] * 3)
    before = float(scores[0, 0])
    for _ in range(2):
        driver.step(gamma=3, calibration=SURE)
    assert float(pools.score[right.slot, 0]) > before
    origins = driver.step(gamma=3).origins
    assert origins == (Origin.PREDICTION, Origin.DRAFTER, Origin.DRAFTER), "what was wrong is kept back"


def test_in_standard_verification_the_law_of_a_looked_up_draft_is_one_at_its_token(
    worker: Worker, plain: dict[str, list[int]]
) -> None:
    driver, pools = Driver(worker), worker.rank.pools
    first = plain["greedy"][0]
    live = add(driver, mode="standard", top_k=1, prediction=(first, 17, 18))
    other = add(driver, mode="standard")
    greedy = add(driver, prediction=(*plain["greedy"],))
    driver.step(gamma=4)
    law = pools.draft_law[live.slot, :4]
    expected = torch.zeros(2, law.shape[1])
    expected[[0, 1], [17, 18]] = 1.0
    assert driver.live[0].out == [first], "inconclusive: the prediction was left at its first token"
    assert torch.equal(law[:2], expected)
    for slot, start in ((live.slot, 2), (other.slot, 0), (greedy.slot, 4)):
        rows = pools.draft_law[slot, start:4]
        assert torch.allclose(rows.sum(1), torch.ones(len(rows)), atol=1e-5)
    result = driver.step(gamma=4)
    assert result.drafted[0][:2] == (17, 18)


@pytest.mark.parametrize("mode", MODES)
def test_lookups_follow_through_pauses_chunks_budgets_and_limits(
    worker: Worker, plain: dict[str, list[int]], mode: str
) -> None:
    """Drafts off for a while, longer than a round; prompts in pieces; budgets that verify a part or none."""
    true = plain[mode]
    driver = Driver(worker)
    lives = [
        add(driver, mode=mode, prediction=(*true,)),
        add(driver, mode=mode, looks_back=True),
        add(driver, max_tokens=1, mode=mode, prediction=(*true,)),
    ]
    driver.step(gamma=2, chunks={lives[0].slot: 4, lives[1].slot: 9})
    for step in range(60):
        if not driver.unfinished:
            break
        driver.step(gamma=0 if 2 < step < 13 else 3, budget=(2, 0, 5)[step % 3], floor=0.2 * (step % 2))
    if mode != "standard":
        assert [live.out for live in lives] == [true, true, true[:1]]
    live = lives[0]
    assert live.finished
    assert worker.check_integrity() == []


def test_a_slots_next_sequence_looks_nothing_up_that_it_did_not_ask_for(
    worker: Worker, plain: dict[str, list[int]]
) -> None:
    driver = Driver(worker)
    first = add(driver, prediction=(*plain["greedy"],), looks_back=True)
    driver.step(gamma=3)
    driver.remove(first)
    driver.free_slots = [first.slot]
    second = add(driver)
    assert second.slot == first.slot
    results = [driver.step(gamma=3)]
    assert not worker.rank.proposer._lookups._by_slot  # type: ignore[union-attr]
    results += [driver.step(gamma=3) for _ in range(2)]
    assert all(result.origins == () for result in results)


def test_a_pause_is_caught_up_with_at_the_next_look_only(
    worker: Worker, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    extend = lookups_module.Lookup.extend
    monkeypatch.setattr(
        lookups_module.Lookup, "extend", lambda self, tokens: lengths.append(len(tokens)) or extend(self, tokens)
    )
    told = decode(worker, lambda step: 0 if 1 <= step <= 12 else 2, prediction=(*plain["greedy"],))
    assert told.out == plain["greedy"]
    # Drafts waited when the pause began; the read after it is longer than a round's.
    assert lengths[:2] == [1, 3 + 11 + 1]
    assert told.origins[1:14] == [Origin.PREDICTION, *[Origin.DRAFTER] * 12], "where none waits, none is told of"
    assert told.origins[14:] == [Origin.PREDICTION] * len(told.results[14:])


def test_shaped_logits_and_bans_hold_where_the_prediction_is_banned(
    worker: Worker, plain: dict[str, list[int]]
) -> None:
    true = plain["greedy"]
    shaping = Shaping(banned=(true[5],), frequency=0.5)
    expected = decode(worker, 0, shaping=shaping).out
    told = decode(worker, 3, shaping=shaping, prediction=(*true,))
    assert told.out == expected
    assert true[5] not in told.out
    assert Origin.PREDICTION in told.origins


def test_ranks_that_share_a_sequence_hold_the_same_looked_up_drafts_as_one_alone(
    checkpoint: Path, worker: Worker, plain: dict[str, list[int]]
) -> None:
    pair = GroupOfWorkers.load(Mesh(tp=2), checkpoint, max_model_len=96, page_size=4, max_running=6)
    together, alone = GroupDriver(pair), Driver(worker)
    [driver] = together.drivers
    together.step_id = alone.step_id  # noise is keyed by the step
    streams = []
    steps: list[tuple[Driver, Callable[[], BatchResult]]] = [
        (alone, lambda: alone.step(gamma=3, budget=7)),
        (driver, lambda: together.step(gamma=3, budgets=[7]).batches[0]),
    ]
    for one, step in steps:
        lives = []
        for mode in MODES:
            lives += [add(one, mode=mode, **asks_about(plain[mode])[name]) for name in ("edited", "looks back")]
        results = []
        while one.unfinished:
            results.append(step())
        streams.append([(r.drafted, r.num_admitted, r.origins, r.emitted) for r in results])
        assert [live.out for live in lives[:4]] == [plain["greedy"]] * 2 + [plain["coupled"]] * 2
    assert streams[0] == streams[1]
    for leader, follower in zip(*(w.rank.pools.confidence for w in pair.workers), strict=True):
        assert torch.equal(leader, follower)
    pair.close()


def test_a_draft_that_the_constraint_forbids_ends_what_was_looked_up(worker: Worker) -> None:
    constraint = Constraint(kind="regex", text="([a-d]|e+f){60}")
    plain = decode(worker, 0, constraint=constraint)
    true = plain.out
    assert len(true) == MAX_TOKENS, "inconclusive: the output ends early"
    right = decode(worker, 3, constraint=constraint, prediction=(*true,))
    assert right.out == true
    assert set(right.tokens_per_round[1:-1]) == {4}
    # Good for two tokens, and then of no string that meets it.
    forbidden = WORDS.index("z")
    broken = decode(worker, 3, constraint=constraint, prediction=(*true[:3], forbidden, *true[3:]))
    assert broken.out == true
    first = broken.results[1]
    assert (first.origins, first.num_looked_up) == ((Origin.PREDICTION,), (2,))
    assert first.drafted[0][:2] == tuple(true[1:3])
    assert first.drafted[0][2] != forbidden
    assert first.num_forbidden == (0,)
