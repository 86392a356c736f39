"""Drafts whose acceptance is chosen: how often they stand, what they publish beforehand, and what they leave alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from oracles import tiny
from oracles.driver import Driver, Live
from oracles.group import GroupOfWorkers, load_in_thread, on_ranks
from oracles.group_driver import GroupDriver

from configs.schema import CacheSettings, ModelSettings, ParallelSettings, SpeculationSettings, WorkerSettings
from parallel.mesh import ONE_RANK, Mesh
from workers.draft import mtp as mtp_module
from workers.draft.confidence import SCORE_LIMIT
from workers.plan import BatchResult, OracleDrafts, StepPlan
from workers.sampling.randomness import Purpose, audit_keys

PROMPTS = [[3 + i, 7, 11 + 2 * i, 5] for i in range(12)]
MAX_TOKENS = 36
GAMMA = 4
SIGMAS = 5.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oracle") / "tied"
    tiny.write(path, "tied", agree=0.7)
    return path


def load(path: Path, drafter: str, mesh: Mesh = ONE_RANK, numerics: str = "default") -> GroupOfWorkers:
    settings = WorkerSettings(
        model=ModelSettings(path=path, numerics=numerics, device="cpu"),  # type: ignore[arg-type]
        cache=CacheSettings(memory_mib=64, page_size=4, max_running=len(PROMPTS), max_model_len=64),
        speculation=SpeculationSettings(drafter=drafter),  # type: ignore[arg-type]
        parallel=ParallelSettings(dp=mesh.dp, tp=mesh.tp, ep=mesh.ep),
        max_step_tokens=512,
        threads=1,
    )
    return GroupOfWorkers(mesh, on_ranks(mesh, lambda rank, groups: load_in_thread(settings, rank, groups)))


@pytest.fixture(scope="module")
def group(checkpoint: Path) -> Iterator[GroupOfWorkers]:
    group = load(checkpoint, "oracle", numerics="reference")
    yield group
    group.close()


def add(driver: Driver, prompt: Sequence[int], oracle: OracleDrafts | None, *, seed: int = 0) -> Live:
    live = driver.add(prompt, MAX_TOKENS, seed=seed)
    driver.new[-1] = replace(driver.new[-1], oracle=oracle)
    return live


@pytest.fixture(scope="module")
def recorded(group: GroupOfWorkers) -> list[tuple[int, ...]]:
    """What the model answers to each prompt, decoded plainly."""
    driver = Driver(group.workers[0])
    lives = [driver.add(prompt, MAX_TOKENS) for prompt in PROMPTS]
    driver.run(0)
    return [tuple(live.out) for live in lives]


@dataclass(frozen=True)
class Position:
    """A draft that verification reached. index: in its round, from 0."""

    index: int
    confidence: float
    stood: bool


def positions_of(result: BatchResult, starts: Sequence[int]) -> Iterator[Position]:
    """Those of a step within the recordings. starts: output position of each sequence's first draft."""
    columns = zip(starts, result.scores, result.num_admitted, result.num_accepted, strict=True)
    for start, scores, admitted, accepted in columns:
        for index in range(min(accepted + 1, admitted, MAX_TOKENS - start)):
            yield Position(index, 1 / (1 + math.exp(-scores[index])), index < accepted)


def replay(driver: Driver, continuations: Sequence[tuple[int, ...]], acceptance: float) -> list[Position]:
    """All reached positions, after checking that the output is the recorded one."""
    lives = [
        add(driver, prompt, OracleDrafts(continuation=continuation, acceptance=acceptance), seed=100 + i)
        for i, (prompt, continuation) in enumerate(zip(PROMPTS, continuations, strict=True))
    ]
    found: list[Position] = []
    while driver.unfinished:
        starts = [len(live.out) for live in driver.unfinished]
        found += positions_of(driver.step(gamma=GAMMA), starts)
    assert [tuple(live.out) for live in lives] == list(continuations)
    for live in lives:
        driver.remove(live)
    return found


def within(stood: int, expected: float, variance: float) -> bool:
    return abs(stood - expected) <= SIGMAS * math.sqrt(variance) + 1e-9


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.95])
def test_drafts_stand_as_often_as_asked_at_every_position_and_as_their_confidence_says(
    group, recorded, acceptance
) -> None:
    driver = Driver(group.workers[0])
    with audit_keys() as audit:
        found = replay(driver, recorded, acceptance)
    for index in range(GAMMA):
        at = [position for position in found if position.index == index]
        if len(at) < 20:
            continue
        assert within(sum(p.stood for p in at), acceptance * len(at), acceptance * (1 - acceptance) * len(at)), index
    spread = min(0.25, acceptance, 1 - acceptance)
    assert all(abs(position.confidence - acceptance) <= spread + 1e-6 for position in found)
    bins: dict[int, list[Position]] = {}
    for position in found:
        bins.setdefault(min(4, int((position.confidence - acceptance + spread) / (2 * spread) * 5)), []).append(
            position
        )
    assert len(bins) == 5
    for members in bins.values():
        shares = [position.confidence for position in members]
        assert within(sum(p.stood for p in members), sum(shares), sum(share * (1 - share) for share in shares))
    assert audit.repeated() == []
    assert {Purpose.ORACLE_CONFIDENCE, Purpose.ORACLE_COIN} == {use.purpose for use in audit.uses}


