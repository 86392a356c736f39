"""Callers of an OpenAI-compatible gateway, each with one stream after the other; gateway_load.py starts them.

Of twenty streams one is left before its end. Goes on until standard input ends, and prints what it had as JSON: streams
that ended, that were left, and why others failed; seconds to the first event, and between events.

    python docs/benchmarks/gateway_callers.py HOST PORT STREAMS MAX_TOKENS
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from runtime.bench.workload import heldout_texts

LEAVES = 0.05
"""Share of streams that their caller leaves before the end."""
MIN_TOKENS = 4


@dataclass(slots=True, kw_only=True)
class Called:
    ended: int = 0
    left: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)


async def call_until_told(host: str, port: int, streams: int, max_tokens: int) -> None:
    called, over = Called(), asyncio.Event()
    prompts = heldout_texts()

    async def caller(number: int) -> None:
        dice = random.Random(number)
        while not over.is_set():
            body = {
                "model": "demo",
                "prompt": dice.choice(prompts),
                "max_tokens": dice.randint(MIN_TOKENS, max_tokens),
                "temperature": 0.8,
                "seed": dice.getrandbits(31),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            leaves_after = dice.randint(1, 4) if dice.random() < LEAVES else math.inf
            try:
                await one_stream(host, port, body, leaves_after, called)
            except (OSError, ValueError) as error:
                called.errors.append(repr(error))

    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(caller(number))
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        over.set()
    print(json.dumps(asdict(called)))


async def one_stream(host: str, port: int, body: dict[str, Any], leaves_after: float, called: Called) -> None:
    """Asks for a stream and reads it, to its end or a part of it. Raises OSError or ValueError where it fails."""
    last_s = time.monotonic()
    num_events, reason, tokens = 0, None, None
    async with contextlib.aclosing(events(host, port, body)) as parts:
        async for part in parts:
            now_s = time.monotonic()
            (called.gap_s if num_events else called.first_s).append(now_s - last_s)
            last_s, num_events = now_s, num_events + 1
            if "error" in part:
                raise ValueError(part["error"])
            reason = part["choices"][0].get("finish_reason") if part["choices"] else reason
            tokens = part["usage"]["completion_tokens"] if part.get("usage") else tokens
            if num_events >= leaves_after:
                called.left += 1
                return
    if reason is None or tokens is None:
        raise ValueError(f"a stream broke off after {num_events} events")
    called.ended += 1
    called.tokens += tokens


async def events(host: str, port: int, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Of one completion, as they come. In HTTP 1.0 an answer is what comes until the connection is closed."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        status = (await reader.readline()).decode().strip()
        await reader.readuntil(b"\r\n\r\n")
        if " 200 " not in f"{status} ":
            raise ValueError(f"{status}: {(await reader.read(1000)).decode()}")
        async for line in reader:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                yield json.loads(text.removeprefix("data: "))
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(call_until_told(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
