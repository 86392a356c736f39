"""Measures cell after cell on one server and keeps what is done; puts the server's policy back. Knows no terminal and
no files."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from runtime.bench.asked import Asked
from runtime.bench.completion import Clock, attempt, generate_request
from runtime.bench.counters import MemoryUse, ServerCounts
from runtime.bench.figures import CellRun, Record
from runtime.bench.generator import Send, closed_loop, open_loop
from runtime.bench.load import Closed, Policy, Slot, poisson_arrivals
from runtime.bench.prepare import BenchError
from runtime.bench.prompts import Prompts

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2
    from runtime.front.client import OutriderClient

SAMPLE_S = 0.1
"""Time between samples of memory."""
PUT_BACK_S = 10.0
"""How long a server may take to answer the last change of policy."""


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
        self.policy_left = ""
        """Why the policy of before is not in force again; empty where it is."""
        self.started_at = ""
        """UTC, ISO 8601."""
        self.duration_s = 0.0
        self._client = client
        self._asked = asked
        self._prompts = prompts
        self._note_cell = note_cell
        self._note_request = note_request
        self._clock = clock
        self._revision = 0

    async def run(self) -> None:
        """Measures all cells. However it ends, the policy that was in force at the start is put back, unless somebody
        else has set another.

        Raises BenchError where somebody does, and AioRpcError where calls of the operator's fail.
        """
        self.started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        began_s = self._clock()
        before = await self._client.get_policy()
        self._revision = before.revision
        try:
            for slot in self._asked.slots():
                self._note_cell(slot)
                await self._switch(slot.policy)
                self.runs.append(await self._measure(slot))
        finally:
            self.duration_s = self._clock() - began_s
            if self._revision != before.revision:
                await self._put_back(before.policy)

    async def _switch(self, policy: Policy) -> None:
        """Raises BenchError where the policy in force is not the one we left."""
        import grpc.aio

        switching = asyncio.ensure_future(self._client.set_policy(policy.gamma, expected_revision=self._revision))
        try:
            state = await asyncio.shield(switching)
        except asyncio.CancelledError:
            # The server switches all the same, and only its answer tells the revision that is put back from.
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(PUT_BACK_S):
                    self._revision = (await switching).revision
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.ABORTED:
                raise _changed() from None
            raise
        self._revision = state.revision

    async def _put_back(self, policy: operator_pb2.VerificationPolicy) -> None:
        import grpc.aio

        try:
            async with asyncio.timeout(PUT_BACK_S):
                await self._client.switch_policy(policy, expected_revision=self._revision)
        except TimeoutError:
            self.policy_left = f"the server did not answer in {PUT_BACK_S:g} s"
        except grpc.aio.AioRpcError as error:
            self.policy_left = f"{error.code().name}: {error.details()}"

    async def _measure(self, slot: Slot) -> CellRun:
        """Raises BenchError where the policy was changed meanwhile."""
        readings = await self._before(slot)
        before = await self._client.get_status()
        samples = [MemoryUse.of(before)]
        async with self._sampling(samples):
            began_s = self._clock()
            records = await self._offer(slot, report_rounds=False)
            elapsed_s = self._clock() - began_s
        after = await self._client.get_status()
        samples.append(MemoryUse.of(after))
        if after.policy.revision != self._revision:
            raise _changed()
        return CellRun(
            slot=slot,
            elapsed_s=elapsed_s,
            records=tuple(records),
            counts=ServerCounts.of(after.counters) - ServerCounts.of(before.counters),
            memory=tuple(samples),
            readings=tuple(readings),
        )

    @contextlib.asynccontextmanager
    async def _sampling(self, samples: list[MemoryUse]) -> AsyncIterator[None]:
        """Samples the server's memory while the block runs."""

        async def sample() -> None:
            while True:
                await asyncio.sleep(SAMPLE_S)
                samples.append(MemoryUse.of(await self._client.get_status()))

        sampling = asyncio.create_task(sample())
        try:
            yield
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling

    async def _before(self, slot: Slot) -> list[Record]:
        """Warms up. Before a first repeat with the whole load, whose rounds are given; else nothing is."""
        if slot.repeat == 0:
            return await self._offer(slot, report_rounds=True)
        number = self._asked.warmup
        if number:
            concurrency = slot.load.concurrency if isinstance(slot.load, Closed) else number
            await closed_loop(self._sender(report_rounds=False), number, concurrency, self._clock)
        return []

    async def _offer(self, slot: Slot, *, report_rounds: bool) -> list[Record]:
        number, send = self._asked.requests_of(slot.load), self._sender(report_rounds=report_rounds)
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
            self._note_request()
            return Record(due_s=due_s, max_tokens=max_tokens, completion=completion)

        return send


def _changed() -> BenchError:
    return BenchError(
        "somebody else changed the server's policy meanwhile: the cell is not counted, and the policy stays as they "
        "set it; measure again when they are done"
    )
