"""One plan to all ranks and one result back, with links that answer as they are told, and a deadline for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from fakes import echo_worker
from fakes.barrier import NoBarrier

from parallel.mesh import Mesh
from runtime.cluster import inquest as inquest_module
from runtime.cluster.group import GroupLink
from runtime.cluster.inquest import Inquest
from runtime.cluster.launcher import RankDied
from workers import wire
from workers.demands import Constraint
from workers.plan import CollectiveFailed, RankReport, RanksDisagree, StepPlan, StepTimeout, WorkerError, WorkerLost


@pytest.fixture(autouse=True)
def _short_aftermath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquest_module, "AFTERMATH_S", 0.05)


class ScriptedRank:
    """A link that answers as an echo worker would once `answer` or `fail` is called; reports come in order."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        settings = echo_worker.settings()
        parallel = settings.parallel.model_copy(update={"dp": mesh.dp, "tp": mesh.tp, "ep": mesh.ep})
        seat = settings.seat.model_copy(update={"rank": rank})
        self._worker = echo_worker.EchoWorker(
            settings.model_copy(update={"parallel": parallel, "seat": seat}), NoBarrier()
        )
        self._permits: asyncio.Queue[WorkerError | None] = asyncio.Queue()
        self.received: list[bytes] = []
        self.prepared: list[Constraint] = []
        self.num_cancelled = 0

    def answer(self) -> None:
        self._permits.put_nowait(None)

    def fail(self, error: WorkerError) -> None:
        self._permits.put_nowait(error)

    async def execute(self, plan: StepPlan, encoded: bytes) -> RankReport:
        self.received.append(encoded)
        try:
            error = await self._permits.get()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if error is not None:
            raise error
        return self._worker.execute(plan)

    async def prepare(self, constraint: Constraint) -> str:
        self.prepared.append(constraint)
        await asyncio.sleep(0)
        return self._worker.prepare(constraint)


class House:
    def __init__(self, mesh: Mesh, *, step_timeout_s: float = 5, checks: bool = True) -> None:
        self.ranks = [ScriptedRank(mesh, rank) for rank in range(mesh.size)]
        self.inquest = Inquest(mesh)
        self.link = GroupLink(mesh, self.ranks, self.inquest, step_timeout_s=step_timeout_s, checks=checks)  # type: ignore[arg-type]

    async def step(self, step_id: int, uid: int | None = None, *, dp: int = 1) -> asyncio.Task[object]:
        """A step that all ranks have been told of."""
        task: asyncio.Task[object] = asyncio.create_task(self.link.execute(echo_worker.plan(step_id, 1, uid, dp=dp)))  # type: ignore[arg-type]
        while not all(len(rank.received) >= step_id for rank in self.ranks):
            await asyncio.sleep(0)
        return task


def run(act: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await act()

    asyncio.run(bounded())


def test_every_rank_gets_the_same_bytes_and_leaders_give_the_tokens() -> None:
    async def act() -> None:
        house = House(Mesh(dp=2, tp=2, ep=4))
        step = await house.step(1, dp=2)
        for rank in reversed(house.ranks):
            rank.answer()
        result = await step
        assert {rank.received[0] for rank in house.ranks} == {wire.encode_plan(echo_worker.plan(1, 1, dp=2))}
        assert all(rank.received[0] is house.ranks[0].received[0] for rank in house.ranks)
        assert [len(batch.emitted) for batch in result.batches] == [2, 0]  # type: ignore[attr-defined]
        assert [timings.total_s for timings in result.timings] == [1.5, 2.5, 3.5, 4.5]  # type: ignore[attr-defined]

    run(act)


def test_results_come_in_order_though_several_steps_are_in_flight() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2))
        steps = [await house.step(t) for t in range(1, 4)]
        for rank in house.ranks:
            for _ in steps:
                rank.answer()
        assert [result.step_id for result in await asyncio.gather(*steps)] == [1, 2, 3]  # type: ignore[attr-defined]

    run(act)


def test_the_first_failure_ends_the_step_while_the_others_hang() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2))
        step = await house.step(1)
        house.ranks[1].fail(WorkerLost("ArithmeticError: no"))
        with pytest.raises(WorkerLost, match=r"^rank 1 \(dp 0, tp 1\): ArithmeticError: no$"):
            await step
        assert house.ranks[0].num_cancelled == 1
        with pytest.raises(WorkerLost, match=r"^rank 1 .* no$"):
            await house.link.execute(echo_worker.plan(2, 1))
        assert len(house.ranks[0].received) == 1  # nothing more was sent

    run(act)


def test_the_echo_of_a_death_waits_for_the_death() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2))
        step = await house.step(1)
        house.ranks[0].fail(CollectiveFailed("the peer is gone"))
        await asyncio.sleep(0)
        assert not step.done()
        house.inquest.hear(1, RankDied("process 9 was killed by SIGKILL"))
        with pytest.raises(RankDied, match=r"^rank 1 .*process 9 was killed"):
            await step

    run(act)


def test_every_step_in_flight_ends_with_the_same_cause() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2))
        steps = [await house.step(t) for t in (1, 2)]
        house.inquest.hear(0, RankDied("process 9 was killed by SIGKILL"))
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RankDied, RankDied]
        assert len({str(outcome) for outcome in outcomes}) == 1

    run(act)


