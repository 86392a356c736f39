"""The engine's books: which requests wait, run and have ended, what their steps brought, what the front is still to be
told. Knows no loop, no ranks and no policy.

A request is in one place at a time: in the queue, or running on the scheduler of the present life. It leaves by `end`,
whatever ends it, and with an event that says so unless the front knows. Each sequence of a request is one here, with a
uid of its own, and ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from runtime.events import ErrorEvent, EventSink, TokenEvent
from runtime.front.errors import AbortedByOperator, InternalError, InvalidRequest, OutriderError, Unavailable
from runtime.intake import Intake, check_servable
from runtime.life import Life
from runtime.live import EarlyEnd, End, LiveRequest, LiveRequests, RequestStatus
from runtime.observe.gathering import Gathering
from runtime.observe.records import UNOBSERVED, Observer
from runtime.outbox import Event, Outbox
from runtime.request import Finish, FinishReason, Request, sequences_of
from runtime.scheduler.queue import WaitingQueue
from runtime.settlement import Outcome, outcomes, settle
from runtime.statistics import Counters, EngineStatistics
from runtime.status import Aborted
from state.ledger import RunningSequence
from workers.demands import Constraint
from workers.plan import RankEnd, StepPlan, StepResult

log = logging.getLogger(__name__)

TIME_IS_UP = Finish(reason=FinishReason.TIME_LIMIT)


def cannot_follow(constraint: Constraint | None, problem: str) -> InvalidRequest:
    """What a request is told whose constraint ranks cannot follow. The field is named as in the message."""
    return InvalidRequest("constraint" if constraint is None else f"constraint.{constraint.kind}", problem)


def last_event(live: LiveRequest) -> TokenEvent:
    """That of a request whose time is up: it brings no tokens, and the end of the text, which may complete a stop
    string; of its prompt what was read and not told yet."""
    return TokenEvent(
        uid=live.request.uid,
        tokens=(),
        usage=live.usage,
        prompt_logprobs=tuple(live.prompt_logprobs),
        finish=TIME_IS_UP,
        needs_verdict=bool(live.request.stopping.stop_strings),
    )


class Settled(NamedTuple):
    """One sequence's part in a step's result."""

    sequence: RunningSequence
    request: Request
    outcome: Outcome


class Books:
    """One per engine, over all lives of the group.

    sink: the front. max_waiting: see Intake. clock: seconds, by which requests are timed. observer: hears of each
    request's end.
    """

    def __init__(
        self,
        sink: EventSink,
        *,
        max_waiting: Callable[[], int],
        clock: Callable[[], float],
        observer: Observer = UNOBSERVED,
    ) -> None:
        self.queue = WaitingQueue()
        self.live = LiveRequests(clock)
        self.counters = Counters()
        self.outbox = Outbox(sink)
        self.intake = Intake(max_waiting)
        self._gathering = Gathering(observer, clock)
        # Set while no request is live.
        self.idle = asyncio.Event()
        self.idle.set()
        # Ends that await the front's verdict; it comes before anything else can.
        self._finishing: dict[int, FinishReason] = {}
        self._clock = clock
        self._life: Life | None = None

    @property
    def life(self) -> Life:
        """The present life of the group, or the last one. Raises Unavailable before the first start."""
        if self._life is None:
            raise Unavailable("the server is starting")
        return self._life

    def adopt(self, life: Life) -> None:
        """Goes on with a new life. Nothing may run; requests that wait and that it cannot serve are failed."""
        self._life = life
        self.counters.fit(life.group.description.gamma_max)
        for request in list(self.queue):
            try:
                check_servable(request, life.group.description)
            except InvalidRequest as error:  # the group came back with less memory
                self.fail([request.uid], error)

    def accept(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest, DuplicateRequest or Overloaded; nothing is queued then."""
        self.intake.accept(
            request,
            self.life.group.description,
            num_waiting=len(self.queue),
            num_openings=self.life.scheduler.num_openings,
        )
        self.live.add(*sequences_of(request))
        self.queue.push(request)
        self.idle.clear()

    def note_starts(self, plan: StepPlan) -> None:
        """Those that enter with this plan have left the queue, and with the first of a request all its sequences."""
        for new in chain.from_iterable(batch.admitted for batch in plan.batches):
            for uid in (new.uid, *self.life.scheduler.followers(new.uid)):
                self.live.note_start(uid)
            # Who forks from its own slot reads on where another one has ended.
            if new.fork is not None and new.fork.slot != new.slot:
                self.live.note_fork(new.uid, len(new.prompt) - 1)

    def rounds(self, plan: StepPlan, result: StepResult) -> list[Settled]:
        """What a result says of the sequences that are still there: others were aborted while the step ran. Raises
        StalePlan."""
        scheduler = self.life.scheduler
        found = (
            (scheduler.find(outcome.dp_rank, outcome.slot, outcome.epoch), outcome)
            for outcome in outcomes(plan, result)
        )
        return [
            Settled(sequence, self.live[sequence.uid].request, outcome)
            for sequence, outcome in found
            if sequence is not None
        ]

    def settle(self, step_id: int, rounds: Sequence[Settled]) -> Iterator[TokenEvent]:
        """Commits a result to the ledgers, ends what is finished, and yields the events."""
        for sequence, request, outcome in rounds:
            try:
                sequence.commit(outcome.num_known, outcome.emitted)
                if outcome.end is RankEnd.BROKEN:
                    self.fail([sequence.uid], cannot_follow(request.sampling.constraint, outcome.problem))
                    continue
                self.live.note_prompt(sequence.uid, outcome.prompt_logprobs)
                if outcome.samples:
                    yield self._settle_round(sequence, outcome)
            except ValueError as error:
                log.error("step %d: %s", step_id, error, extra={"request_id": request.request_id})
                # Who waits for what it has read has no use for it now.
                followers = self.life.scheduler.followers(sequence.uid)
                self.fail([*followers, sequence.uid], InternalError(f"the worker's answer does not fit: {error}"))

    def _settle_round(self, sequence: RunningSequence, outcome: Outcome) -> TokenEvent:
        live = self.live[sequence.uid]
        event = settle(live.request, live.usage, outcome, live.prompt_logprobs)
        self.live.note_round(sequence.uid, event.usage)
        self.counters.add_round(outcome)
        sequence.awaiting_verdict = event.needs_verdict
        self._finish(event)
        return event

    def end_overdue(self) -> None:
        """Ends the requests whose time is up, wherever they are, while no verdict is awaited. Their last events are
        held, or delivered where they need a verdict."""
        assert not self._finishing, "the verdicts on what came before go first"
        undecided: list[Event] = []
        for uid in self.live.overdue():
            event = last_event(self.live[uid])
            self._finish(event)
            (undecided.append if event.needs_verdict else self.outbox.hold)(event)
        self.deliver(undecided)

    def _finish(self, event: TokenEvent) -> None:
        """Ends a request with its last event."""
        if event.finish is None:
            return
        # A stop string may have completed before; then that is the end, and tokens behind it never were.
        if event.needs_verdict:
            self._finishing[event.uid] = event.finish.reason
        else:
            self.end(event.uid, event.finish.reason)

    def deliver(self, events: list[Event]) -> None:
        """Hands events to the front and acts on its verdicts."""
        handover = self.outbox.hand_over(events)
        for uid, num_cut in handover.stopped:
            if uid in self.live:
                self.live.trim(uid, num_cut)
                self.counters.trim(num_cut)
                self.end(uid, FinishReason.STOP_STRING)
        for uid, error in handover.failed:
            self.end(uid, EarlyEnd.FAILED, error)
        for uid in handover.decided:
            if uid in self._finishing:
                self.end(uid, self._finishing[uid])
            elif (sequence := self.life.scheduler.sequence(uid)) is not None:
                sequence.awaiting_verdict = False
        for uid in handover.undecided:
            if uid in self._finishing:
                self.end(uid, self._finishing[uid])  # the front has had its end
            else:
                self.fail([uid], InternalError("the front gave no verdict"))

    def fail(self, uids: Iterable[int], error: OutriderError, end: EarlyEnd = EarlyEnd.FAILED) -> None:
        """Ends requests; their last events are held, and so not lost whatever fails next."""
        for uid in uids:
            if self.end(uid, end, error):
                self.outbox.hold(ErrorEvent(uid=uid, error=error))

    def waiting_constraints(self) -> Iterator[Constraint]:
        """Of the requests in the queue, each once, in order of service; requests may leave meanwhile."""
        for constraint in dict.fromkeys(request.sampling.constraint for request in self.queue):
            if constraint is not None and any(self._waiting_with(constraint)):
                yield constraint

    def fail_constrained(self, constraint: Constraint, error: OutriderError) -> None:
        """Ends the requests in the queue that have it."""
        self.fail(list(self._waiting_with(constraint)), error)

    def _waiting_with(self, constraint: Constraint) -> Iterator[int]:
        return (request.uid for request in self.queue if request.sampling.constraint == constraint)

    def end(self, uid: int, end: End, error: OutriderError | None = None) -> bool:
        """Lets go of a request wherever it is; False when it has ended already. Until that is done it is live.

        error: why, where it has neither finished nor lost its reader.
        """
        if uid not in self.live:
            return False
        emitted: Sequence[int] = ()
        if uid in self.queue:
            self.queue.remove(uid)
        elif (sequence := self.life.scheduler.sequence(uid)) is not None:
            emitted = sequence.log.emitted
            self.life.scheduler.release(uid)
        self._finishing.pop(uid, None)
        self.intake.forget(self.live[uid].request.request_id)
        self._gathering.add(self.live.remove(uid, end), end, error, emitted)
        if not self.live:
            self.idle.set()
        return True

    def close(self, error: OutriderError) -> None:
        """Ends all that is live. Where the books fail to let go of a request they forget it."""
        for uid in list(self.live):
            try:
                self.end(uid, EarlyEnd.FAILED, error)
            except Exception:
                log.exception("request %d is still in the books", uid)
                if uid in self.live:
                    self._gathering.add(self.live.remove(uid, EarlyEnd.FAILED), EarlyEnd.FAILED, error, ())
        self.idle.set()

    def abort_by_id(self, request_ids: Sequence[str]) -> Aborted:
        """Ends requests by their callers' names for them; what they committed is told before their last event, an
        AbortedByOperator."""
        uids: dict[str, list[int]] = {}
        for uid in self.live:
            uids.setdefault(self.live[uid].request.request_id, []).append(uid)
        wanted = tuple(dict.fromkeys(request_ids))
        found = tuple(request_id for request_id in wanted if request_id in uids)
        error = AbortedByOperator("an operator has ended the request")
        self.fail(chain.from_iterable(uids[request_id] for request_id in found), error, EarlyEnd.ABORTED)
        return Aborted(aborted=found, unknown=tuple(name for name in wanted if name not in uids))

    def list_live(self, limit: int) -> tuple[list[RequestStatus], int]:
        """At most `limit` of them, running ones in order of arrival before waiting ones in order of service; and how
        many are live."""
        scheduler = self.life.scheduler
        running = (uid for uid in self.live if uid not in self.queue)
        chosen = islice(chain(running, (request.uid for request in self.queue)), limit)
        now_s = self._clock()
        return [self.live[uid].status(now_s, scheduler.home(uid)) for uid in chosen], len(self.live)

    def statistics(self) -> EngineStatistics:
        return self.counters.view(
            dp_ranks=[scheduler.use() for scheduler in self.life.scheduler.schedulers],
            waiting=len(self.queue),
            requests=self.live.statistics(),
        )

    def check_integrity(self) -> list[str]:
        """One line per violated invariant; empty when all hold."""
        scheduler = self.life.scheduler
        problems = scheduler.check_integrity() + self.statistics().check_integrity()
        known = {request.uid for request in self.queue} | {sequence.uid for sequence in scheduler.running}
        if known != set(self.live):
            problems.append(f"live requests {sorted(self.live)}, queued or running {sorted(known)}")
        return problems
