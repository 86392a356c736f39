"""Envoy beside one Outrider for its operators: JSON and gRPC on loopback, and no web page gets in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from fakes.envoy import Envoy, running_envoy
from fakes.front import Front, in_loop, request_for, serving, status_of
from fakes.http import asking
from google.protobuf.json_format import ParseDict

from outrider.v1 import operator_pb2
from runtime.front.client import OutriderClient
from runtime.front.errors import Unavailable

AT = "/operator/v1"


@asynccontextmanager
async def for_operators(folder: Path, **options: Any) -> AsyncIterator[tuple[Front, Envoy]]:
    async with (
        serving(settings={"operator.port": 0}, **options) as front,
        running_envoy(folder, [front.server.operator_address], name="operator.yaml") as envoy,
    ):
        yield front, envoy


async def answer_to(envoy: Envoy, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with asking(method, envoy.address, AT + path, body, headers=headers) as answer:
        return answer.status, await answer.json()


@in_loop
async def test_an_operator_sees_and_acts_in_json(tmp_path):
    async with for_operators(tmp_path, steps_by_itself=False) as (front, envoy):
        call = front.client.call(request_for(request_id="r1", max_tokens=50))
        await front.engine.until(lambda: front.engine.live)
        status, found = await answer_to(envoy, "GET", "/status")
        assert (status, found["state"]) == (200, "SERVER_STATE_SERVING")
        assert ParseDict(found, operator_pb2.GetStatusResponse()).model.name == "demo"
        assert (await answer_to(envoy, "GET", "/requests?limit=1"))[1]["requests"][0]["request_id"] == "r1"
        assert (await answer_to(envoy, "POST", "/abort", {"request_ids": ["r1", "r2"]}))[1] == {
            "aborted": ["r1"],
            "unknown": ["r2"],
        }
        assert (await status_of(call))[0] is grpc.StatusCode.ABORTED
        assert (await answer_to(envoy, "POST", "/check", {}))[1] == {"ranks_checked": 1}
        assert (await answer_to(envoy, "POST", "/drain", {}))[1]["state"] == "SERVER_STATE_DRAINING"
        assert (await answer_to(envoy, "POST", "/resume", {}))[1] == {"state": "SERVER_STATE_SERVING"}


@in_loop
async def test_a_policy_is_set_and_its_changes_are_streamed(tmp_path):
    async with for_operators(tmp_path) as (_, envoy):
        async with asking("GET", envoy.address, f"{AT}/policy/changes") as answer:
            lines = answer.lines()
            first = json.loads(await anext(lines))
            wanted = {"policy": {"fixed": {"gamma": 2}}, "expected_revision": first["revision"]}
            status, state = await answer_to(envoy, "PUT", "/policy", wanted)
            assert (status, state["policy"]) == (200, {"fixed": {"gamma": 2}})
            assert json.loads(await anext(lines))["policy"] == {"fixed": {"gamma": 2}}
        assert (await answer_to(envoy, "GET", "/policy"))[1] == state
        status, error = await answer_to(envoy, "PUT", "/policy", wanted)
        assert (status, error["code"]) == (409, 10), "the revision is another by now"


@in_loop
async def test_grpc_passes_and_clients_calls_do_not(tmp_path):
    async with for_operators(tmp_path) as (_, envoy), OutriderClient(envoy.address) as client:
        assert (await client.get_status()).model.name == "demo"
        code, _ = await status_of(client.call(request_for()))
        assert code is grpc.StatusCode.UNIMPLEMENTED


@in_loop
async def test_no_web_page_can_act(tmp_path):
    """A page under a name of its own that leads to loopback, or what a page may send elsewhere without being asked."""
    pages = (
        {"host": "rebound.example"},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
    )
    async with for_operators(tmp_path) as (front, envoy):
        for headers in pages:
            async with asking("POST", envoy.address, f"{AT}/drain", {}, headers=headers) as answer:
                assert answer.status == 404, headers
        assert front.engine.is_serving


@in_loop
async def test_nothing_is_done_twice(tmp_path):
    async with for_operators(tmp_path) as (front, envoy):
        seen = []

        def refuse() -> None:
            seen.append(1)
            raise Unavailable("the server is stopping")

        front.engine.resume = refuse  # type: ignore[method-assign]
        async with asking("POST", envoy.address, f"{AT}/resume", {}) as answer:
            assert (answer.status, await answer.json()) == (503, {"code": 14, "message": "the server is stopping"})
        assert seen == [1]