def test_a_deadline_names_the_ranks_that_have_not_answered() -> None:
    async def act() -> None:
        house = House(Mesh(dp=3), step_timeout_s=0.2)
        step = await house.step(1, dp=3)
        house.ranks[1].answer()
        begin = time.monotonic()
        with pytest.raises(
            StepTimeout, match=r"^rank 0 \(dp 0, tp 0\), rank 2 \(dp 2, tp 0\): step 1 has no result after 0\.2 s$"
        ):
            await step
        assert 0.2 <= time.monotonic() - begin < 2

    run(act)


def test_who_only_waited_for_another_is_not_blamed_for_the_deadline() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2), step_timeout_s=0.2)
        step = await house.step(1)
        while not house.inquest._heard:
            await asyncio.sleep(0.01)
        house.ranks[0].fail(CollectiveFailed("timed out"))
        with pytest.raises(StepTimeout, match=r"^rank 1 \(dp 0, tp 1\): step 1"):
            await step

    run(act)


def test_the_deadline_counts_from_the_result_before() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2), step_timeout_s=0.6)
        steps = [await house.step(t) for t in (1, 2)]
        await asyncio.sleep(0.4)
        for rank in house.ranks:
            rank.answer()
        await steps[0]
        await asyncio.sleep(0.4)  # 0.8 s after its plan, 0.4 s after the result before it
        for rank in house.ranks:
            rank.answer()
        await steps[1]

    run(act)


def test_a_report_that_waits_for_a_blocked_runtime_is_in_time() -> None:
    """The ranks answer at once; the loop stands still past the deadline and must not blame them."""

    async def act() -> None:
        house = House(Mesh(tp=2), step_timeout_s=0.4)
        step = await house.step(1)
        await asyncio.wait([step], timeout=0.1)  # a part of their time
        loop = asyncio.get_running_loop()
        time.sleep(0.6)  # the standstill itself
        for rank in house.ranks:
            loop.call_soon(rank.answer)
        assert (await step).step_id == 1  # type: ignore[attr-defined]
        assert not house.inquest.verdict.done()

    run(act)


def test_a_standstill_puts_a_deadline_off_and_not_away() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2), step_timeout_s=0.3)
        step = await house.step(1)
        time.sleep(0.6)
        begin = time.monotonic()
        with pytest.raises(StepTimeout):
            await step
        assert 0.1 < time.monotonic() - begin < 2

    run(act)


@pytest.mark.parametrize("uid", [echo_worker.UID_COMMITS_OTHERWISE, echo_worker.UID_JOINS_ONCE_MORE])
def test_ranks_that_disagree_end_the_step_before_anything_is_handed_on(uid: int) -> None:
    async def act() -> None:
        house = House(Mesh(tp=2))
        step = await house.step(1, echo_worker.at_rank(uid, 1))
        for rank in house.ranks:
            rank.answer()
        with pytest.raises(RanksDisagree, match=r"^step 1: .*rank 0 .*rank 1"):
            await step
        assert isinstance(house.inquest.verdict.result().error, RanksDisagree)

    run(act)


def test_unchecked_ranks_are_believed() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2), checks=False)
        step = await house.step(1, echo_worker.at_rank(echo_worker.UID_COMMITS_OTHERWISE, 1))
        for rank in house.ranks:
            rank.answer()
        await step

    run(act)


def test_a_step_that_is_given_up_is_given_up_at_every_rank() -> None:
    async def act() -> None:
        house = House(Mesh(tp=2))
        steps = [await house.step(t) for t in (1, 2)]
        for step in steps:
            step.cancel()
        await asyncio.wait(steps)
        assert all(step.cancelled() for step in steps)
        while not all(rank.num_cancelled == 2 for rank in house.ranks):
            await asyncio.sleep(0)

    run(act)


@pytest.mark.parametrize(
    ("mesh", "deciding"),
    [(Mesh(), [0]), (Mesh(tp=2), [0]), (Mesh(dp=2, ep=2), [0, 1]), (Mesh(dp=2, tp=2, ep=4), [0, 2])],
    ids=str,
)
def test_a_constraint_is_prepared_by_the_ranks_that_decide_and_the_first_problem_counts(
    mesh: Mesh, deciding: list[int]
) -> None:
    async def act() -> None:
        house = House(mesh)
        fine = Constraint(kind="regex", text="")
        assert await house.link.prepare(fine) == ""
        assert [rank for rank, each in enumerate(house.ranks) if each.prepared == [fine]] == deciding
        assert sum(len(each.prepared) for each in house.ranks) == len(deciding)
        assert await house.link.prepare(Constraint(kind="regex", text="no such rule")) == "no such rule at rank 0"

    run(act)


def test_a_rank_that_cannot_say_is_told_and_ends_nothing() -> None:
    async def act() -> None:
        house = House(Mesh(dp=2, ep=2))

        async def busy(constraint: Constraint) -> str:
            raise WorkerError("compiles others")

        prepare, house.ranks[1].prepare = house.ranks[1].prepare, busy  # type: ignore[method-assign]
        with pytest.raises(WorkerError, match="compiles others"):
            await house.link.prepare(Constraint(kind="regex", text=""))
        house.ranks[1].prepare = prepare  # type: ignore[method-assign]
        assert await house.link.prepare(Constraint(kind="regex", text="")) == ""
        assert not house.inquest.verdict.done()

    run(act)
