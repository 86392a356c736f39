"""A process that forks as Ray does while gRPC is at work in it: `python -m fakes.forker TIMES`. Prints how many of the
children ended other than by success."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

from fakes import echo_worker

from workers import wire
from workers.client import WorkerClient


def fork(times: int) -> int:
    def before_the_program() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    # A function to call makes it a real fork, with the handlers of all libraries.
    runs = (subprocess.run(["true"], preexec_fn=before_the_program, check=False) for _ in range(times))
    return sum(run.returncode != 0 for run in runs)


async def main(times: int) -> None:
    server, address = echo_worker.serve(1)
    client = WorkerClient(address, echo_worker.TERMS)
    await client.load(echo_worker.settings(), lambda *_: None)
    forking = asyncio.create_task(asyncio.to_thread(fork, times))
    step_id = 0
    while not forking.done():
        step_id += 1
        plan = echo_worker.plan(step_id, 1)
        await client.execute(plan, wire.encode_plan(plan))
    print(await forking)
    await client.close()
    server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
