"""A front over the fake engine in a process of its own, which can be killed. It steps when it is told to.

Says a line for its address, then one for every request that it takes: `ready: ADDRESS`, `took: REQUEST`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes.front import Front, serving

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class FrontProcess:
    address: str
    process: asyncio.subprocess.Process

    async def took(self) -> str:
        """Waits for its next request; the id."""
        assert self.process.stdout
        line = (await self.process.stdout.readline()).decode()
        assert line.startswith("took: "), f"it has ended: {line!r}"
        return line.removeprefix("took: ").strip()

    def step(self) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"\n")

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def front_process() -> AsyncIterator[FrontProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", f"import sys; sys.path[:0] = [{str(TESTS)!r}]; from fakes.front_process import main; main()"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    try:
        line = (await process.stdout.readline()).decode()
        assert line.startswith("ready: "), "it did not start"
        front = FrontProcess(line.removeprefix("ready: ").strip(), process)
        yield front
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def main() -> None:
    async def serve() -> None:
        async with serving(steps_by_itself=False) as front:
            print(f"ready: {front.address}", flush=True)
            told = asyncio.create_task(_tell_of_requests(front))
            commands = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
            )
            while await commands.readline():
                front.engine.step()
            told.cancel()

    asyncio.run(serve())


async def _tell_of_requests(front: Front) -> None:
    told: list[str] = []
    while True:
        await front.engine.until(lambda: len(front.engine.submitted) > len(told))
        for request in front.engine.submitted[len(told) :]:
            print(f"took: {request.request_id}", flush=True)
            told.append(request.request_id)
