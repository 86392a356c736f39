"""An engine that says what a script tells it, a step at a time. Identity, limits, counts and policy are the real ones.

Only the schedulers and the ranks are left out: `tests/front/test_engine_link.py` holds it to the real engine's conduct.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel.mesh import ONE_RANK, Mesh
from runtime.events import ErrorEvent, EventSink, TokenEvent
from runtime.front.errors import OutriderError, Unavailable
from runtime.intake import Intake
from runtime.request import Request, Usage
from runtime.settlement import Outcome, settle
from runtime.verification.policy import Fixed, Policy, PolicyState, PolicyStore
from workers.plan import WorkerDescription

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
    num_slots=64,
    accounting=(),
)


def margin_of(position: int) -> float:
    """The logit gap reported at an output position: exact in float32 and another at every position."""
    return 0.5 + position


@dataclass(slots=True)
class _Live:
    request: Request
    usage: Usage


class FakeEngine:
    """Emits `script(request)`, again and again if it is short, `run_length` tokens per request and step.

    Every run counts as that many less one accepted drafts. What was asked of it is kept in `submitted` and `aborted`.
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
    ) -> None:
        self.description = description
        self.mesh = mesh
        self.is_serving = True
        self.submitted: list[Request] = []
        self.aborted: list[int] = []
        self.live: dict[int, _Live] = {}
        self.step_id = 1
        self._sink = sink
        self._script = script
        self._run_length = run_length
        self._intake = Intake(max_waiting)
        self._policies = PolicyStore(Fixed(4), gamma_max=description.gamma_max, effective_step=1)
        self._listeners: list[Callable[[bool], None]] = []
        self._changed = asyncio.Event()

    @property
    def policy(self) -> PolicyState:
        return self._policies.state

    def next_uid(self) -> int:
        return self._intake.next_uid()

    def submit(self, request: Request) -> None:
        if not self.is_serving:
            raise Unavailable("the engine is not serving")
        self._intake.accept(request, self.description, num_waiting=len(self.live), num_openings=0)
        self.submitted.append(request)
        self.live[request.uid] = _Live(request, Usage(prompt=len(request.prompt), seed=request.sampling.seed))
        self._changed.set()

    def abort(self, uid: int) -> None:
        self.aborted.append(uid)
        self._end(uid)

    def add_state_listener(self, listener: Callable[[bool], None]) -> None:
        self._listeners.append(listener)

    async def set_policy(self, policy: Policy, expected_revision: int | None = None) -> PolicyState:
        return self._policies.set(policy, expected_revision=expected_revision, effective_step=self.step_id)

    def set_serving(self, is_serving: bool) -> None:
        self.is_serving = is_serving
        for listener in self._listeners:
            listener(is_serving)

    def fail(self, uid: int, error: OutriderError) -> None:
        """Ends a request with an error."""
        self._end(uid)
        self._sink.deliver([ErrorEvent(uid=uid, error=error)])

    def step(self) -> None:
        """One round of every live request."""
        self.step_id += 1
        events: list[TokenEvent | ErrorEvent] = []
        for live in list(self.live.values()):
            event = self._emit(live)
            live.usage = event.usage
            events.append(event)
            if event.finish is not None:
                self._end(event.uid)
        awaited = {event.uid for event in events if isinstance(event, TokenEvent) and event.needs_verdict}
        verdicts = self._sink.deliver(events)
        assert {verdict.uid for verdict in verdicts} == awaited, "each event that needs a verdict gets one"
        for verdict in verdicts:
            if verdict.stop:
                self._end(verdict.uid)

    async def run(self) -> None:
        """Steps for ever, whenever something is live."""
        while True:
            if not self.live:
                self._changed.clear()
                await self._changed.wait()
            self.step()
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; it is looked at whenever a request comes or goes."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _emit(self, live: _Live) -> TokenEvent:
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
        )
        return settle(live.request, live.usage, outcome)

    def _end(self, uid: int) -> None:
        live = self.live.pop(uid, None)
        if live is not None:
            self._intake.forget(live.request.request_id)
        self._changed.set()
