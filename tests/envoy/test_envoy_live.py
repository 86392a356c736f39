"""Envoy before a live deployment of the demo: tokens and texts are those of a direct call, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.envoy import Envoy, running_envoy
from fakes.http import asking
from flow.house import House, heldout, open_house, request
from google.protobuf.json_format import MessageToDict

from outrider.v1 import inference_pb2
from runtime.front.client import OutriderClient
from runtime.live import EarlyEnd


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as house:
        yield house


def through_envoy(
    house: House, folder: Path, work: Callable[[Envoy, OutriderClient], Coroutine[Any, Any, None]]
) -> None:
    """Does the work on the deployment's own loop."""

    async def do() -> None:
        async with (
            running_envoy(folder, [house.deployment.address]) as envoy,
            OutriderClient(envoy.address) as client,
        ):
            await work(envoy, client)

    house.run(do(), timeout_s=60)
    house.check_baseline()


def text_and_ids(frames: list[inference_pb2.GenerateResponse]) -> tuple[bytes, list[int]]:
    return "".join(frame.text for frame in frames).encode(), [token for frame in frames for token in frame.token_ids]


def test_a_seeded_stream_is_the_same_in_all_ways(house: House, tmp_path: Path) -> None:
    asked = request(heldout(1)[0], 24, temperature=0.8, seed=7)

    async def work(envoy: Envoy, client: OutriderClient) -> None:
        direct = await house.generate(asked)
        frames = [frame async for frame in client.generate(asked)]
        assert len(frames) > 1
        assert text_and_ids(frames) == text_and_ids(direct.frames)
        body = MessageToDict(asked, preserving_proto_field_name=True)
        async with asking("POST", envoy.address, "/v1/generate", body) as answer:
            lines = [json.loads(line) async for line in answer.lines()]
        assert len(lines) > 1
        assert "".join(line.get("text", "") for line in lines).encode() == direct.text.encode()
        assert [token for line in lines for token in line["token_ids"]] == direct.ids
        async with asking("POST", envoy.address, "/v1/generate", body | {"stream": False}) as answer:
            [line] = [json.loads(line) async for line in answer.lines()]
        assert (line["text"], line["token_ids"]) == (direct.text, direct.ids)

    through_envoy(house, tmp_path, work)


def test_clients_that_leave_and_deadlines_end_the_work_of_ranks(house: House, tmp_path: Path) -> None:
    asked = request(heldout(1)[0], 400, ignore_eos=True)

    async def work(envoy: Envoy, client: OutriderClient) -> None:
        for _ in range(4):
            call = client.call(asked)
            await call.read()
            call.cancel()
        late = [asyncio.ensure_future(client.call(asked, timeout=0.2).read()) for _ in range(4)]
        await asyncio.gather(*late, return_exceptions=True)
        await house.idle()
        assert (await envoy.statistics())["upstream_rq_active"] == 0

    through_envoy(house, tmp_path, work)
    assert house.deployment.statistics().requests.ended[EarlyEnd.ABORTED] >= 4


def test_load_through_envoy_loses_nothing(house: House, tmp_path: Path) -> None:
    async def work(envoy: Envoy, client: OutriderClient) -> None:
        async def one(prompt: str) -> int:
            asked = request(prompt, 8, ignore_eos=True)
            return sum([len(frame.token_ids) async for frame in client.generate(asked)])

        assert await asyncio.gather(*map(one, heldout(32))) == [8] * 32
        found = await envoy.statistics()
        assert (found["upstream_rq_2xx"], found["upstream_rq_retry"]) == (32, 0)

    through_envoy(house, tmp_path, work)
