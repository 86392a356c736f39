"""outrider.v1.InferenceService: one request's way through the front. Knows no scheduling and no worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from outrider.v1 import inference_pb2, inference_pb2_grpc
from runtime.access.identity import CALLER
from runtime.front import convert
from runtime.front.bounds import reply_bound
from runtime.front.calls import Call, Calls
from runtime.front.convert import REQUEST_ID_KEY
from runtime.front.replies import frame_of, model_message
from runtime.front.status import Context, answering
from runtime.request import Origin

TOKENS_SENT_KEY = "x-tokens-sent"
"""Trailing metadata: ids that went out before the end. A gateway retries an error by itself only where this is 0."""

FACE = "outrider.v1.InferenceService"


@dataclass(slots=True)
class Sent:
    """A stream as far as it came, which trailing metadata tells about.

    Initial metadata goes with the first frame and not before it: until then a gateway may take an error for one that
    another server can make good.
    """

    request_id: str | None = None
    num_tokens: int = 0
    has_begun: bool = False

    async def write(self, context: Context, frame: Message, *, num_tokens: int) -> None:
        """One frame more, with so many new ids in it."""
        if not self.has_begun:
            self.has_begun = True
            await context.send_initial_metadata(((REQUEST_ID_KEY, self.request_id or ""),))
        await context.write(frame)
        self.num_tokens += num_tokens

    def trailers(self) -> list[tuple[str, str]]:
        name = [] if self.request_id is None else [(REQUEST_ID_KEY, self.request_id)]
        return [*name, (TOKENS_SENT_KEY, str(self.num_tokens))]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Reads messages and writes frames. One instance per server."""

    def __init__(self, calls: Calls, *, version: str) -> None:
        self._calls = calls
        self._version = version
        self._reply_bound = reply_bound(calls.model.vocab_size)

    async def Generate(self, message: inference_pb2.GenerateRequest, context: Context) -> None:
        """One frame per delta, or one per sequence with stream=false. Leaving early, by whatever way, aborts what has
        not ended."""
        sent = Sent()
        async with answering(context, sent.trailers):
            metadata = metadata_of(context)
            origin = origin_of(context, metadata, FACE)
            with self._calls.reading(origin):
                sent.request_id = convert.request_id_of(message, metadata)
            async with self._calls.open(message, sent.request_id, origin) as call:
                await self._write(call, context, sent)

    async def GetModel(
        self, message: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        engine = self._calls.engine
        return model_message(engine.description, engine.mesh, self._calls.model.name, self._version)

    async def Tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        reply = inference_pb2.TokenizeResponse()
        async with answering(context):
            convert.check_counts(message, self._calls.model)
            convert.refuse_unknown_fields(message)
            reply.token_ids.extend(await self._calls.prompt_of(message, self._reply_bound))
        return reply

    async def _write(self, call: Call, context: Context, sent: Sent) -> None:
        sequences = call.sequences
        while not sequences.is_done:
            index, delta = await sequences.take()
            total = sequences.total if sequences.is_done else None
            frame = frame_of(delta, call.request, index, total)
            await sent.write(context, frame, num_tokens=len(delta.token_ids))


def metadata_of(context: Context) -> Mapping[str, str | bytes]:
    """What came with a call. Of a key that came twice, the last value."""
    return dict(context.invocation_metadata() or ())


def origin_of(context: Context, metadata: Mapping[str, str | bytes], face: str) -> Origin:
    """Where the call that this task handles came from."""
    left_s = context.time_remaining()
    traceparent, tracestate = (metadata.get(key, "") for key in ("traceparent", "tracestate"))
    return Origin(
        identity=CALLER.get().name,
        face=face,
        traceparent=traceparent if isinstance(traceparent, str) else "",
        tracestate=tracestate if isinstance(tracestate, str) else "",
        deadline_s=None if left_s is None else time.monotonic() + left_s,
    )