def test_a_request_that_leaves_its_recording_or_runs_past_it_has_drafts_of_no_confidence(group, recorded) -> None:
    true = recorded[0]
    other = (*true[:6], (true[6] + 1) % 509, *true[7:])
    worker = group.workers[0]
    driver = Driver(worker)
    for continuation in (other, true[:9]):
        live = add(driver, PROMPTS[0], OracleDrafts(continuation=continuation, acceptance=1.0))
        num_known = 0
        while not live.finished:
            out = tuple(live.out)
            [scores], [drafts] = (result := driver.step(gamma=3)).scores, result.drafted
            for position, (score, draft) in enumerate(zip(scores, drafts, strict=True), len(out)):
                is_known = position < len(continuation) and out == continuation[: len(out)]
                assert score == (SCORE_LIMIT if is_known else -SCORE_LIMIT), position
                assert not is_known or draft == continuation[position]
                num_known += is_known
        assert tuple(live.out) == true
        assert num_known > 3
        assert worker.rank.pools.confidence[live.slot, :3].tolist() == [0.0] * 3
        driver.remove(live)


def test_the_heads_passes_are_all_made_and_see_the_drafts_that_took_the_place_of_its_own(
    group, recorded, monkeypatch
) -> None:
    worker, passes = group.workers[0], []
    whole = mtp_module.drafter_pass

    def noted(model, ops, pools, batch, hidden_ND):
        result = whole(model, ops, pools, batch, hidden_ND)
        slots = batch.slot_N[batch.real_N]
        passes.append(pools.tokens_at(slots, batch.position_N[batch.real_N] + 1).tolist())
        return result

    monkeypatch.setattr(mtp_module, "drafter_pass", noted)
    driver = Driver(worker)
    live = add(driver, PROMPTS[0], OracleDrafts(continuation=recorded[0], acceptance=1.0))
    num_steps = 0
    while len(live.out) < 20:
        passes.clear()
        driver.step(gamma=GAMMA)
        num_steps += 1
        # One over the committed rows, whose last meets the newest token; then one for each further draft.
        assert len(passes) == GAMMA
        newest = len(live.out) - 1
        assert [one[-1] for one in passes] == list(recorded[0][newest : newest + GAMMA])
    assert num_steps == 1 + math.ceil(19 / (GAMMA + 1))


def test_requests_without_a_recording_are_drafted_by_the_head(checkpoint, recorded) -> None:
    plain, oracle_drafts = load(checkpoint, "mtp"), load(checkpoint, "oracle")
    worker = oracle_drafts.workers[0]
    drafted: list[list[tuple[int, ...]]] = []
    for rank, oracle in ((plain.workers[0], None), (worker, None), (worker, recorded[1])):
        driver = Driver(rank)
        live = driver.add(PROMPTS[0], 12)
        if oracle is not None:
            add(driver, PROMPTS[1], OracleDrafts(continuation=oracle, acceptance=0.5))
        rounds = []
        while not live.finished:
            rounds.append(driver.step([one for one in driver.live if not one.finished], gamma=3).drafted[0])
        drafted.append(rounds)
    assert drafted[0] == drafted[1] == drafted[2]
    assert (plain.workers[0].description.drafter, worker.description.drafter) == ("mtp", "oracle")
    plain.close()
    oracle_drafts.close()


def test_ranks_that_share_a_sequence_hold_the_same_drafts_as_one_alone(checkpoint, group, recorded) -> None:
    pair = load(checkpoint, "oracle", Mesh(tp=2))
    streams: list[list[BatchResult]] = []
    step: Callable[..., BatchResult]
    for driver, step in _drivers(group.workers[0], pair):
        for i, prompt in enumerate(PROMPTS[:4]):
            add(driver, prompt, OracleDrafts(continuation=recorded[i], acceptance=0.6), seed=i)
        results = []
        while driver.unfinished:
            results.append(step())
        streams.append(results)
        assert [tuple(live.out) for live in driver.live] == recorded[:4]
    one, two = streams
    # The budget is short, so what each rank admits rests on the confidences that it holds; the group compares that.
    assert [(r.drafted, r.num_admitted, r.scores) for r in one] == [(r.drafted, r.num_admitted, r.scores) for r in two]
    assert len({admitted for result in two for admitted in result.num_admitted}) > 2
    pair.close()


def _drivers(worker, pair: GroupOfWorkers) -> Iterator[tuple[Driver, Callable[[], BatchResult]]]:
    alone = Driver(worker)
    first_step = alone.step_id
    yield alone, lambda: alone.step(gamma=3, budget=7)
    together = GroupDriver(pair)
    [driver] = together.drivers
    together.step_id = first_step  # noise is keyed by the step
    yield driver, lambda: together.step(gamma=3, budgets=[7]).batches[0]


def test_an_empty_batch_of_a_step_is_no_trouble(group) -> None:
    worker = group.workers[0]
    Driver(worker)
    report = worker.execute(StepPlan(step_id=worker._last_step + 1, epoch=1, gamma=2))
    assert report.batch is not None
    assert report.batch.drafted == ()
