"""The generation that ranks must make before anybody is let in: real steps, nothing counted, nothing wrong let in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes.engine_house import SETTINGS, asynchronous, no_pause, settle_down
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeGroup, FakeSource, describe, true_stream

from configs.schema import ServeSettings
from parallel.mesh import Mesh
from runtime.engine import Engine
from runtime.front.errors import Unavailable
from runtime.in_force import SettingsInForce
from runtime.life import begin_life
from runtime.scheduler.queue import WaitingQueue
from runtime.warm_up import SIZES, STAGE, WarmUpFailed, size_for, warm_up
from workers.plan import BatchResult, StepResult, WorkerError, WorkerLost


class BrokenGroup(FakeGroup):
    """Answers each step as `spoil` makes of it. violations_told: what ranks say when they check themselves."""

    spoil: Callable[[StepResult], StepResult] = staticmethod(lambda result: result)

    async def execute(self, plan):
        return self.spoil(await super().execute(plan))


def of_batches(change: Callable[[BatchResult], BatchResult]) -> Callable[[StepResult], StepResult]:
    return lambda result: replace(result, batches=tuple(map(change, result.batches)))


def stranger(batch: BatchResult) -> BatchResult:
    return replace(batch, emitted=tuple(tuple(61 for _ in tokens) for tokens in batch.emitted))


def no_margins(batch: BatchResult) -> BatchResult:
    return replace(batch, margins=tuple(() for _ in batch.margins))


def nan_margins(batch: BatchResult) -> BatchResult:
    return replace(batch, margins=tuple(tuple(float("nan") for _ in one) for one in batch.margins))


def one_too_few(batch: BatchResult) -> BatchResult:
    return replace(batch, emitted=tuple(tokens[:-1] for tokens in batch.emitted))


def ignore(rank: int, stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("gamma_max", [0, 4])
def test_every_data_parallel_rank_generates_and_the_next_life_goes_on(dp: int, gamma_max: int) -> None:
    async def scenario() -> None:
        group = FakeGroup(describe(gamma_max=gamma_max), dp=dp)
        told = []
        life = await warm_up(group, SETTINGS, None, lambda *done: told.append(done))
        assert group.violations == []
        assert all(any(plan.batches[rank].slots for plan in group.plans) for rank in range(dp))
        drafts = sum(sum(batch.num_drafts) for plan in group.plans for batch in plan.batches)
        assert (drafts > 0) == (gamma_max > 0), "the drafter is tried too where there is one"
        assert group.tenants == [], "no rank holds a sequence any more"
        assert told[-1] == (0, STAGE, 1, 1)
        # Ranks check that ids of steps and epochs of slots rise.
        after = begin_life(group, WaitingQueue(), SETTINGS, life, now_s=0.0)
        assert after.scheduler.next_step_id == len(group.plans) + 1
        assert await warm_up(group, SETTINGS, after, ignore)
        assert group.violations == []

    asyncio.run(scenario())


@asynchronous
async def test_nothing_of_it_is_counted_and_the_first_request_is_served_as_ever() -> None:
    source, sink = FakeSource(describe()), RecordingSink()
    engine = Engine(SettingsInForce(SETTINGS), source, sink, trial=warm_up)
    await engine.start()
    assert len(source.plans) > 1
    statistics = engine.statistics()
    assert (statistics.steps, statistics.rounds, statistics.emitted, statistics.drafted) == (0, 0, 0, 0)
    assert (statistics.requests.submitted, statistics.requests.prompt_tokens, statistics.waiting) == (0, 0, 0)
    assert (statistics.running, sum(use.used for use in statistics.pages)) == (0, 0)
    asked = request(1)
    engine.submit(asked)
    await sink.wait_for_end(1)
    assert tuple(sink.tokens[1]) == true_stream(asked)
    assert engine.check_books() == []
    await engine.stop(0)
    assert source.violations == []
    assert sink.violations == []


REFUSED = {
    "stranger": (of_batches(stranger), "brought token 61, and the vocabulary has 61"),
    "no margins": (of_batches(no_margins), "0 margins for 1 emitted tokens"),
    "nan": (of_batches(nan_margins), "no finite logits.*model.dtype=float32"),
    "wrong counts": (of_batches(one_too_few), "does not fit"),
    "another step": (lambda result: replace(result, step_id=result.step_id + 1), "answered by step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_ends_the_start_with_what_it_was(case: str) -> None:
    spoil, text = REFUSED[case]

    async def scenario() -> None:
        group = BrokenGroup(describe(vocab_size=61))
        group.spoil = spoil
        with pytest.raises((WorkerError, ValueError), match=text):
            await warm_up(group, SETTINGS, None, ignore)

    asyncio.run(scenario())


@asynchronous
async def test_ranks_that_are_lost_meanwhile_are_named_and_the_start_takes_them_along() -> None:
    source = FakeSource(describe(), gated=True)
    engine = Engine(SettingsInForce(SETTINGS), source, RecordingSink(), trial=warm_up)
    starting = asyncio.create_task(engine.start())
    await settle_down()
    assert source.group.is_waiting
    assert not engine.is_serving
    source.group.lose(WorkerLost("rank 0: killed by signal 9"))
    with pytest.raises(WorkerLost, match="failed in the warm-up: rank 0: killed by signal 9"):
        await starting
    assert source.is_stopped


@asynchronous
async def test_pools_that_are_not_as_before_end_it() -> None:
    group = FakeGroup(describe(), dp=2)
    group.rank_violations[1] = ["slot 3 is held by nobody"]
    with pytest.raises(WarmUpFailed, match="slot 3 is held by nobody"):
        await warm_up(group, SETTINGS, None, ignore)


@asynchronous
async def test_a_rank_that_emits_nothing_is_given_up() -> None:
    group = BrokenGroup(describe())
    group.spoil = of_batches(
        lambda batch: replace(batch, emitted=tuple(() for _ in batch.emitted), margins=tuple(() for _ in batch.margins))
    )
    with pytest.raises(WorkerError):
        await warm_up(group, SETTINGS, None, ignore)


@asynchronous
async def test_new_ranks_are_tried_before_anybody_is_let_in_again() -> None:
    """A second life that generates nonsense is not served on; the third is."""

    class Source(FakeSource):
        def _next(self) -> FakeGroup:
            group = super()._next()
            if group.epoch == 2:
                group.rank_violations[0] = ["a page is lost"]
            return group

    source, sink, states = Source(describe()), RecordingSink(), []
    settings = SETTINGS.model_copy()
    engine = Engine(SettingsInForce(settings), source, sink, trial=warm_up, pause=no_pause)
    await engine.start()
    engine.add_state_listener(states.append)
    back = asyncio.Event()
    engine.add_state_listener(lambda is_serving: back.set() if is_serving else None)
    source.group.lose(WorkerLost("gone"))
    while not states:
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="recovering"):
        engine.submit(request(1))
    async with asyncio.timeout(10):
        await back.wait()
    assert states == [False, True]
    assert [group.epoch for group in source.groups] == [1, 2, 3]
    assert source.groups[1].plans, "it was tried"
    assert source.groups[2].plans, "and so was the one that serves"
    assert engine.statistics().restarts == 1
    engine.submit(request(2))
    await sink.wait_for_end(2)
    await engine.stop(0)
    assert source.violations == []


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, SIZES[0]),
        ({"num_pages": (8, 8)}, SIZES[1]),
        ({"max_model_len": 39}, SIZES[1]),
        ({"max_model_len": 2, "gamma_max": 0, "num_pages": (1, 1)}, SIZES[2]),
    ],
)
def test_small_pools_are_asked_for_less(changes: dict[str, object], size: tuple[int, int]) -> None:
    assert size_for(describe(**changes)) == size


def test_pools_that_hold_nothing_are_told_before_a_client_finds_out() -> None:
    with pytest.raises(WarmUpFailed, match=r"can serve nothing: .*; give cache.memory_mib more"):
        size_for(describe(num_pages=(1, 1), page_size=1))


def test_steps_that_hold_few_rows_take_more_of_them() -> None:
    settings = ServeSettings.model_validate({"scheduler": {"max_step_tokens": 6}, "speculation": {"gamma_max": 4}})

    async def scenario() -> None:
        group = FakeGroup(describe(), max_step_tokens=6)
        await warm_up(group, settings, None, ignore)
        assert group.violations == []
        assert group.mesh == Mesh()

    asyncio.run(scenario())
