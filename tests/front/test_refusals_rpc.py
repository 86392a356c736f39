"""Every error that a call ends with is counted by its name, whoever refuses, before the engine is asked or after."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from fakes.front import Front, in_loop, request_for, serving, status_of

from outrider.v1 import inference_pb2
from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials

Code = grpc.StatusCode
GENERATE = "/outrider.v1.InferenceService/Generate"


def counted(front: Front) -> dict[str, int]:
    return {name: count for name, count in front.server.status().errors.items() if count}


@in_loop
async def test_each_refusal_counts_under_its_own_name() -> None:
    async with serving(steps_by_itself=False, max_waiting=0) as front:
        held = front.client.call(request_for(request_id="held", max_tokens=9))
        await front.engine.until(lambda: bool(front.engine.live))
        raw = front.client.channel.unary_stream(GENERATE)
        unlike = inference_pb2.GenerateRequest(model="another", text="x")
        bad: list[tuple[Callable[[], Any], Code, str]] = [
            (lambda: front.client.call(inference_pb2.GenerateRequest()), Code.INVALID_ARGUMENT, "InvalidRequest"),
            (lambda: raw(b"\xff\xff"), Code.INVALID_ARGUMENT, "InvalidRequest"),
            (lambda: front.client.tokenize("x" * (3 << 20)), Code.INVALID_ARGUMENT, "InvalidRequest"),
            (lambda: front.client.call(unlike), Code.NOT_FOUND, "UnknownModel"),
            (lambda: front.client.call(request_for(request_id="held")), Code.ALREADY_EXISTS, "DuplicateRequest"),
            (lambda: front.client.call(request_for(text="x" * (5 << 20))), Code.RESOURCE_EXHAUSTED, "MessageTooLong"),
            (lambda: front.client.set_policy(2, expected_revision=7), Code.ABORTED, "StaleRevision"),
        ]
        expected: dict[str, int] = {}
        for call, code, name in bad:
            assert (await status_of(call()))[0] is code, name
            expected[name] = expected.get(name, 0) + 1
            assert counted(front) == expected
        front.engine.drain()
        assert (await status_of(front.client.call(request_for())))[0] is Code.UNAVAILABLE
        assert counted(front) == expected | {"Unavailable": 1}
        assert front.server.status().open_calls == front.server.status().open_streams == 1
        await front.client.abort(["held"])
        assert (await status_of(held))[0] is Code.ABORTED
        assert counted(front) == expected | {"Unavailable": 1, "AbortedByOperator": 1}
        reply = await front.client.get_status()
        assert {name: count for name, count in reply.counters.errors.items() if count} == counted(front)
        assert (front.server.status().open_calls, reply.open_calls) == (0, 0)


@in_loop
async def test_a_defect_counts_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as front:
        monkeypatch.setattr(front.engine, "submit", lambda request: 1 / 0)
        assert (await status_of(front.client.call(request_for())))[0] is Code.INTERNAL
        assert counted(front) == {"InternalError": 1}


@in_loop
async def test_what_the_guard_refuses_counts_too(tmp_path: Path) -> None:
    entry = {
        "name": "ada",
        "roles": ["generate"],
        "token_sha256": hashlib.sha256(b"ada").hexdigest(),
        "limits": {"concurrency": 1},
    }
    path = tmp_path / "identities.yaml"
    path.write_text(yaml.safe_dump({"identities": [entry]}))
    async with serving(
        steps_by_itself=False, settings={"access.identities": path}, credentials=Credentials(token="ada")
    ) as front:
        held = front.client.call(request_for(max_tokens=9))
        await front.engine.until(lambda: bool(front.engine.live))

        async def told(call: Awaitable[Any]) -> Code:
            return (await status_of(call))[0]

        async with OutriderClient(front.address) as nobody:
            assert await told(nobody.get_model()) is Code.UNAUTHENTICATED
        assert await told(front.client.get_status()) is Code.PERMISSION_DENIED
        assert await told(front.client.call(request_for())) is Code.RESOURCE_EXHAUSTED
        assert counted(front) == {"Unauthenticated": 1, "Forbidden": 1, "OverQuota": 1}
        [files] = front.server.status().files
        assert (files.changes, files.refusals, files.is_refused, files.expires_at) == (0, 0, False, None)
        held.cancel()


@in_loop
async def test_two_servers_count_apart() -> None:
    async with serving() as one, serving() as other:
        await status_of(one.client.call(inference_pb2.GenerateRequest()))
        assert (counted(one), counted(other)) == ({"InvalidRequest": 1}, {})
