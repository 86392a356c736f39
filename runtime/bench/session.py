"""Measures cells in order over gRPC, and puts the server's policy back. Knows no terminal and no files."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.bench.asked import Asked
from runtime.bench.borrowed_policy import BorrowedPolicy
from runtime.bench.completion import Clock, attempt
from runtime.bench.condition import is_unbroken, when_serving
from runtime.bench.counters import MemoryUse, PlanCounts, PlanMoment, ServerCounts
from runtime.bench.errors import BenchError, PolicyRefused
from runtime.bench.figures import CellRun, Record
from runtime.bench.generator import Send, closed_loop, open_loop
from runtime.bench.load import Closed, Load, Policy, Slot, poisson_arrivals
from runtime.bench.prompts import Prompts
from runtime.bench.recording import Recording
from runtime.bench.requests import cell_request, recorded_request, with_edits

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2, operator_pb2
    from runtime.front.client import OutriderClient

SAMPLE_S = 0.1
"""Time between samples of memory and plans."""
MAX_PUT_OFF = 3
"""Times that a cell whose policy is refused waits for the others."""
MAX_ANEW = 2
"""Times that a cell is measured anew after ranks were lost in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A moment of the server in a cell."""

    memory: MemoryUse
    plan: PlanMoment

    @classmethod
    def of(cls, status: operator_pb2.GetStatusResponse, at_s: float) -> _Sample:
        return cls(memory=MemoryUse.of(status), plan=PlanMoment.of(status.speculation, at_s))


class Session:
    """Measures what was asked for; `runs` holds the cells that are done, whatever becomes of the rest.

    note_cell: told of each cell before it. note_request: told of each request after it. note_recording: told before
        outputs are recorded. note_put_off: told why the cell that was noted last comes later. clock: seconds.
    """

    def __init__(
        self,
        client: OutriderClient,
        asked: Asked,
        prompts: Prompts,
        *,
        note_cell: Callable[[Slot], None],
        note_request: Callable[[], None],
        note_recording: Callable[[], None] = lambda: None,
        note_put_off: Callable[[str], None] = lambda reason: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.runs: list[CellRun] = []
        self.started_at = ""
        """UTC, ISO 8601."""
        self.duration_s = 0.0
        self.asked = asked
        """With rates in place of shares once outputs have been recorded."""
        self._client = client
        self._recording: Recording | None = None
        self._prompts = prompts
        self._note_cell = note_cell
        self._note_request = note_request
        self._note_recording = note_recording
        self._note_put_off = note_put_off
        self._clock = clock
        self._policy = BorrowedPolicy(client)

    @property
    def policy_left(self) -> str:
        """Why the policy of before is not in force again; empty where it is, or is somebody else's."""
        return self._policy.left

    async def run(self) -> None:
        """Measures all cells. However it ends, the policy that was in force at the start is put back, unless somebody
        else has set another.

        Raises BenchError where somebody does, where the server refuses requests for good, and where it takes one for
        malformed; AioRpcError where calls of the operator's fail.
        """
        self.started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        began_s = self._clock()
        await self._policy.borrow()
        try:
            if self.asked.records:
                self._recording = await self._record()
                self._prompts = with_edits(self.asked, self._prompts, self._recording)
                self.asked = self.asked.at_rate(self._recording.requests_per_s)
            await self._run_cells()
        finally:
            self.duration_s = self._clock() - began_s
            await self._policy.put_back()

    async def _run_cells(self) -> None:
        """A cell whose policy is refused comes after all others: a busy minute spoils a profile for a while."""
        waiting, times_put_off = deque(self.asked.slots()), Counter[Slot]()
        while waiting:
            slot = waiting.popleft()
            self._note_cell(slot)
            await when_serving(self._client, self._clock)
            try:
                await self._policy.switch(slot.policy)
            except PolicyRefused as refusal:
                times_put_off[slot] += 1
                if times_put_off[slot] > MAX_PUT_OFF or not waiting:
                    raise
                waiting.append(slot)
                self._note_put_off(str(refusal))
                continue
            self.runs.append(await self._cell(slot))

    async def _record(self) -> Recording:
        """Every prompt once, decoded plainly. Raises BenchError where one fails."""
        self._note_recording()
        await when_serving(self._client, self._clock)
        await self._policy.switch(Policy(None))
        began_s, number = self._clock(), len(self._prompts.ids)
        send = self._sender(lambda number: recorded_request(self.asked, self._prompts, number))
        with _first_refusal():
            records = await closed_loop(send, number, self.asked.recording_concurrency, self._clock)
        elapsed_s = self._clock() - began_s
        for prompt, record in enumerate(records):
            if record.completion.failure:
                raise BenchError(
                    f"prompt {prompt + 1} could not be recorded: {record.completion.failure}: "
                    f"{record.completion.failure_text}"
                )
        outputs = tuple(record.completion.tokens for record in records)
        return Recording(outputs=outputs, requests_per_s=number / elapsed_s)

    async def _cell(self, slot: Slot) -> CellRun:
        """Measures a cell, anew where ranks were lost meanwhile: what a server cannot serve is no measurement."""
        for num_lost in range(MAX_ANEW + 1):
            run = await self._measure(slot)
            if run is not None:
                return replace(run, measured_anew=num_lost)
        raise BenchError(
            f"{slot.load}, {slot.policy}: the server lost its ranks in each of {MAX_ANEW + 1} measurements; see its log"
        )

    async def _measure(self, slot: Slot) -> CellRun | None:
        """None where ranks were lost meanwhile. Raises BenchError where the server drains or stops, and where the
        policy was changed."""
        epoch = (await when_serving(self._client, self._clock)).epoch
        before_it = await self._before(slot)
        before = await self._client.get_status()
        if not is_unbroken(before, epoch):
            return None
        samples = [_Sample.of(before, 0.0)]
        async with self._sampling(samples):
            began_s = self._clock()
            records = await self._offer(slot, report_rounds=False)
            elapsed_s = self._clock() - began_s
        after = await self._client.get_status()
        if not is_unbroken(after, epoch):
            return None
        samples.append(_Sample.of(after, elapsed_s))
        self._policy.check(after.policy)
        reads = slot.repeat == 0
        return CellRun(
            slot=slot,
            elapsed_s=elapsed_s,
            records=tuple(records),
            counts=ServerCounts.of(after.counters) - ServerCounts.of(before.counters),
            plans=PlanCounts.of(after.speculation) - PlanCounts.of(before.speculation),
            memory=tuple(sample.memory for sample in samples),
            # The newest step before the load is another load's.
            moments=tuple(sample.plan for sample in samples[1:]),
            fallback=after.policy.fallback,
            followed=self._followed(records),
            readings=tuple(before_it) if reads else (),
            warmup=() if reads else tuple(before_it),
        )

    def _followed(self, records: Sequence[Record]) -> tuple[int, ...]:
        """Of each output, tokens as recorded; () where nothing was recorded."""
        recording, num_prompts = self._recording, len(self._prompts.ids)
        if recording is None:
            return ()
        return tuple(
            recording.followed(number % num_prompts, record.completion.tokens) for number, record in enumerate(records)
        )

    @contextlib.asynccontextmanager
    async def _sampling(self, samples: list[_Sample]) -> AsyncIterator[None]:
        """Samples the server's memory and plans while the block runs. A sample that fails is left out."""
        import grpc.aio

        began_s = self._clock()

        async def sample() -> None:
            while True:
                await asyncio.sleep(SAMPLE_S)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    status = await self._client.get_status()
                    samples.append(_Sample.of(status, self._clock() - began_s))

        sampling = asyncio.create_task(sample())
        try:
            yield
        finally:
            sampling.cancel()
            # Not `await sampling`: that could not be told from a cancellation of our own.
            await asyncio.wait((sampling,))
        if not sampling.cancelled():
            sampling.result()

    async def _before(self, slot: Slot) -> list[Record]:
        """Warms up; before a first repeat with the whole load, whose requests report their rounds."""
        if slot.repeat == 0:
            return await self._offer(slot, report_rounds=True)
        number = self.asked.warmup
        if not number:
            return []
        concurrency = slot.load.concurrency if isinstance(slot.load, Closed) else number
        with _first_refusal():
            send = self._cell_sender(slot.load, report_rounds=False)
            return await closed_loop(send, number, concurrency, self._clock)

    async def _offer(self, slot: Slot, *, report_rounds: bool) -> list[Record]:
        number = self.asked.requests_of(slot.load)
        send = self._cell_sender(slot.load, report_rounds=report_rounds)
        with _first_refusal():
            if isinstance(slot.load, Closed):
                return await closed_loop(send, number, slot.load.concurrency, self._clock)
            # Each repeat has arrivals of its own, the same for all policies.
            arrivals = poisson_arrivals(slot.load.rate, number, self.asked.seed + slot.repeat)
            return await open_loop(send, arrivals, self._clock)

    def _cell_sender(self, load: Load, *, report_rounds: bool) -> Send[Record]:
        def request_of(number: int) -> inference_pb2.GenerateRequest:
            return cell_request(self.asked, self._prompts, number, load, self._recording, report_rounds=report_rounds)

        return self._sender(request_of)

    def _sender(self, request_of: Callable[[int], inference_pb2.GenerateRequest]) -> Send[Record]:
        async def send(number: int, due_s: float) -> Record:
            prompt = number % len(self._prompts.ids)
            completion, _ = await attempt(self._client, request_of(number), self._clock)
            if completion.failure == "INVALID_ARGUMENT":
                raise BenchError(f"the server refuses prompt {prompt + 1} as malformed: {completion.failure_text}")
            self._note_request()
            return Record(due_s=due_s, max_tokens=self._prompts.max_tokens[prompt], completion=completion)

        return send


@contextlib.contextmanager
def _first_refusal() -> Iterator[None]:
    """Of the errors of requests that ended a load, the first, by itself."""
    try:
        yield
    except ExceptionGroup as group:
        refusals = group.subgroup(BenchError)
        if refusals is None:
            raise
        raise refusals.exceptions[0] from None
