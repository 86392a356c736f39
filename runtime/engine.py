"""The loop: admit, plan, execute, book, deliver. Knows no gRPC, no text and no tensors.

One round:

    plan = scheduler.plan(policy)         who runs, on how many rows
    result = await link.execute(plan)     meanwhile the front works on the events of the round before
    events = book(plan, result)           ledger, usage, ends

Everything here runs on one event loop; no method may be called from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from parallel.mesh import Mesh
from runtime.books import Books, cannot_follow
from runtime.events import ErrorEvent, EventSink
from runtime.front.errors import InternalError, OutriderError, Unavailable
from runtime.in_force import SettingsInForce
from runtime.life import Life, Trial, begin_life, untried
from runtime.link import GroupSource, RankProgress
from runtime.live import EarlyEnd, RequestStatus
from runtime.observe.records import UNOBSERVED, Observer, StepRecord
from runtime.outbox import Event
from runtime.policies import Policies, ProfileSource
from runtime.readiness import Readiness
from runtime.recovery import bring_back
from runtime.request import Request
from runtime.stall import StallWatch
from runtime.statistics import EngineStatistics
from runtime.status import Aborted, EngineStatus, IntegrityReport
from workers.demands import Constraint
from workers.plan import WorkerDescription, WorkerError, WorkerLost

log = logging.getLogger(__name__)


class Engine:
    """Runs requests on a group of ranks and tells the front what comes of them.

    groups: starts the group and brings it back.
    sink: takes events; the last one of a request is a finish or an error, unless an abort or a verdict ends it first.
    profiles: where the hardware profile of the ranks is found; None looks for none.
    trial: what ranks of each life must do before anybody is let in.
    state_dir: where the policy and what is learnt of drafts are kept over restarts; None keeps nothing.
    observer: hears of every request and step.
    pause: waits a number of seconds between attempts to restart; tests pass their own.
    clock: seconds, by which lives are told short or long and requests are timed; tests pass their own.

    policies: those in force, what an operator may do with them, and the planner that follows them.
    """

    def __init__(
        self,
        settings: SettingsInForce,
        groups: GroupSource,
        sink: EventSink,
        *,
        profiles: ProfileSource | None = None,
        trial: Trial = untried,
        state_dir: Path | None = None,
        observer: Observer = UNOBSERVED,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._pause = pause
        self._clock = clock
        self._observer = observer
        self._books = Books(
            sink, max_waiting=lambda: settings.now.scheduler.max_waiting, clock=clock, observer=observer
        )
        self._readiness = Readiness(clock)
        self._stalls = StallWatch(lambda: settings.now.server.stall_s, self._readiness.stall, clock)
        self._profiles = profiles
        self._trial = trial
        self.policies = Policies(settings, state_dir, lambda: self._books.life.scheduler.next_step_id)
        self._began_s = clock()
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._stall_task: asyncio.Task[None] | None = None

    async def start(self, progress: RankProgress = lambda rank, stage, done, total: None) -> None:
        """Starts the group and the loop. Raises WorkerError or ValueError when the model cannot be served so."""
        assert self._loop_task is None, "an engine starts once"
        group = await self._groups.start(progress)
        try:
            found = None
            if self._profiles is not None:
                may_measure = self._settings.now.speculation.measure_profile
                found = await self._profiles.find(group, progress, may_measure=may_measure)
            tried = await self._trial(group, self._settings.now, found.life if found else None, progress)
            self._adopt(begin_life(group, self._books.queue, self._settings.now, tried, now_s=self._clock()))
            self.policies.begin(self.description, found, capacity=self._capacity)
        except (ValueError, WorkerError):
            await self._groups.stop()
            raise
        self._loop_task = asyncio.create_task(self._run(), name="engine loop")
        self._loop_task.add_done_callback(self._have_last_word)
        self._stall_task = asyncio.create_task(self._stalls.run(), name="stall watch")
        self._readiness.start()

    async def stop(self, drain_s: float) -> None:
        """Refuses new requests, lets live ones finish for `drain_s` seconds, ends the rest with Unavailable, and stops
        the group. Idempotent."""
        self.close_intake()
        if self._loop_task is not None and self._stall_task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._books.idle.wait()
            self._loop_task.cancel()
            self._stall_task.cancel()
            await asyncio.wait({self._loop_task, self._stall_task})
            self._loop_task = self._stall_task = None
            self.policies.keep()
        try:
            self._books.fail(list(self._books.live), Unavailable("the server has stopped"))
            self._books.deliver(self._books.outbox.take())
        finally:
            await self._groups.stop()

    @property
    def description(self) -> WorkerDescription:
        """Rank 0 of the group in use, or of the last one. Raises Unavailable before the first start."""
        return self._books.life.group.description

    @property
    def ranks(self) -> tuple[WorkerDescription, ...]:
        """All ranks of that group, in order. Raises Unavailable before the first start."""
        return self._books.life.group.ranks

    @property
    def mesh(self) -> Mesh:
        """How they are laid out. Raises Unavailable before the first start."""
        return self._books.life.group.mesh

    @property
    def is_serving(self) -> bool:
        """Whether this is a good place to send requests to. `submit` takes some in other states too: see Readiness."""
        return self._readiness.is_serving

    @property
    def has_ended(self) -> bool:
        """The loop has ended for good, and nobody has asked for that."""
        return self._readiness.has_ended

    def add_state_listener(self, listener: Callable[[bool], None]) -> None:
        """`listener` hears `is_serving` after every change of it or of `has_ended`; it must not raise."""
        self._readiness.add_listener(listener)

    def drain(self) -> None:
        """Refuses new requests until `resume`; live ones go on. Idempotent."""
        self._readiness.drain(True)

    def resume(self) -> None:
        """Takes requests again. Idempotent. Raises Unavailable when the engine is stopping."""
        if self._readiness.is_stopping:
            raise Unavailable("the server is stopping; ask another one")
        self._readiness.drain(False)

    def withdraw(self) -> None:
        """For good: `is_serving` ends, and requests are still taken. Idempotent."""
        self._readiness.withdraw()

    def wind_down(self) -> None:
        """For good: the front lets nobody else in, and what it has let in may still be submitted. Idempotent."""
        self._readiness.wind_down()

    def close_intake(self) -> None:
        """Refuses new requests for good; live ones go on until `stop` ends them. Idempotent."""
        self._readiness.stop()

    def next_uid(self, count: int = 1) -> int:
        """The first of `count` uids in a row that no sequence had before."""
        return self._books.intake.next_uid(count)

    async def prepare(self, constraint: Constraint) -> None:
        """Has the ranks that decide make a constraint ready, beside the steps. Raises InvalidRequest that says why it
        cannot be followed, or Unavailable; both count as refusals."""
        try:
            self._expect_open()
            try:
                problem = await self._books.life.group.link.prepare(constraint)
            except WorkerError as error:
                raise Unavailable(f"the constraint could not be compiled ({error}); try again") from None
            if problem:
                raise cannot_follow(constraint, problem)
        except OutriderError as error:
            self._books.live.note_refusal(error)
            raise

    def submit(self, request: Request) -> None:
        """Queues a request; its events follow.

        Raises Unavailable, InvalidRequest, DuplicateRequest or Overloaded; nothing is queued then.
        """
        try:
            self._expect_open()
            self._books.accept(request)
        except OutriderError as error:
            self._books.live.note_refusal(error)
            raise
        self._work.set()

    def abort(self, uid: int) -> None:
        """Ends a request that its client has left, without further events. Its slot and pages are free for the next
        step. Unknown and ended requests are ignored."""
        self._books.outbox.forget(uid)
        self._books.end(uid, EarlyEnd.ABORTED)

    def abandon(self, uid: int, error: OutriderError) -> None:
        """Like `abort`, for a request whose stream the front has failed: it counts as failed, not as aborted. error:
        what its client is told."""
        self._books.outbox.forget(uid)
        self._books.end(uid, EarlyEnd.FAILED, error)

    def abort_by_id(self, request_ids: Sequence[str]) -> Aborted:
        """Ends requests by their callers' names for them; what they committed is told before their last event, an
        AbortedByOperator. Raises Unavailable before the first start."""
        aborted = self._books.abort_by_id(request_ids)
        self._books.deliver(self._books.outbox.take())
        return aborted

    def statistics(self) -> EngineStatistics:
        """Raises Unavailable before the first start."""
        return self._books.statistics()

    def status(self) -> EngineStatus:
        """Raises Unavailable before the first start."""
        life, readiness = self._books.life, self._readiness
        group = life.group
        return EngineStatus(
            state=readiness.state,
            outage=readiness.outage,
            losses=readiness.losses,
            uptime_s=self._clock() - self._began_s,
            mesh=group.mesh,
            ranks=group.ranks,
            places=() if readiness.outage else group.places,
            max_waiting=self._settings.now.scheduler.max_waiting,
            policy=self.policies.state,
            step=life.scheduler.next_step_id - 1,
            epoch=group.epoch,
            statistics=self.statistics(),
            speculation=self.policies.planner.view(),
        )

    def live_requests(self, limit: int) -> tuple[list[RequestStatus], int]:
        """At most `limit` of them, running ones in order of arrival before waiting ones in order of service; and how
        many are live. Raises Unavailable before the first start."""
        return self._books.list_live(limit)

    def check_books(self) -> list[str]:
        """One line per violated invariant of the host's books; empty when all hold."""
        return self._books.check_integrity()

    async def check_integrity(self) -> IntegrityReport:
        """Checks the books and has every rank check itself. Raises Unavailable when the ranks are not there."""
        try:
            found = await self._books.life.group.link.check_integrity()
        except WorkerError as error:
            raise Unavailable(f"not all ranks can be asked ({error}); try again later") from None
        problems = [f"rank {rank}: {problem}" for rank, lines in enumerate(found) for problem in lines]
        return IntegrityReport(violations=(*self.check_books(), *problems), ranks_checked=len(found))

    def _expect_open(self) -> None:
        if not self._readiness.takes_requests:
            raise Unavailable(f"the server is {self._readiness.explain()}; try again later")

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except WorkerError as error:
                cause = f"{type(error).__name__}: {error}"
                log.error("the group is lost: %s", cause)
                self._books.end_overdue()
                running = [sequence.uid for sequence in self._books.life.scheduler.running]
                self._books.fail(running, Unavailable(f"a worker was lost ({cause}); try again"))
                await self._recover(cause)
            except Exception as error:
                # Host and ranks may disagree now; nothing that either holds can be trusted.
                cause = f"the engine failed: {error!r}"
                log.exception("a round failed")
                self._books.fail(list(self._books.live), InternalError(cause))
                await self._recover(cause)

    def _have_last_word(self, loop_task: asyncio.Task[None]) -> None:
        """Ends everything when the loop does, other than by `stop`: nothing moves any more, and nobody may wait for it.

        The books are not trusted: a request is told of its end even where they fail to let go of it.
        """
        if self._readiness.is_stopping and loop_task.cancelling():
            return
        error = None if loop_task.cancelled() else loop_task.exception()
        cause = "it was cancelled" if error is None else repr(error)
        log.critical("the engine's loop has ended: %s; restart the server", cause, exc_info=error)
        failure = InternalError(f"the engine has ended ({cause})")
        outbox = self._books.outbox
        outbox.report([*outbox.take(), *(ErrorEvent(uid=uid, error=failure) for uid in self._books.live)])
        self._books.close(failure)
        self._readiness.end()

    async def _turn(self) -> None:
        """One round if there is work; else waits for some."""
        life = self._books.life
        if life.group.lost.done():
            raise WorkerLost(life.group.lost.result())
        self._books.end_overdue()
        if life.scheduler.has_work:
            await self._round()
            return
        self._work.clear()
        self._books.deliver(self._books.outbox.take())
        self.policies.planner.catch_up()
        await self._work.wait()

    async def _round(self) -> None:
        life = self._books.life
        started = time.perf_counter()
        plan = life.scheduler.plan(self.policies.planner)
        self._books.note_starts(plan)
        handed_over = time.perf_counter()
        execution = asyncio.create_task(life.group.link.execute(plan))
        try:
            # Lets the task run up to its first wait, so that the ranks compute while the front takes the events.
            await asyncio.sleep(0)
            self._books.deliver(self._books.outbox.take())
            self.policies.planner.catch_up()
            self._stalls.begin()
            result = await execution
        finally:
            execution.cancel()
        self._stalls.end()
        answered = time.perf_counter()
        undecided: list[Event] = []
        rounds = self._books.rounds(plan, result)
        for event in self._books.settle(plan.step_id, rounds):
            (undecided.append if event.needs_verdict else self._books.outbox.hold)(event)
        self._books.deliver(undecided)
        if plan.num_sequences:
            plan_s, execute_s, book_s = handed_over - started, answered - handed_over, time.perf_counter() - answered
            record = StepRecord(
                plan=plan, result=result, plan_s=plan_s, execute_s=execute_s, book_s=book_s, is_first=not life.num_steps
            )
            self._books.counters.add_step(result, execute_s=execute_s, host_s=plan_s + book_s)
            self.policies.planner.learn(
                plan, [(request, outcome) for _, request, outcome in rounds], measured_s=record.took_s
            )
            self._observer.note_step(record)
            life.num_steps += 1

    async def _recover(self, cause: str) -> None:
        """Brings the group back; what its loss ended is told first."""
        self._readiness.lose(cause)
        self._stalls.end()  # with the ranks gone it changes nothing that anybody sees
        self._books.deliver(self._books.outbox.take())
        life = await bring_back(
            *(self._books, self._readiness, self._groups, self._settings.now, self._adopt),
            cause=cause,
            trial=self._trial,
            pause=self._pause,
            clock=self._clock,
        )
        self._books.counters.restarts += 1
        found = None
        if self._profiles is not None:  # the ranks may be on another machine now
            found = await self._profiles.find(life.group, lambda *done: None, may_measure=False)
        self.policies.fit(self.description.gamma_max, found, capacity=self._capacity)
        self._books.deliver(self._books.outbox.take())
        if not life.group.lost.done():  # else the next turn finds out, and nobody is told of a moment of health
            self._readiness.regain()

    def _adopt(self, life: Life) -> None:
        self._books.adopt(life)
        life.group.lost.add_done_callback(lambda lost: self._work.set())

    @property
    def _capacity(self) -> int:
        """Sequences that can run at once."""
        return self.mesh.dp * self.description.num_slots
