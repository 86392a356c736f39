"""Several replicas behind one Envoy: which get calls, what is tried again elsewhere, and what never is."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest
from fakes.envoy import Envoy, running_envoy
from fakes.envoy_house import behind_envoy
from fakes.front import Front, in_loop, request_for, serving, status_of
from fakes.front_process import FrontProcess, front_process

from runtime.front.client import OutriderClient
from runtime.front.errors import Overloaded, Unavailable


async def two_fronts(stack: AsyncExitStack, folder: Path) -> tuple[Front, Front, Envoy, OutriderClient]:
    one, two = [await stack.enter_async_context(serving()) for _ in range(2)]
    envoy = await stack.enter_async_context(running_envoy(folder, [one.address, two.address]))
    return one, two, envoy, await stack.enter_async_context(OutriderClient(envoy.address))


async def front_and_process(stack: AsyncExitStack, folder: Path) -> tuple[Front, FrontProcess, Envoy, OutriderClient]:
    """One that steps by itself, and one that can be killed."""
    front = await stack.enter_async_context(serving())
    process = await stack.enter_async_context(front_process())
    envoy = await stack.enter_async_context(running_envoy(folder, [front.address, process.address]))
    return front, process, envoy, await stack.enter_async_context(OutriderClient(envoy.address))


async def generate(client: OutriderClient, request_id: str, max_tokens: int = 9) -> int:
    """Tokens that came."""
    request = request_for(max_tokens=max_tokens, request_id=request_id)
    return sum([len(frame.token_ids) async for frame in client.generate(request)])


@in_loop
async def test_a_replica_drained_under_load_costs_no_request_and_comes_back(tmp_path):
    async with AsyncExitStack() as stack:
        one, two, envoy, client = await two_fronts(stack, tmp_path)
        is_over = asyncio.Event()

        async def load(name: int) -> list[int]:
            got = []
            while not is_over.is_set():
                got.append(await generate(client, f"{name}-{len(got)}"))
            return got

        async def until_taken(front: Front, more: int) -> None:
            num_wanted = len(front.engine.submitted) + more
            await front.engine.until(lambda: len(front.engine.submitted) >= num_wanted)

        loads = [asyncio.create_task(load(name)) for name in range(16)]
        await until_taken(one, 50)
        one.engine.drain()
        await envoy.until_replicas({one.address: False, two.address: True})
        await until_taken(two, 50)
        num_retries = (await envoy.statistics())["upstream_rq_retry"]
        await until_taken(two, 50)
        assert (await envoy.statistics())["upstream_rq_retry"] == num_retries, "none has been sent to the drained one"
        one.engine.resume()
        await until_taken(one, 50)
        is_over.set()
        got = [tokens for task in loads for tokens in await task]
        assert set(got) == {9}
        assert len(got) == len(one.engine.submitted) + len(two.engine.submitted)


@in_loop
async def test_a_drained_replica_keeps_its_streams(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, envoy, client):
        call = client.call(request_for(max_tokens=6))
        await front.engine.until(lambda: front.engine.live)
        front.engine.step()
        await call.read()
        front.engine.drain()
        await envoy.until_replicas({front.address: False})
        front.engine.step()
        frame = await call.read()
        assert frame.HasField("finish")
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("error", [Unavailable("lost"), Overloaded("full")], ids=str)
@in_loop
async def test_what_one_replica_refuses_another_is_asked(tmp_path, error):
    async with AsyncExitStack() as stack:
        one, two, envoy, client = await two_fronts(stack, tmp_path)
        num_refused = 0

        def refuse(request: object) -> None:
            nonlocal num_refused
            num_refused += 1
            raise error

        one.engine.submit = refuse  # type: ignore[method-assign]
        assert [await generate(client, f"r{number}") for number in range(20)] == [9] * 20
        assert num_refused > 0
        assert len(two.engine.submitted) == 20
        attempts = [(await envoy.log.get())["attempts"] for _ in range(20)]
        assert sum(attempts) == 20 + num_refused


@in_loop
async def test_a_request_that_all_refuse_is_told_by_the_last(tmp_path):
    async with AsyncExitStack() as stack:
        one, two, envoy, client = await two_fronts(stack, tmp_path)
        for front in (one, two):
            front.engine.submit = _full  # type: ignore[method-assign]
        code, text = await status_of(client.call(request_for()))
        assert (code, text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert (await envoy.log.get())["attempts"] == 3


def _full(request: object) -> None:
    raise Overloaded("full")


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"model": "another"}], ids=str)
@in_loop
async def test_a_wrong_request_is_tried_once(tmp_path, wrong):
    async with behind_envoy(tmp_path) as (_, envoy, client):
        await status_of(client.call(request_for(**wrong)))
        assert (await envoy.log.get())["attempts"] == 1


@in_loop
async def test_requests_of_a_killed_replica_that_brought_nothing_yet_succeed_on_another(tmp_path):
    async with AsyncExitStack() as stack:
        front, process, envoy, client = await front_and_process(stack, tmp_path)
        calls = {f"r{number}": asyncio.create_task(generate(client, f"r{number}")) for number in range(16)}
        taken = {await process.took() for _ in range(2)}
        await process.kill()
        assert [await call for call in calls.values()] == [9] * 16
        assert taken <= {request.request_id for request in front.engine.submitted}
        assert (await envoy.statistics())["upstream_rq_retry"] >= len(taken)


@in_loop
async def test_streams_of_a_killed_replica_that_have_begun_end_and_are_not_repeated(tmp_path):
    """Their clients are told by the broken stream: Envoy has no status to tell, and none of ours has come."""
    async with AsyncExitStack() as stack:
        front, process, _, client = await front_and_process(stack, tmp_path)
        calls = {name: client.call(request_for(max_tokens=9, request_id=name)) for name in map("r{}".format, range(16))}
        taken = [await process.took() for _ in range(2)]
        process.step()
        for name in taken:
            frame = await calls[name].read()
            assert list(frame.token_ids) == [65, 66, 67]
        await process.kill()
        for name in taken:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls[name].read()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "x-tokens-sent" not in dict(await calls[name].trailing_metadata())
        assert not {*taken} & {request.request_id for request in front.engine.submitted}
        for name in calls.keys() - {*taken}:
            calls[name].cancel()


@in_loop
async def test_what_a_lost_worker_ends_before_the_first_frame_succeeds_on_another(tmp_path):
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving(steps_by_itself=False))
        two = await stack.enter_async_context(serving())
        envoy = await stack.enter_async_context(running_envoy(tmp_path, [one.address, two.address]))
        client = await stack.enter_async_context(OutriderClient(envoy.address))
        early = [asyncio.create_task(generate(client, f"r{number}")) for number in range(8)]
        await one.engine.until(lambda: one.engine.live)
        for uid in list(one.engine.live):
            one.engine.fail(uid, Unavailable("a worker was lost"))
        one.engine.drain()
        assert [await call for call in early] == [9] * 8


@in_loop
async def test_a_replica_that_is_gone_is_taken_out_and_its_successor_in(tmp_path):
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(serving())
        async with serving() as other:
            port = int(other.address.rsplit(":", 1)[1])
            envoy = await stack.enter_async_context(running_envoy(tmp_path, [front.address, other.address]))
            client = await stack.enter_async_context(OutriderClient(envoy.address))
            await envoy.until_replicas({front.address: True, other.address: True})
        assert [await generate(client, f"a{number}") for number in range(8)] == [9] * 8
        await envoy.until_replicas({front.address: True, other.address: False})
        async with serving(settings={"server.port": port}) as successor:
            await envoy.until_replicas({front.address: True, successor.address: True})
            number = 0
            while not successor.engine.submitted:
                assert await generate(client, f"b{number}") == 9
                number += 1
