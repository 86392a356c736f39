"""outrider.v1.InferenceService: one request's way through the front. Knows no scheduling and no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.v1 import inference_pb2, inference_pb2_grpc
from runtime.front import convert
from runtime.front.bounds import TextBound, prompt_bound, reply_bound
from runtime.front.convert import REQUEST_ID_KEY, ServedModel
from runtime.front.engine_link import EngineLink
from runtime.front.errors import InvalidRequest, Unavailable
from runtime.front.hub import StreamHub
from runtime.front.replies import frame_of, model_message
from runtime.front.sequences import SequenceStreams, open_sequences
from runtime.front.status import Context, answering
from runtime.front.tokenizer import Tokenizer
from runtime.request import Request
from runtime.stream.text_stream import TextStream

TOKENS_SENT_KEY = "x-tokens-sent"
"""Trailing metadata: ids that went out before the end. A gateway retries an error by itself only where this is 0."""

LONG_ECHO_TOKENS = 2048
"""Prompts past this, in all sequences together, are spelled in a thread: up to a millisecond of work."""


@dataclass(slots=True)
class _Sent:
    """What trailing metadata tells about a stream, as far as it came."""

    request_id: str | None = None
    num_tokens: int = 0

    def trailers(self) -> list[tuple[str, str]]:
        name = [] if self.request_id is None else [(REQUEST_ID_KEY, self.request_id)]
        return [*name, (TOKENS_SENT_KEY, str(self.num_tokens))]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Validates, submits and streams. One instance per server."""

    def __init__(
        self, engine: EngineLink, hub: StreamHub, tokenizer: Tokenizer, model: ServedModel, *, version: str
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._tokenizer = tokenizer
        self._model = model
        self._version = version
        self._prompt_bound = prompt_bound(model.max_model_len, tokenizer.longest_token_bytes)
        self._reply_bound = reply_bound(model.vocab_size)
        self._is_draining = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """From now on new Generate calls are refused; running ones go on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no Generate call runs; False where the time was too short."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def Generate(self, message: inference_pb2.GenerateRequest, context: Context) -> None:
        """One frame per delta, or one per sequence with stream=false. Leaving early, by whatever way, aborts what has
        not ended."""
        sent = _Sent()
        async with answering(context, sent.trailers):
            sent.request_id = convert.request_id_of(message, _metadata(context))
            with self._running():
                await self._generate(message, context, sent, sent.request_id)

    async def GetModel(
        self, message: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        return model_message(self._engine.description, self._engine.mesh, self._model.name, self._version)

    async def Tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        reply = inference_pb2.TokenizeResponse()
        async with answering(context):
            convert.check_counts(message, self._model)
            convert.refuse_unknown_fields(message)
            reply.token_ids.extend(await self._prompt(message, self._reply_bound))
        return reply

    async def _generate(
        self, message: inference_pb2.GenerateRequest, context: Context, sent: _Sent, request_id: str
    ) -> None:
        options = convert.options_of(message, request_id, self._model)
        request = await self._request(message, options)
        if request.sampling.constraint is not None:
            await self._engine.prepare(request.sampling.constraint)
        texts = await self._texts(request)
        with open_sequences(
            self._hub, request.uid, texts, abort=self._engine.abandon, whole=options.whole
        ) as sequences:
            self._engine.submit(request)
            try:
                await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
                await self._write(sequences, request, context, sent)
            finally:
                # Also the way out of a cancelled task: the client left, or its deadline passed.
                for index in sequences.unfinished():
                    self._engine.abort(request.uid + index)

    async def _write(self, sequences: SequenceStreams, request: Request, context: Context, sent: _Sent) -> None:
        while not sequences.is_done:
            index, delta = await sequences.take()
            total = sequences.total if sequences.is_done else None
            await context.write(frame_of(delta, request, index, total))
            sent.num_tokens += len(delta.token_ids)

    async def _request(self, message: inference_pb2.GenerateRequest, options: convert.GenerateOptions) -> Request:
        """The checked request. Cheap checks have gone before; encoding comes last."""
        prompt = await self._prompt(message, self._prompt_bound)
        return convert.request_of(
            options,
            prompt,
            field=str(message.WhichOneof("input")),
            uid=self._engine.next_uid(options.n),
            model=self._model,
            prediction=await self._prediction(message),
        )

    async def _texts(self, request: Request) -> list[TextStream]:
        """One per sequence. Long prompts that are to be echoed are spelled in a thread."""

        def make() -> list[TextStream]:
            return [
                TextStream(self._tokenizer.detokenizer(), request.stopping, request.report, prompt=request.prompt)
                for _ in range(request.n)
            ]

        is_short = not request.report.echo or request.n * len(request.prompt) <= LONG_ECHO_TOKENS
        return make() if is_short else await asyncio.to_thread(make)

    async def _prediction(self, message: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        """Checked ids; () where there is none."""
        if not message.HasField("prediction"):
            return ()
        match message.prediction.WhichOneof("content"):
            case "text":
                field = "prediction.text"
                ids = await self._tokenizer.encode_part(message.prediction.text, self._prompt_bound, field)
                return convert.prediction_of(field, ids, self._model)
            case "token_ids":
                field = "prediction.token_ids.ids"
                return convert.prediction_of(field, message.prediction.token_ids.ids, self._model)
            case _:
                raise InvalidRequest("prediction", "is empty; set text or token_ids, or leave it out")

    async def _prompt(
        self, message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, bound: TextBound
    ) -> tuple[int, ...]:
        match message.WhichOneof("input"):
            case "text":
                return tuple(await self._tokenizer.encode(message.text, bound))
            case "chat":
                messages, opens_answer = convert.messages_of(message.chat)
                return tuple(
                    await self._tokenizer.encode_chat(messages, add_generation_prompt=opens_answer, bound=bound)
                )
            case "token_ids":
                assert isinstance(message, inference_pb2.GenerateRequest)
                return convert.prompt_ids_of(message.token_ids, self._model)
            case _:
                names = " or ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["input"].fields)
                raise InvalidRequest("input", f"none is given; set {names}")

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Counts a Generate call. Raises Unavailable while draining."""
        if self._is_draining:
            raise Unavailable("this server is stopping; ask another one, or again later")
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()


def _metadata(context: Context) -> Mapping[str, str | bytes]:
    return dict(context.invocation_metadata() or ())
