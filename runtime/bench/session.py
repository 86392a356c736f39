"""Measures cells in order over gRPC, and puts the server's policy back. Knows no terminal and no files."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.bench.asked import Asked
from runtime.bench.borrowed_policy import BorrowedPolicy
from runtime.bench.completion import Clock, attempt, generate_request
from runtime.bench.condition import is_unbroken, when_serving
from runtime.bench.counters import MemoryUse, ServerCounts
from runtime.bench.errors import BenchError
from runtime.bench.figures import CellRun, Record
from runtime.bench.generator import Send, closed_loop, open_loop
from runtime.bench.load import Closed, Slot, poisson_arrivals
from runtime.bench.prompts import Prompts

if TYPE_CHECKING:
    from runtime.front.client import OutriderClient

SAMPLE_S = 0.1
"""Time between samples of memory."""
MAX_ANEW = 2
"""Times that a cell is measured anew after ranks were lost in it."""


class Session:
    """Measures what was asked for; `runs` holds the cells that are done, whatever becomes of the rest.

    note_cell: told of each cell before it. note_request: told of each request after it. clock: seconds.
    """

    def __init__(
        self,
        client: OutriderClient,
        asked: Asked,
        prompts: Prompts,
        *,
        note_cell: Callable[[Slot], None],
        note_request: Callable[[], None],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.runs: list[CellRun] = []
        self.started_at = ""
        """UTC, ISO 8601."""
        self.duration_s = 0.0
        self._client = client
        self._asked = asked
        self._prompts = prompts
        self._note_cell = note_cell
        self._note_request = note_request
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
            for slot in self._asked.slots():
                self._note_cell(slot)
                await when_serving(self._client, self._clock)
                await self._policy.switch(slot.policy)
                self.runs.append(await self._cell(slot))
        finally:
            self.duration_s = self._clock() - began_s
            await self._policy.put_back()

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
        samples = [MemoryUse.of(before)]
        async with self._sampling(samples):
            began_s = self._clock()
            records = await self._offer(slot, report_rounds=False)
            elapsed_s = self._clock() - began_s
        after = await self._client.get_status()
        if not is_unbroken(after, epoch):
            return None
        samples.append(MemoryUse.of(after))
        self._policy.check(after.policy)
        reads = slot.repeat == 0
        return CellRun(
            slot=slot,
            elapsed_s=elapsed_s,
            records=tuple(records),
            counts=ServerCounts.of(after.counters) - ServerCounts.of(before.counters),
            memory=tuple(samples),
            readings=tuple(before_it) if reads else (),
            warmup=() if reads else tuple(before_it),
        )

    @contextlib.asynccontextmanager
    async def _sampling(self, samples: list[MemoryUse]) -> AsyncIterator[None]:
        """Samples the server's memory while the block runs. A sample that fails is left out."""
        import grpc.aio

        async def sample() -> None:
            while True:
                await asyncio.sleep(SAMPLE_S)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    samples.append(MemoryUse.of(await self._client.get_status()))

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
        number = self._asked.warmup
        if not number:
            return []
        concurrency = slot.load.concurrency if isinstance(slot.load, Closed) else number
        with _first_refusal():
            return await closed_loop(self._sender(report_rounds=False), number, concurrency, self._clock)

    async def _offer(self, slot: Slot, *, report_rounds: bool) -> list[Record]:
        number, send = self._asked.requests_per_cell, self._sender(report_rounds=report_rounds)
        with _first_refusal():
            if isinstance(slot.load, Closed):
                return await closed_loop(send, number, slot.load.concurrency, self._clock)
            # Each repeat has arrivals of its own, the same for all policies.
            arrivals = poisson_arrivals(slot.load.rate, number, self._asked.seed + slot.repeat)
            return await open_loop(send, arrivals, self._clock)

    def _sender(self, *, report_rounds: bool) -> Send[Record]:
        asked = self._asked

        async def send(number: int, due_s: float) -> Record:
            prompt = number % len(self._prompts.ids)
            max_tokens = self._prompts.max_tokens[prompt]
            request = generate_request(
                self._prompts.ids[prompt],
                max_tokens,
                report_rounds=report_rounds,
                temperature=asked.temperature,
                seed=asked.seed + number,
                ignore_eos=asked.ignore_eos,
            )
            completion, _ = await attempt(self._client, request, self._clock)
            if completion.failure == "INVALID_ARGUMENT":
                raise BenchError(f"the server refuses prompt {prompt + 1} as malformed: {completion.failure_text}")
            self._note_request()
            return Record(due_s=due_s, max_tokens=max_tokens, completion=completion)

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
