"""Which of the bad news about a group of ranks is told as the cause, and when."""

from __future__ import annotations

import asyncio

import pytest

from parallel.mesh import Mesh
from runtime.cluster import inquest as module
from runtime.cluster.inquest import Inquest
from runtime.cluster.launcher import RankDied
from workers.client import LinkBroken
from workers.plan import CollectiveFailed, LoadError, RanksDisagree, StepTimeout, WorkerError, WorkerLost

PAIR = Mesh(tp=2)

BROKEN = LinkBroken("the link broke")
ECHO = CollectiveFailed("the peer is gone")
LATE = StepTimeout("step 3 has no result after 1 s")
RAISED = WorkerLost("ArithmeticError: no")
REFUSED = LoadError("norm.weight: missing")
DIED = RankDied("process 7 was killed by SIGKILL")
DISAGREE = RanksDisagree("step 3: ranks 0 and 1 ...")


@pytest.fixture(autouse=True)
def _short_aftermath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTERMATH_S", 0.05)


@pytest.mark.parametrize(
    ("news", "kind", "text"),
    [
        ([(0, ECHO), (1, DIED)], RankDied, "rank 1 (dp 0, tp 1): process 7 was killed by SIGKILL"),
        ([(1, BROKEN), (0, ECHO), (1, DIED)], RankDied, "rank 1 (dp 0, tp 1): process 7 was killed by SIGKILL"),
        ([(0, RAISED), (1, DIED)], RankDied, "rank 1 (dp 0, tp 1): process 7 was killed by SIGKILL"),
        ([(0, ECHO), (1, RAISED)], WorkerLost, "rank 1 (dp 0, tp 1): ArithmeticError: no"),
        ([(0, LATE), (1, LATE), (1, RAISED)], WorkerLost, "rank 1 (dp 0, tp 1): ArithmeticError: no"),
        ([(0, ECHO), (1, REFUSED)], LoadError, "rank 1 (dp 0, tp 1): norm.weight: missing"),
        ([(1, BROKEN), (0, ECHO)], CollectiveFailed, "rank 0 (dp 0, tp 0): the peer is gone"),
        ([(1, BROKEN)], LinkBroken, "rank 1 (dp 0, tp 1): the link broke"),
        ([(1, RAISED), (0, RAISED)], WorkerLost, "rank 1 (dp 0, tp 1): ArithmeticError: no"),
        ([(None, DISAGREE)], RanksDisagree, "step 3: ranks 0 and 1 ..."),
        # Who is late waits for the other, or is the other; who answers in the aftermath was the one that waited.
        (
            [(0, LATE), (1, LATE)],
            StepTimeout,
            "rank 0 (dp 0, tp 0), rank 1 (dp 0, tp 1): step 3 has no result after 1 s",
        ),
        ([(0, LATE), (1, LATE), (0, ECHO)], StepTimeout, "rank 1 (dp 0, tp 1): step 3 has no result after 1 s"),
        ([(0, ECHO), (1, LATE)], StepTimeout, "rank 1 (dp 0, tp 1): step 3 has no result after 1 s"),
        ([(0, LATE), (0, ECHO)], StepTimeout, "rank 0 (dp 0, tp 0): step 3 has no result after 1 s"),
    ],
)
def test_the_best_explanation_is_the_cause(
    news: list[tuple[int | None, WorkerError]], kind: type[WorkerError], text: str
) -> None:
    async def run() -> None:
        inquest = Inquest(PAIR)
        for rank, error in news:
            inquest.hear(rank, error)
        with pytest.raises(WorkerError) as caught:
            await asyncio.wait_for(inquest.fail(), 5)
        assert type(caught.value) is kind
        assert str(caught.value) == text

    asyncio.run(run())


@pytest.mark.parametrize("certain", [DIED, DISAGREE])
def test_what_is_certain_needs_no_aftermath(certain: WorkerError) -> None:
    async def run() -> None:
        inquest = Inquest(PAIR)
        inquest.hear(0, RAISED)
        assert not inquest.verdict.done()
        inquest.hear(1, certain)
        assert inquest.verdict.result().error is certain
        inquest.hear(0, DIED)  # too late to count
        assert inquest.verdict.result().ranks == (1,)

    asyncio.run(run())


def test_an_error_of_no_known_kind_is_a_lost_worker_that_names_it() -> None:
    async def run() -> None:
        inquest = Inquest(Mesh())
        inquest.hear(0, KeyError("slot"))
        with pytest.raises(WorkerLost, match=r"^rank 0: KeyError: 'slot'$"):
            await inquest.fail()

    asyncio.run(run())


def test_together_gives_what_all_came_to_in_rank_order() -> None:
    async def run() -> None:
        first = asyncio.Event()

        async def act(rank: int) -> int:
            if rank == 0:
                await first.wait()
            first.set()
            return rank

        tasks = [asyncio.create_task(act(rank)) for rank in range(2)]
        assert await Inquest(PAIR).together(tasks) == [0, 1]

    asyncio.run(run())


def test_a_rank_that_fails_ends_what_the_others_wait_in() -> None:
    async def run() -> None:
        is_cleaned_up = False

        async def hang() -> None:
            nonlocal is_cleaned_up
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                is_cleaned_up = True

        async def fail() -> None:
            raise RAISED

        inquest = Inquest(PAIR)
        tasks = [asyncio.create_task(hang()), asyncio.create_task(fail())]
        with pytest.raises(WorkerLost, match=r"^rank 1 .*ArithmeticError"):
            await asyncio.wait_for(inquest.together(tasks), 5)
        assert is_cleaned_up

    asyncio.run(run())


def test_a_death_ends_what_all_ranks_wait_in() -> None:
    async def run() -> None:
        inquest = Inquest(PAIR)
        tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(2)]
        together = asyncio.create_task(inquest.together(tasks))
        await asyncio.sleep(0)
        inquest.hear(1, DIED)
        with pytest.raises(RankDied):
            await asyncio.wait_for(together, 5)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(run())
