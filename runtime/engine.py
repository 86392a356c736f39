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
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from configs.schema import ServeSettings
from parallel.mesh import Mesh
from runtime.events import ErrorEvent, EventSink, TokenEvent
from runtime.front.errors import InternalError, InvalidRequest, OutriderError, Unavailable
from runtime.intake import Intake, check_servable
from runtime.life import Life, begin_life, next_life
from runtime.link import GroupSource, RankProgress
from runtime.outbox import Event, Outbox
from runtime.request import Request, Usage
from runtime.scheduler.queue import WaitingQueue
from runtime.settlement import Outcome, outcomes, settle
from runtime.statistics import Counters, EngineStatistics
from runtime.verification.policy import Policy, PolicyState, PolicyStore, initial_policy
from state.ledger import RunningSequence
from workers.plan import StepPlan, StepResult, WorkerDescription, WorkerError, WorkerLost

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A request between submit and its last event; `usage` is that of its newest event."""

    request: Request
    usage: Usage


class Engine:
    """Runs requests on a group of ranks and tells the front what comes of them.

    groups: starts the group and brings it back.
    sink: takes events; the last one of a request is a finish or an error, unless an abort or a verdict ends it first.
    pause: waits a number of seconds between attempts to restart; tests pass their own.
    clock: seconds by which lives are told short or long; tests pass their own.
    """

    def __init__(
        self,
        settings: ServeSettings,
        groups: GroupSource,
        sink: EventSink,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._outbox = Outbox(sink)
        self._pause = pause
        self._clock = clock
        self._intake = Intake(settings.scheduler.max_waiting)
        self._queue = WaitingQueue()
        self._live: dict[int, _Live] = {}
        self._listeners: list[Callable[[bool], None]] = []
        self._life: Life | None = None
        self._policies: PolicyStore | None = None
        self._counters = Counters()
        self._is_serving = False
        self._is_stopping = False
        # Why the group is not there and what keeps it away; empty while it is.
        self._outage = ""
        self._work = asyncio.Event()
        self._nothing_live = asyncio.Event()
        self._nothing_live.set()
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self, progress: RankProgress = lambda rank, stage, done, total: None) -> None:
        """Starts the group and the loop. Raises WorkerError or ValueError when the model cannot be served so."""
        assert self._loop_task is None, "an engine starts once"
        group = await self._groups.start(progress)
        try:
            self._adopt(begin_life(group, self._queue, self._settings, None, now_s=self._clock()))
            policy = initial_policy(self._settings.speculation, self.description.gamma_max)
            self._policies = PolicyStore(policy, gamma_max=self.description.gamma_max, effective_step=1)
        except ValueError:
            await self._groups.stop()
            raise
        self._loop_task = asyncio.create_task(self._run(), name="engine loop")
        self._loop_task.add_done_callback(self._have_last_word)
        self._set_serving(True)

    async def stop(self, drain_s: float) -> None:
        """Refuses new requests, lets live ones finish for `drain_s` seconds, ends the rest with Unavailable, and stops
        the group. Idempotent."""
        self._is_stopping = True
        self._set_serving(False)
        if self._loop_task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._nothing_live.wait()
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
            self._loop_task = None
        try:
            self._fail(list(self._live), Unavailable("the server has stopped"))
            self._deliver(self._outbox.take())
        finally:
            await self._groups.stop()

    @property
    def description(self) -> WorkerDescription:
        """Rank 0 of the group in use, or of the last one. Raises Unavailable before the first start."""
        return self._current.group.description

    @property
    def ranks(self) -> tuple[WorkerDescription, ...]:
        """All ranks of that group, in order. Raises Unavailable before the first start."""
        return self._current.group.ranks

    @property
    def mesh(self) -> Mesh:
        """How they are laid out. Raises Unavailable before the first start."""
        return self._current.group.mesh

    @property
    def is_serving(self) -> bool:
        """Whether `submit` takes requests."""
        return self._is_serving

    def add_state_listener(self, listener: Callable[[bool], None]) -> None:
        """`listener` hears every change of `is_serving`; it must not raise."""
        self._listeners.append(listener)

    def next_uid(self) -> int:
        return self._intake.next_uid()

    def submit(self, request: Request) -> None:
        """Queues a request; its events follow.

        Raises Unavailable, InvalidRequest, DuplicateRequest or Overloaded; nothing is queued then.
        """
        if not self._is_serving:
            doing = f"recovering ({self._outage})" if self._outage else "starting or stopping"
            raise Unavailable(f"the server is {doing}; try again later")
        self._intake.accept(
            request,
            self.description,
            num_waiting=len(self._queue),
            num_openings=self._current.scheduler.num_openings,
        )
        self._live[request.uid] = _Live(request, Usage(prompt=len(request.prompt), seed=request.sampling.seed))
        self._queue.push(request)
        self._nothing_live.clear()
        self._work.set()

    def abort(self, uid: int) -> None:
        """Ends a request without further events. Its slot and pages are free for the next step. Unknown and ended
        requests are ignored."""
        self._outbox.forget(uid)
        self._end(uid)

    @property
    def policy(self) -> PolicyState:
        """Raises Unavailable before the first start."""
        return self._policy_store.state

    async def set_policy(self, policy: Policy, expected_revision: int | None = None) -> PolicyState:
        """Puts a policy in force for all sequences from the next planned step on; returns once that step is fixed.

        expected_revision: the revision the caller read; None replaces whatever is in force.

        Raises StaleRevision, InvalidRequest, or Unavailable before the first start.
        """
        store = self._policy_store
        step = self._current.scheduler.next_step_id
        return store.set(policy, expected_revision=expected_revision, effective_step=step)

    def statistics(self) -> EngineStatistics:
        """Raises Unavailable before the first start."""
        return self._counters.view(
            dp_ranks=[scheduler.use() for scheduler in self._current.scheduler.schedulers],
            waiting=len(self._queue),
        )

    def check_integrity(self) -> list[str]:
        """One line per violated invariant of the books; empty when all hold."""
        scheduler = self._current.scheduler
        problems = scheduler.check_integrity()
        known = {request.uid for request in self._queue} | {sequence.uid for sequence in scheduler.running}
        if known != set(self._live):
            problems.append(f"live requests {sorted(self._live)}, queued or running {sorted(known)}")
        return problems

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except WorkerError as error:
                cause = f"{type(error).__name__}: {error}"
                log.error("the group is lost: %s", cause)
                running = [sequence.uid for sequence in self._current.scheduler.running]
                self._fail(running, Unavailable(f"a worker was lost ({cause}); try again"))
                await self._recover(cause)
            except Exception as error:
                # Host and ranks may disagree now; nothing that either holds can be trusted.
                cause = f"the engine failed: {error!r}"
                log.exception("a round failed")
                self._fail(list(self._live), InternalError(cause))
                await self._recover(cause)

    def _have_last_word(self, loop_task: asyncio.Task[None]) -> None:
        """Ends everything when the loop does, other than by `stop`: nothing moves any more, and nobody may wait for it.

        The books are not trusted: a request is told of its end even where they fail to let go of it.
        """
        if self._is_stopping and loop_task.cancelling():
            return
        error = None if loop_task.cancelled() else loop_task.exception()
        cause = "it was cancelled" if error is None else repr(error)
        log.critical("the engine's loop has ended: %s; restart the server", cause, exc_info=error)
        failure = InternalError(f"the engine has ended ({cause})")
        self._outbox.report([*self._outbox.take(), *(ErrorEvent(uid=uid, error=failure) for uid in self._live)])
        for uid in list(self._live):
            try:
                self._end(uid)
            except Exception:
                log.exception("request %d is still in the books", uid)
        self._live.clear()
        self._nothing_live.set()
        self._set_serving(False)

    async def _turn(self) -> None:
        """One round if there is work; else waits for some."""
        life = self._current
        if life.group.lost.done():
            raise WorkerLost(life.group.lost.result())
        if life.scheduler.has_work:
            await self._round()
            return
        self._work.clear()
        self._deliver(self._outbox.take())
        await self._work.wait()

    async def _round(self) -> None:
        life = self._current
        started = time.perf_counter()
        plan = life.scheduler.plan(self._policy_store.state.policy)
        handed_over = time.perf_counter()
        execution = asyncio.create_task(life.group.link.execute(plan))
        try:
            # Lets the task run up to its first wait, so that the ranks compute while the front takes the events.
            await asyncio.sleep(0)
            self._deliver(self._outbox.take())
            result = await execution
        finally:
            execution.cancel()
        answered = time.perf_counter()
        undecided: list[Event] = []
        for event in self._book(plan, result):
            (undecided.append if event.needs_verdict else self._outbox.hold)(event)
        self._deliver(undecided)
        if plan.num_sequences:
            host_s = (handed_over - started) + (time.perf_counter() - answered)
            self._counters.add_step(result, execute_s=answered - handed_over, host_s=host_s)
            life.num_steps += 1

    def _book(self, plan: StepPlan, result: StepResult) -> Iterator[TokenEvent]:
        """Commits a result to the ledgers, ends what is finished, and yields the events."""
        scheduler = self._current.scheduler
        num_drafts = plan.gamma if plan.feed_drafter else 0
        for outcome in outcomes(plan, result):
            sequence = scheduler.find(outcome.dp_rank, outcome.slot, outcome.epoch)
            if sequence is None:
                continue  # aborted while the step ran
            try:
                sequence.commit(outcome.num_known, outcome.emitted, num_drafts)
                if outcome.samples:
                    yield self._book_round(sequence, outcome)
            except ValueError as error:
                log.error("step %d: %s", plan.step_id, error)
                self._fail([sequence.uid], InternalError(f"the worker's answer does not fit: {error}"))

    def _book_round(self, sequence: RunningSequence, outcome: Outcome) -> TokenEvent:
        live = self._live[sequence.uid]
        event = settle(live.request, live.usage, outcome)
        live.usage = event.usage
        self._counters.add_round(outcome)
        sequence.awaiting_verdict = event.needs_verdict
        if event.finish is not None:
            self._end(sequence.uid)
        return event

    def _deliver(self, events: list[Event]) -> None:
        """Hands events to the front and acts on its verdicts."""
        handover = self._outbox.hand_over(events)
        for uid in handover.over:
            self._end(uid)
        for uid in handover.decided:
            if (sequence := self._current.scheduler.sequence(uid)) is not None:
                sequence.awaiting_verdict = False
        self._fail(handover.undecided, InternalError("the front gave no verdict"))

    async def _recover(self, cause: str) -> None:
        """Brings the group back; what its loss ended is told first.

        Waiting requests wait on, but no longer than one start may take.
        """
        self._outage = cause
        self._set_serving(False)
        self._deliver(self._outbox.take())
        patience_s = self._settings.cluster.start_timeout_s
        patience = asyncio.get_running_loop().call_later(patience_s, self._give_up_waiting)

        def note_failure(error: Exception) -> None:
            self._outage = f"{cause}; a restart failed: {error}"

        try:
            life = await next_life(
                self._current,
                self._groups,
                self._queue,
                self._settings,
                cause=cause,
                pause=self._pause,
                clock=self._clock,
                on_failure=note_failure,
            )
        finally:
            patience.cancel()
        self._outage = ""
        self._adopt(life)
        self._counters.restarts += 1
        self._policy_store.fit(self.description.gamma_max, effective_step=life.scheduler.next_step_id)
        for request in list(self._queue):
            try:
                check_servable(request, self.description)
            except InvalidRequest as error:  # the group came back with less memory
                self._fail([request.uid], error)
        self._deliver(self._outbox.take())
        self._set_serving(not self._is_stopping)

    def _give_up_waiting(self) -> None:
        waiting = [request.uid for request in self._queue]
        self._fail(waiting, Unavailable(f"a worker was lost and is not back ({self._outage}); try again"))
        self._deliver(self._outbox.take())

    def _adopt(self, life: Life) -> None:
        self._life = life
        self._counters.fit(life.group.description.gamma_max)
        life.group.lost.add_done_callback(lambda lost: self._work.set())

    def _fail(self, uids: Iterable[int], error: OutriderError) -> None:
        """Ends requests; their last events are held, and so not lost whatever fails next."""
        for uid in uids:
            if self._end(uid):
                self._outbox.hold(ErrorEvent(uid=uid, error=error))

    def _end(self, uid: int) -> bool:
        """Lets go of a request wherever it is; False when it has ended already. Until that is done it is live."""
        live = self._live.get(uid)
        if live is None:
            return False
        if uid in self._queue:
            self._queue.remove(uid)
        elif self._current.scheduler.sequence(uid) is not None:
            self._current.scheduler.release(uid)
        self._intake.forget(live.request.request_id)
        del self._live[uid]
        if not self._live:
            self._nothing_live.set()
        return True

    def _set_serving(self, is_serving: bool) -> None:
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            for listener in self._listeners:
                listener(is_serving)

    @property
    def _current(self) -> Life:
        if self._life is None:
            raise Unavailable("the server is starting")
        return self._life

    @property
    def _policy_store(self) -> PolicyStore:
        if self._policies is None:
            raise Unavailable("the server is starting")
        return self._policies
