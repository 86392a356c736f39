"""An engine that says what a script tells it, a step at a time. Identity, limits, counts and policy are the real ones.

Only the schedulers and the ranks are left out, and a step brings a prompt and a run of tokens at once:
`tests/front/test_engine_link.py` holds it to the real engine's conduct.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice

from fakes.policies import FakePolicies

from parallel.mesh import ONE_RANK, Mesh
from runtime.books import TIME_IS_UP, last_event
from runtime.events import ErrorEvent, EventSink, TokenEvent
from runtime.front.errors import AbortedByOperator, InvalidRequest, OutriderError, Unavailable
from runtime.intake import Intake
from runtime.link import RankPlace
from runtime.live import EarlyEnd, End, LiveRequest, LiveRequests, RequestStatus
from runtime.readiness import Readiness
from runtime.request import FinishReason, Request, sequences_of
from runtime.scheduler.queue import WaitingQueue
from runtime.settlement import Outcome, settle
from runtime.statistics import Counters, EngineStatistics, PoolUse, RankUse
from runtime.status import Aborted, EngineStatus, IntegrityReport
from state.pages import num_pages_for, num_reserved_tokens
from workers.demands import Constraint, TokenLogprob
from workers.plan import StepResult, StepTimings, WorkerDescription

DESCRIPTION = WorkerDescription(
    model_type="qwen3_next",
    vocab_size=4096,
    context_length=4096,
    max_model_len=512,
    eos_token_ids=(0,),
    dtype="float32",
    numerics="default",
    device="cpu",
    num_parameters=7_700_000,
    parameter_bytes=30_800_000,
    gamma_max=8,
    page_size=16,
    cache_groups=("target", "drafter"),
    num_pages=(1000, 1000),
    page_bytes=(64, 32),
    num_slots=64,
    slot_bytes=1000,
    record_bytes=5000,
    accounting=(),
)


def margin_of(position: int) -> float:
    """The logit gap reported at an output position: exact in float32 and another at every position."""
    return 0.5 + position


def logprobs_of(tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogprob, ...]:
    """Those reported of tokens, exact in float32 and another for every token; () where none are wanted."""
    if num_top is None:
        return ()
    top = tuple((rank, -rank / 4) for rank in range(num_top))
    return tuple(TokenLogprob(token=token, logprob=-token / 4, top=top) for token in tokens)


class FakeEngine:
    """Emits `script(request)`, again and again if it is short, `run_length` tokens per request and step.

    Every run counts as that many less one accepted drafts; every step takes a quarter of a second on every rank.
    clock: seconds; tests pass their own.
    What was asked of it is kept in `submitted` and `aborted`. rank_violations: what each rank finds when it checks
    itself. problems: of constraints that cannot be followed; prepared: those that it was asked to make ready;
    may_prepare: while it is not set, that takes its time.
    """

    def __init__(
        self,
        sink: EventSink,
        script: Callable[[Request], Sequence[int]],
        *,
        run_length: int = 3,
        max_waiting: int = 1024,
        description: WorkerDescription = DESCRIPTION,
        mesh: Mesh = ONE_RANK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.description = replace(description, num_ranks=mesh.size)
        self.mesh = mesh
        self.submitted: list[Request] = []
        self.aborted: list[int] = []
        self.rank_violations: list[list[str]] = [[] for _ in range(mesh.size)]
        self.problems: dict[Constraint, str] = {}
        self.prepared: list[Constraint] = []
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.live = LiveRequests(clock)
        self.step_id = 1
        self._sink = sink
        self._script = script
        self._run_length = run_length
        self._max_waiting = max_waiting
        self._clock = clock
        self._began_s = clock()
        self._epoch = 1
        self._intake = Intake(lambda: max_waiting)
        self._queue = WaitingQueue()
        # Of each running request, its data-parallel rank.
        self._homes: dict[int, int] = {}
        self._counters = Counters()
        self._counters.fit(max(description.gamma_max, run_length - 1))
        self._readiness = Readiness(self._clock)
        self._readiness.start()
        self._changed = asyncio.Event()
        self.policies = FakePolicies(description.gamma_max, lambda: self.step_id, self._changed.set)

    @property
    def is_serving(self) -> bool:
        return self._readiness.is_serving

    @property
    def has_ended(self) -> bool:
        return self._readiness.has_ended

    def next_uid(self, count: int = 1) -> int:
        return self._intake.next_uid(count)

    async def prepare(self, constraint: Constraint) -> None:
        try:
            self._expect_serving()
            self.prepared.append(constraint)
            await self.may_prepare.wait()
            if self.problems.get(constraint):
                raise InvalidRequest(f"constraint.{constraint.kind}", self.problems[constraint])
        except OutriderError as error:
            self.live.note_refusal(error)
            raise

    def submit(self, request: Request) -> None:
        num_openings = sum(self.description.num_slots - use.running for use in self._uses())
        try:
            self._expect_serving()
            self._intake.accept(request, self.description, num_waiting=len(self._queue), num_openings=num_openings)
        except OutriderError as error:
            self.live.note_refusal(error)
            raise
        self.submitted.append(request)
        self.live.add(*sequences_of(request))
        self._queue.push(request)
        self._changed.set()

    def abort(self, uid: int) -> None:
        self.aborted.append(uid)
        self._end(uid, EarlyEnd.ABORTED)

    def abandon(self, uid: int, error: OutriderError) -> None:
        self.aborted.append(uid)
        self._end(uid, EarlyEnd.FAILED)

    def abort_by_id(self, request_ids: Sequence[str]) -> Aborted:
        names = {uid: self.live[uid].request.request_id for uid in self.live}
        wanted = tuple(dict.fromkeys(request_ids))
        for uid in [uid for uid, name in names.items() if name in wanted]:
            self.fail(uid, AbortedByOperator("an operator has ended the request"), EarlyEnd.ABORTED)
        found = tuple(name for name in wanted if name in names.values())
        return Aborted(aborted=found, unknown=tuple(name for name in wanted if name not in found))

    def add_state_listener(self, listener: Callable[[bool], None]) -> None:
        self._readiness.add_listener(listener)

    def drain(self) -> None:
        self._readiness.drain(True)

    def resume(self) -> None:
        if self._readiness.is_stopping:
            raise Unavailable("the server is stopping; ask another one")
        self._readiness.drain(False)

    def withdraw(self) -> None:
        """Is no good place to send requests to any more, and takes them."""
        self._readiness.withdraw()

    def wind_down(self) -> None:
        """The front lets nobody else in."""
        self._readiness.wind_down()

    def stall(self, is_stalled: bool) -> None:
        """A step takes long, or has ended."""
        self._readiness.stall(is_stalled)

    def end(self) -> None:
        """Its loop has ended for good."""
        self._readiness.end()

    def close_intake(self) -> None:
        """Refuses new requests for good."""
        self._readiness.stop()

    def statistics(self) -> EngineStatistics:
        return self._counters.view(dp_ranks=self._uses(), waiting=len(self._queue), requests=self.live.statistics())

    def status(self) -> EngineStatus:
        ranks = range(self.mesh.size)
        places = tuple(RankPlace(name=f"fake-{rank}", address=f"fake:{rank + 1}") for rank in ranks)
        return EngineStatus(
            state=self._readiness.state,
            outage=self._readiness.outage,
            losses=self._readiness.losses,
            uptime_s=self._clock() - self._began_s,
            mesh=self.mesh,
            ranks=tuple(replace(self.description, rank=rank) for rank in ranks),
            places=() if self._readiness.outage else places,
            max_waiting=self._max_waiting,
            policy=self.policies.state,
            step=self.step_id - 1,
            epoch=self._epoch,
            statistics=self.statistics(),
            speculation=self.policies.view,
        )

    def live_requests(self, limit: int) -> tuple[list[RequestStatus], int]:
        running = (uid for uid in self.live if uid not in self._queue)
        chosen = islice(chain(running, (request.uid for request in self._queue)), limit)
        now_s = self._clock()
        return [self.live[uid].status(now_s, self._homes.get(uid)) for uid in chosen], len(self.live)

    async def check_integrity(self) -> IntegrityReport:
        if self._readiness.outage:
            raise Unavailable(f"not all ranks can be asked ({self._readiness.outage}); try again later")
        problems = [f"rank {rank}: {problem}" for rank, lines in enumerate(self.rank_violations) for problem in lines]
        return IntegrityReport(
            violations=(*self.statistics().check_integrity(), *problems), ranks_checked=self.mesh.size
        )

    def set_serving(self, is_serving: bool) -> None:
        """Loses the ranks and what runs on them, or brings them back."""
        if not is_serving:
            self._readiness.lose("a rank has ended")
            for uid in list(self._homes):
                self.fail(uid, Unavailable("a worker was lost (a rank has ended); try again"))
            return
        self._epoch += 1
        self._counters.restarts += 1
        self._readiness.regain()
        self._changed.set()

    def fail(self, uid: int, error: OutriderError, end: EarlyEnd = EarlyEnd.FAILED) -> None:
        """Ends a request with an error."""
        self._end(uid, end)
        self._sink.deliver([ErrorEvent(uid=uid, error=error)])

    def step(self) -> None:
        """Admits what there is room for, then one round of every running request."""
        self._admit()
        self.step_id += 1
        events = self._events()
        finishing = {event.uid: event.finish.reason for event in events if event.finish is not None}
        timings = tuple(StepTimings(total_s=0.25, target_s=0.125) for _ in range(self.mesh.size))
        result = StepResult(step_id=self.step_id - 1, epoch=self._epoch, batches=(), timings=timings)
        self._counters.add_step(result, execute_s=0.5, host_s=0.125)
        awaited = {event.uid for event in events if event.needs_verdict}
        verdicts = self._sink.deliver([*events])
        assert {verdict.uid for verdict in verdicts} == awaited, "each event that needs a verdict gets one"
        for verdict in verdicts:
            if verdict.stop:
                self.live.trim(verdict.uid, verdict.num_cut)
                self._counters.trim(verdict.num_cut)
            if verdict.stop or verdict.gone:
                self._end(verdict.uid, FinishReason.STOP_STRING if verdict.stop else EarlyEnd.FAILED)
        for uid, reason in finishing.items():
            self._end(uid, reason)

    def _events(self) -> list[TokenEvent]:
        """Of a round of every running request, and of those that wait when their time is up."""
        events, overdue = [], self.live.overdue()
        for uid in self._homes:
            event = self._emit(self.live[uid])
            self.live.note_round(uid, event.usage)
            events.append(replace(event, finish=event.finish or TIME_IS_UP) if uid in overdue else event)
        return [*events, *(last_event(self.live[uid]) for uid in overdue if uid not in self._homes)]

    async def run(self) -> None:
        """Steps for ever, whenever something is live and the ranks are there."""
        while True:
            if not self.live or self._readiness.outage:
                self._changed.clear()
                await self._changed.wait()
                continue
            self.step()
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; it is looked at whenever a request or a listener comes or goes."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _expect_serving(self) -> None:
        if not self._readiness.takes_requests:
            raise Unavailable(f"the server is {self._readiness.explain()}; try again later")

    def _admit(self) -> None:
        """From the head of the queue on, each to the data-parallel rank with the fewest, as long as one has room."""
        while (family := self._queue.head) is not None:
            uses = self._uses()
            home = min(range(len(uses)), key=lambda dp_rank: uses[dp_rank].running)
            num_pages = sum(map(self._num_pages, family))
            if uses[home].slots_free < len(family) or any(pool.free < num_pages for pool in uses[home].pages):
                return
            for request in self._queue.pop():
                self._homes[request.uid] = home
                self.live.note_start(request.uid)
                self.live.note_fork(request.uid, len(request.prompt) - 1 if request.index else 0)

    def _uses(self) -> list[RankUse]:
        """What each data-parallel rank holds, its running requests at their largest."""
        uses = []
        for dp_rank in range(self.mesh.dp):
            held = [self.live[uid].request for uid, home in self._homes.items() if home == dp_rank]
            num_pages = sum(map(self._num_pages, held))
            groups = zip(self.description.cache_groups, self.description.num_pages, strict=True)
            pools = tuple(PoolUse(group=group, free=total - num_pages, used=num_pages) for group, total in groups)
            num_free = self.description.num_slots - len(held)
            uses.append(RankUse(running=len(held), slots_free=num_free, slots_used=len(held), pages=pools))
        return uses

    def _num_pages(self, request: Request) -> int:
        """All but the first of a family share the full pages of their prompt."""
        num_tokens, page_size = len(request.prompt) + request.stopping.max_tokens, self.description.page_size
        num_pages = num_pages_for(num_reserved_tokens(num_tokens, self.description.gamma_max), page_size)
        return num_pages - (len(request.prompt) - 1) // page_size if request.index else num_pages

    def _emit(self, live: LiveRequest) -> TokenEvent:
        stopping, done = live.request.stopping, live.usage.completion
        script = self._script(live.request)
        run = [script[(done + offset) % len(script)] for offset in range(self._run_length)]
        ends = [i + 1 for i, token in enumerate(run) if token in (*stopping.eos_token_ids, *stopping.stop_token_ids)]
        kept = min([len(run), stopping.max_tokens - done, *ends])
        outcome = Outcome(
            slot=live.request.uid,
            epoch=1,
            num_known=1,
            num_drafts=len(run) - 1,
            samples=True,
            drafted=tuple(run[:-1]),
            num_admitted=len(run) - 1,
            num_accepted=len(run) - 1,
            emitted=tuple(run[:kept]),
            margins=tuple(map(margin_of, range(done, done + kept))),
            logprobs=logprobs_of(run[:kept], live.request.report.num_logprobs),
        )
        self._counters.add_round(outcome)
        told = logprobs_of(live.request.prompt[1:], live.request.report.num_prompt_logprobs)
        return settle(live.request, live.usage, outcome, told)

    def _end(self, uid: int, end: End) -> None:
        if uid in self.live:
            if uid in self._queue:
                self._queue.remove(uid)
            self._homes.pop(uid, None)
            self._intake.forget(self.live[uid].request.request_id)
            self.live.remove(uid, end)
        self._changed.set()
