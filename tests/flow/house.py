"""A whole deployment on loopback for tests: real worker process, engine, front, gRPC. Runs in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from configs.load import demo_checkpoint, load_settings
from configs.schema import ServeSettings
from outrider.v1 import inference_pb2, types_pb2
from runtime.cluster.launcher import Launcher
from runtime.cluster.supervisor import launcher_for
from runtime.front.client import OutriderClient
from runtime.serve import Deployment
from runtime.verification.policy_planner import PolicyPlanner

T = TypeVar("T")

Frame = inference_pb2.GenerateResponse


@dataclass(slots=True, kw_only=True)
class Reply:
    """All frames of one request put together."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    rounds: list[types_pb2.Round] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    @property
    def usage(self) -> types_pb2.Usage:
        return self.frames[-1].usage

    @property
    def reason(self) -> int:
        return self.frames[-1].finish.reason

    def add(self, frame: Frame) -> None:
        self.text += frame.text
        self.ids += frame.token_ids
        self.rounds += frame.rounds
        self.frames.append(frame)


class House:
    """A running deployment. Blocking calls for tests; `client` work happens on the deployment's own loop."""

    def __init__(self, settings: dict[str, Any], make_launcher: Callable[[ServeSettings], Launcher]) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="house", daemon=True)
        self._thread.start()
        loaded = load_settings(None, settings)
        self.deployment = Deployment(loaded, make_launcher(loaded))
        self.client: OutriderClient | None = None

    def start(self) -> None:
        self.run(self.deployment.start(lambda rank, stage, done, total: None), timeout_s=120)
        self.client = self.run(self._connect())

    def stop(self) -> None:
        if self.client is not None:
            self.run(self.client.close())
        self.run(self.deployment.stop(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 600) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _connect(self) -> OutriderClient:
        return OutriderClient(self.deployment.address)

    @property
    def planner(self) -> PolicyPlanner:
        """Of the engine; to be called on its loop, or while nothing runs."""
        return self.deployment.engine.policies.planner

    def set_policy(self, gamma: int | None) -> None:
        assert self.client is not None
        self.run(self.client.set_policy(gamma))

    async def generate(self, request: inference_pb2.GenerateRequest, **options: Any) -> Reply:
        assert self.client is not None
        reply = Reply()
        async for frame in self.client.generate(request, **options):
            reply.add(frame)
        return reply

    async def generate_all(self, requests: Sequence[inference_pb2.GenerateRequest], concurrency: int) -> list[Reply]:
        gate = asyncio.Semaphore(concurrency)

        async def one(request: inference_pb2.GenerateRequest) -> Reply:
            async with gate:
                return await self.generate(request)

        return list(await asyncio.gather(*(one(request) for request in requests)))

    async def idle(self) -> None:
        """Returns when nothing runs or waits; the engine's own step boundary tells."""
        async with asyncio.timeout(30):
            while (s := self.deployment.statistics()).running or s.waiting:
                await asyncio.sleep(0.01)

    def check_baseline(self) -> None:
        """Every page and slot is back, on the host and in the rank."""
        self.run(self.idle())
        assert self.deployment.check_books() == []
        statistics = self.deployment.statistics()
        assert all(pool.used == 0 for pool in statistics.pages), statistics
        assert statistics.slots_used == 0


@contextmanager
def open_house(launcher: Callable[[ServeSettings], Launcher] = launcher_for, **settings: Any) -> Iterator[House]:
    """Dotted settings keys with `__` for the dot: `model__numerics="reference"`."""
    chosen = {
        "cluster.launcher": "process",
        "server.port": 0,
        "metrics.port": "none",
        "cache.max_running": 16,
        "cache.max_model_len": 512,
    }
    house = House(chosen | {key.replace("__", "."): value for key, value in settings.items()}, launcher)
    try:
        house.start()
        yield house
    finally:
        house.stop()


def heldout(count: int, start: int = 0) -> list[str]:
    lines = (Path(demo_checkpoint()) / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[start : start + count]]


def request(
    prompt: str,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    top_k: int | None = None,
    **stopping: Any,
) -> inference_pb2.GenerateRequest:
    sampling = types_pb2.Sampling(temperature=temperature, seed=seed, top_k=top_k)
    return inference_pb2.GenerateRequest(
        text=prompt, sampling=sampling, stopping=types_pb2.Stopping(max_tokens=max_tokens, **stopping)
    )
