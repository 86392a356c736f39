"""gRPC through Envoy: every method, frames as they are made, errors and ends as without it."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from fakes.envoy_house import behind_envoy
from fakes.front import in_loop, request_for, status_of
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc


@in_loop
async def test_every_method_answers_as_without_it(tmp_path):
    async with behind_envoy(tmp_path) as (front, _, client):
        assert await client.get_model() == await front.client.get_model()
        assert await client.tokenize("hé€😀") == await front.client.tokenize("hé€😀")
        request = request_for(text="hé", max_tokens=7, request_id="mine")
        frames = [frame async for frame in client.generate(request)]
        assert b"".join(bytes(frame.token_ids) for frame in frames) == bytes([65, 66, 67, 65, 66, 67, 65])
        assert {frame.request_id for frame in frames} == {"mine"}
        assert await client.check_health("outrider.v1.InferenceService") == health_pb2.HealthCheckResponse.SERVING
        reflected = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {service.name async for reply in reflected for service in reply.list_services_response.service}
        assert "outrider.v1.InferenceService" in names


@in_loop
async def test_the_face_of_other_gateways_passes(tmp_path):
    async with behind_envoy(tmp_path) as (front, _, client):
        stub, direct = (vllm_engine_pb2_grpc.VllmEngineStub(one.channel) for one in (client, front.client))
        asked = vllm_engine_pb2.GetModelInfoRequest()
        assert await stub.GetModelInfo(asked) == await direct.GetModelInfo(asked)
        tokens = vllm_engine_pb2.TokenizedInput(input_ids=[1])
        request = vllm_engine_pb2.GenerateRequest(
            request_id="r1",
            tokenized=tokens,
            sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3, temperature=1.0, top_p=1.0, n=1),
            stream=True,
        )
        replies = [reply async for reply in stub.Generate(request)]
        assert replies[-1].complete.completion_tokens == 3


@in_loop
async def test_frames_arrive_as_they_are_made(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, _, client):
        call = client.call(request_for(max_tokens=9))
        await front.engine.until(lambda: front.engine.live)
        for tokens in ([65, 66, 67], [65, 66, 67], [65, 66, 67]):
            front.engine.step()
            frame = await call.read()
            assert list(frame.token_ids) == tokens, "nothing else has been made yet"
        assert frame.HasField("finish")
        assert await call.read() is grpc.aio.EOF
        assert dict(await call.trailing_metadata())["x-tokens-sent"] == "9"


@in_loop
async def test_a_client_that_leaves_ends_our_work(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, _, client):
        call = client.call(request_for(max_tokens=100))
        await front.engine.until(lambda: front.engine.live)
        front.engine.step()
        await call.read()
        call.cancel()
        await front.engine.until(lambda: not front.engine.live)
        assert front.engine.aborted == [front.engine.submitted[0].uid]


@in_loop
async def test_a_deadline_ends_the_call_and_our_work(tmp_path):
    async with behind_envoy(tmp_path, steps_by_itself=False) as (front, _, client):
        code, _ = await status_of(client.call(request_for(max_tokens=100), timeout=0.3))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await front.engine.until(lambda: front.engine.submitted and not front.engine.live)


@in_loop
async def test_errors_come_through_whole(tmp_path):
    async with behind_envoy(tmp_path) as (front, _, client):
        for request in (request_for(max_tokens=0), request_for(model="another"), request_for(text="x" * 5_000_000)):
            direct = await status_of(front.client.call(request))
            assert await status_of(client.call(request)) == direct
        call = client.call(request_for(text="hé😀", model="é"))
        assert (await status_of(call))[1] == "model: 'é' is not served here, 'demo' is"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call(request_for(max_tokens=0)).read()
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        assert status is not None
        violation = error_details_pb2.BadRequest.FromString(status.details[0].value).field_violations[0]
        assert violation.field == "stopping.max_tokens"


@in_loop
async def test_a_long_request_passes(tmp_path):
    """Longer than what Envoy would keep for a retry, shorter than what is taken here."""
    async with behind_envoy(tmp_path) as (_, _, client):
        code, text = await status_of(client.call(request_for(text="x" * 4_100_000)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith("text: ")


@in_loop
async def test_operators_are_out_of_reach(tmp_path):
    """Although this front serves them on the port that Envoy calls."""
    async with behind_envoy(tmp_path) as (front, _, client):
        await front.client.get_status()
        code, _ = await status_of(client.get_status())
        assert code is grpc.StatusCode.UNIMPLEMENTED


@in_loop
async def test_ids_of_requests_come_through_unchanged(tmp_path):
    """Also one that looks like those that Envoy makes, of which it would change a digit to mark its traces."""
    async with behind_envoy(tmp_path) as (_, envoy, client):
        for name in ("from-gateway", "5d3a3cb0-6a4b-1cde-8dbb-1c3d3b7d0b1e"):
            call = client.call(request_for(max_tokens=1), metadata=(("x-request-id", name),))
            assert [frame.request_id async for frame in call] == [name]
            assert (await envoy.log.get())["request_id"] == name
        [frame] = [frame async for frame in client.generate(request_for(max_tokens=1))]
        assert (await envoy.log.get())["request_id"] == frame.request_id, "Envoy made one, and both use it"


@in_loop
async def test_clients_cannot_change_what_is_retried(tmp_path):
    async with behind_envoy(tmp_path) as (front, envoy, client):
        front.engine.drain()
        asked = (("x-envoy-max-retries", "9"), ("x-envoy-retry-grpc-on", "unavailable"))
        await status_of(client.call(request_for(), metadata=asked))
        assert (await envoy.log.get())["attempts"] <= 3


@in_loop
async def test_the_log_tells_of_calls_and_not_of_what_was_said(tmp_path):
    async with behind_envoy(tmp_path) as (front, envoy, client):
        [frame] = [frame async for frame in client.generate(request_for(text="secretly", max_tokens=3))]
        line = await envoy.log.get()
        assert line["path"] == "/outrider.v1.InferenceService/Generate"
        assert (line["grpc_status"], line["attempts"], line["replica"]) == ("OK", 1, front.address)
        assert not any(word in str(line) for word in ("secretly", frame.text))


@in_loop
async def test_sixty_four_streams_at_once_share_one_connection(tmp_path):
    async with behind_envoy(tmp_path) as (front, envoy, client):

        async def one(number: int) -> int:
            request = request_for(max_tokens=60, request_id=f"r{number}")
            return sum([len(frame.token_ids) async for frame in client.generate(request)])

        assert await asyncio.gather(*map(one, range(64))) == [60] * 64
        assert not front.engine.live
        assert (await envoy.statistics())["upstream_cx_total"] <= 2, "the health check's, and the calls'"
