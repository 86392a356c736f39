"""A configuration that changes under load, over real gRPC: new values where they are used, and no stream the worse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import yaml
from fakes.commands import outrider_in_loop
from fakes.front import in_loop, request_for, serving, status_of

from outrider.v1 import operator_pb2
from runtime.cli import console

Code = grpc.StatusCode


def write(path: Path, **blocks: dict[str, object]) -> Path:
    path.write_text(yaml.safe_dump(blocks))
    return path


@in_loop
async def test_new_limits_hold_for_the_next_request(tmp_path: Path) -> None:
    path = write(tmp_path / "serve.yaml", scheduler={"default_max_tokens": 3})
    async with serving(path=path) as front:

        async def num_tokens() -> int:
            return sum([len(frame.token_ids) async for frame in front.client.generate(request_for())])

        assert await num_tokens() == 3
        write(path, scheduler={"default_max_tokens": 9}, cache={"page_size": 32})
        reply = await front.client.reload()
        assert list(reply.applied) == ["scheduler.default_max_tokens"]
        assert [(one.key, one.reason) for one in reply.held_back] == [("cache.page_size", "needs a restart")]
        assert await num_tokens() == 9
        unknown = operator_pb2.ReloadRequest.FromString(b"\x50\x01")
        stub = front.client._operator.Reload(unknown)
        assert (await status_of(stub))[0] is Code.INVALID_ARGUMENT


@in_loop
async def test_a_bad_one_is_refused_with_the_reason_and_nothing_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "serve.yaml", scheduler={"default_max_tokens": 3})
    async with serving(path=path) as front:
        before = front.settings.now
        write(path, scheduler={"default_max_tokens": 9, "max_waitin": 3})
        code, text = await status_of(front.client.reload())
        assert code is Code.FAILED_PRECONDITION
        assert "scheduler.max_waitin: unknown key; did you mean scheduler.max_waiting" in text
        assert front.settings.now is before
        status = front.server.status().reloads
        assert (status.refused, "max_waitin" in status.problem) == (1, True)


@in_loop
async def test_streams_run_on_while_the_configuration_changes_to_and_fro(tmp_path: Path) -> None:
    path = write(tmp_path / "serve.yaml")
    async with serving(path=path) as front:

        async def stream() -> int:
            return sum([len(frame.token_ids) async for frame in front.client.generate(request_for(max_tokens=90))])

        async def change() -> None:
            for number in range(12):
                is_good = number % 3 != 2
                write(
                    path,
                    scheduler={"max_waiting": number if is_good else -1},
                    server={"coalesce_ms": float(number % 2), "max_frame_tokens_unread": 100 + number},
                )
                if is_good:
                    await front.client.reload()
                else:
                    assert (await status_of(front.client.reload()))[0] is Code.FAILED_PRECONDITION

        results = await asyncio.gather(change(), *(stream() for _ in range(16)))
        assert results[1:] == [90] * 16
        assert (front.settings.now.scheduler.max_waiting, front.settings.now.server.coalesce_ms) == (10, 0.0)


@in_loop
async def test_a_reader_that_is_slow_is_measured_by_the_limit_that_is_in_force(tmp_path: Path) -> None:
    path = write(tmp_path / "serve.yaml", server={"max_frame_tokens_unread": 10_000})
    async with serving(path=path, steps_by_itself=False) as front:
        call = front.client.call(request_for(max_tokens=200))
        await front.engine.until(lambda: bool(front.engine.live))
        for _ in range(4):
            front.engine.step()
        write(path, server={"max_frame_tokens_unread": 1})
        await front.client.reload()
        for _ in range(4):  # nobody reads between these
            front.engine.step()
        assert (await status_of(call))[0] is Code.RESOURCE_EXHAUSTED


@in_loop
async def test_the_command_says_what_is_in_force_and_what_is_not(tmp_path: Path, monkeypatch) -> None:
    outrider = outrider_in_loop(monkeypatch)
    path = write(tmp_path / "serve.yaml")
    async with serving(path=path) as front:
        same = await outrider("reload", "--address", front.address)
        assert (same.exit_code, same.stdout) == (0, "nothing new is in force\n")
        write(path, scheduler={"max_waiting": 3}, server={"port": 50099}, cache={"page_size": 32})
        changed = await outrider("reload", "--address", front.address)
        # The port is given by the command line, which comes before the file.
        assert changed.stdout == "in force: scheduler.max_waiting\n  cache.page_size needs a restart\n"
        path.write_text("nonsense")
        refused = await outrider("reload", "--address", front.address)
        assert refused.exit_code == console.EXIT_REFUSED
        assert refused.stderr.startswith("error: FAILED_PRECONDITION: the configuration stays as it was: ")
