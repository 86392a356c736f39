"""vllm.grpc.engine.VllmEngine, the service that smg and others speak, over the calls that every face makes.

Ids go out and no text: gateways spell them and look for stop strings once more. Errors are gRPC statuses; what has been
aborted by `Abort` ends with `finish_reason` "abort" where it had been taken in, and with CANCELLED where it had not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from runtime.access.identity import CALLER
from runtime.front.calls import Call, Calls
from runtime.front.convert import MAX_REQUEST_ID_CHARS, request_id_of
from runtime.front.doors import Doors
from runtime.front.errors import AbortedByCaller, InvalidRequest, NotServed
from runtime.front.inference_service import Sent, metadata_of, origin_of
from runtime.front.status import Context, answering
from runtime.front.vllm.aborts import Abortable, Aborts
from runtime.front.vllm.checkpoint import CheckpointFacts, TokenizerArchive, defaults_json
from runtime.front.vllm.frames import Frames
from runtime.front.vllm.loads import OutputRate, loads_of
from runtime.front.vllm.messages import check_rank, read_request, under_their_names
from runtime.front.vllm.presence import VLLM_ENGINE
from runtime.status import ServerState

MAX_ABORTED = 1024
"""Ids in one Abort; gateways name one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the face tells of besides its calls.

    checkpoint: its directory. version: of the product. is_ready: whether requests should be sent here.
    """

    checkpoint: Path
    version: str
    is_ready: Callable[[], bool]


class VllmEngine(vllm_grpc.VllmEngineServicer):
    """One instance per server. Raises LoadError where the checkpoint's config.json is not JSON."""

    def __init__(self, calls: Calls, surroundings: Surroundings) -> None:
        self._calls = calls
        self._around = surroundings
        self._facts = CheckpointFacts.load(surroundings.checkpoint)
        self._archive = TokenizerArchive(surroundings.checkpoint)
        self._aborts = Aborts()
        self._rate = OutputRate()
        self._last_received_s = 0.0

    async def Generate(self, message: vllm.GenerateRequest, context: Context) -> None:
        """Frames as `frames.py` draws them. Leaving early, by whatever way, aborts what has not ended."""
        sent = Sent()
        self._last_received_s = time.time()
        async with answering(context, sent.trailers):
            with under_their_names():
                metadata = metadata_of(context)
                origin = origin_of(context, metadata, VLLM_ENGINE)
                with self._calls.reading(origin):
                    check_rank(message, self._calls.engine.mesh.dp)
                    request = await read_request(message, self._calls.model)
                    sent.request_id = request_id_of(request, metadata)
                with self._aborts.call(origin.identity, sent.request_id) as abortable:
                    with self._calls.reading(origin, sent.request_id):
                        abortable.check()
                    async with AsyncExitStack() as stack:
                        async with abortable.waiting():
                            opening = self._calls.open(request, sent.request_id, origin)
                            call = await stack.enter_async_context(opening)
                        abortable.follow(call.abort)
                        await _write(call, Frames(call.request, whole=not message.stream), abortable, context, sent)

    async def Abort(self, message: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Idempotent; also ends what is still to come. Ids are matched as a whole, and among the caller's own."""
        async with answering(context):
            if len(message.request_ids) > MAX_ABORTED:
                raise InvalidRequest(
                    "request_ids",
                    f"{len(message.request_ids)} ids; at most {MAX_ABORTED} are taken, so send several calls",
                )
            # No request has another id than that.
            sound = [one for one in message.request_ids if 1 <= len(one) <= MAX_REQUEST_ID_CHARS]
            self._aborts.abort(CALLER.get().name, sound)
        return vllm.AbortResponse()

    async def HealthCheck(self, message: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """Healthy while requests should be sent here: as grpc.health.v1 says of this service."""
        healthy = self._around.is_ready()
        state = self._calls.engine.status().state.value
        return vllm.HealthCheckResponse(
            healthy=healthy, message=state if healthy else f"send new requests elsewhere ({state})"
        )

    async def GetModelInfo(self, message: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        description, model = self._calls.engine.description, self._calls.model
        path = str(self._around.checkpoint)
        return vllm.GetModelInfoResponse(
            model_path=path,
            tokenizer_path=path,
            is_generation=True,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            model_type=description.model_type,
            architectures=self._facts.architectures,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=self._facts.pad_token_id,
            bos_token_id=self._facts.bos_token_id,
            default_sampling_params_json=defaults_json(model.defaults),
        )

    async def GetServerInfo(self, message: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        engine = self._calls.engine
        status, description = engine.status(), engine.description
        return vllm.GetServerInfoResponse(
            server_type="outrider",
            active_requests=status.statistics.running + status.statistics.waiting,
            is_paused=status.state is ServerState.DRAINING,
            last_receive_timestamp=self._last_received_s,
            uptime_seconds=status.uptime_s,
            data_parallel_size=engine.mesh.dp,
            max_num_seqs=engine.mesh.dp * description.num_slots,
            block_size=description.page_size,
            model_dtype=description.dtype,
            kv_cache_dtype=description.dtype,
            # A grammar holds from the first token on, whatever the model thinks before it answers.
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, message: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        """Of all data-parallel ranks, or of one. There is one section, which every answer has."""
        reply = vllm.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), version=self._around.version)
        async with answering(context):
            loads = loads_of(self._calls.engine, self._rate)
            if message.HasField("dp_rank"):
                if not 0 <= message.dp_rank < len(loads):
                    raise InvalidRequest("dp_rank", f"{message.dp_rank} is no rank; there are {len(loads)}, from 0")
                loads = [loads[message.dp_rank]]
            reply.loads.extend(loads)
            reply.dp_rank_count = len(loads)
        return reply

    async def GetTokenizer(self, message: common_pb2.GetTokenizerRequest, context: Context) -> None:
        """The checkpoint's tokenizer, as a zip archive in parts."""
        async with answering(context):
            for chunk in await self._archive.chunks():
                await context.write(chunk)

    async def Embed(self, message: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        return await _refuse(context, "Embed: this server generates text and makes no embeddings")

    async def FlushCache(
        self, message: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        return await _refuse(context, "FlushCache: there is no prefix cache to flush")

    async def StartProfile(
        self, message: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        return await _refuse(context, "StartProfile: traces of ranks are not taken; see the step records and metrics")

    async def StopProfile(self, message: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        return await _refuse(context, "StopProfile: traces of ranks are not taken; see the step records and metrics")

    async def SubscribeKvEvents(self, message: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        await _refuse(context, "SubscribeKvEvents: there is no prefix cache to tell of; poll GetLoads for the load")


def add_vllm_engine(doors: Doors, calls: Calls, surroundings: Surroundings) -> None:
    """Puts the service behind the doors. Raises LoadError where the checkpoint's config.json is not JSON."""
    vllm_grpc.add_VllmEngineServicer_to_server(  # type: ignore[no-untyped-call]
        VllmEngine(calls, surroundings), doors
    )


async def _write(call: Call, frames: Frames, abortable: Abortable, context: Context, sent: Sent) -> None:
    """All frames of a call, to its end or its abort."""
    try:
        while not call.sequences.is_done:
            async with abortable.waiting():
                index, delta = await call.sequences.take()
            num_new = len(delta.token_ids)
            for frame in frames.of(index, delta):
                await sent.write(context, frame, num_tokens=num_new)
                num_new = 0  # a second frame of a delta repeats the first one's ids
    except AbortedByCaller:
        for frame in frames.of_abort():
            await sent.write(context, frame, num_tokens=0)


async def _refuse(context: Context, why: str) -> NoReturn:
    async with answering(context):
        raise NotServed(why)
    raise AssertionError("aborting raises")
