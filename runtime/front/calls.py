"""What every face that generates does with a call: checks it, submits it, and hands out what comes. Knows no frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from outrider.v1 import inference_pb2
from runtime.access.identity import CALLER, Identity
from runtime.access.quota import Quotas
from runtime.front import convert
from runtime.front.bounds import TextBound, prompt_bound
from runtime.front.convert import ServedModel
from runtime.front.engine_link import EngineLink
from runtime.front.errors import InvalidRequest, Unavailable
from runtime.front.hub import StreamHub
from runtime.front.sequences import SequenceStreams, open_sequences
from runtime.front.tokenizer import Tokenizer
from runtime.observe.calls import CallNote, recorded
from runtime.observe.records import UNOBSERVED, Observer
from runtime.request import UNKNOWN_ORIGIN, Origin, Request
from runtime.stream.text_stream import TextStream

STOPPED = "this server has stopped; ask another one"
"""What streams are told that outlast the time for the last ones."""

LONG_ECHO_TOKENS = 2048
"""Prompts past this, in all sequences together, are spelled in a thread: up to a millisecond of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that was submitted, and the streams of its sequences. abort: ends the work on what of it has not ended;
    idempotent."""

    request: Request
    sequences: SequenceStreams
    abort: Callable[[], None]


class Calls:
    """All calls of a server that generate, through whichever face. One instance per server."""

    def __init__(
        self,
        engine: EngineLink,
        hub: StreamHub,
        tokenizer: Tokenizer,
        model: ServedModel,
        observer: Observer = UNOBSERVED,
        quotas: Quotas | None = None,
    ) -> None:
        """observer: hears of calls that the engine does not take in; of the others it hears from the engine. quotas: of
        the callers, whose limits hold over all faces."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self._hub = hub
        self._observer = observer
        self._quotas = quotas or Quotas()
        self._prompt_bound = prompt_bound(model.max_model_len, tokenizer.longest_token_bytes)
        self._is_draining = False
        self._num_running = 0
        # Of calls that are not submitted yet: what ends them early.
        self._patience: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Calls that are open."""
        return self._num_running

    def drain(self) -> None:
        """From now on new calls are refused; running ones go on."""
        self._is_draining = True

    def close(self) -> None:
        """Ends the calls that are not submitted yet with Unavailable; of the others the hub knows."""
        now_s = asyncio.get_running_loop().time()
        while self._patience:
            self._patience.pop().reschedule(now_s)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no call runs; False where the time was too short."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def reading(self, origin: Origin, request_id: str = "") -> AbstractContextManager[CallNote]:
        """For what a face does with a call before `open`: an error that leaves the block ends the call on record.

        request_id: "" where that is what is read."""
        return recorded(self._observer, request_id, origin)

    @asynccontextmanager
    async def open(
        self, message: inference_pb2.GenerateRequest, request_id: str, origin: Origin = UNKNOWN_ORIGIN
    ) -> AsyncIterator[Call]:
        """Submits a request; leaving the block, by whatever way, aborts what of it has not ended.

        Raises an OutriderError where it is refused.
        """
        caller = CALLER.get()
        with (
            recorded(self._observer, request_id, origin) as note,
            self._running(),
            self._quotas.call(caller) as allowance,
        ):
            model = self._model_for(caller)
            options = convert.options_of(message, request_id, model)
            async with self._until_closed():
                request = await self._request(message, options, origin, model)
                allowance.set_aside(len(request.prompt), request.n, request.stopping.max_tokens)
                if request.sampling.constraint is not None:
                    await self.engine.prepare(request.sampling.constraint)
                texts = await self._texts(request)
            with open_sequences(
                self._hub,
                request.uid,
                texts,
                abort=self.engine.abandon,
                whole=options.whole,
                on_tokens=allowance.spend,
            ) as sequences:
                aborted: set[int] = set()

                def abort() -> None:
                    for index in sequences.unfinished():
                        if index not in aborted:
                            aborted.add(index)
                            self.engine.abort(request.uid + index)

                self.engine.submit(request)
                allowance.spend(len(request.prompt))
                note.is_taken_in = True
                try:
                    yield Call(request=request, sequences=sequences, abort=abort)
                finally:
                    abort()  # also the way out of a cancelled task: the client left, or its deadline passed

    async def prompt_of(
        self,
        message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        bound: TextBound | None = None,
    ) -> tuple[int, ...]:
        """Ids of a message's input. bound: of its text; that of a prompt if left out. Raises InvalidRequest."""
        bound = bound or self._prompt_bound
        match message.WhichOneof("input"):
            case "text":
                return tuple(await self.tokenizer.encode(message.text, bound))
            case "chat":
                messages, opens_answer = convert.messages_of(message.chat)
                return tuple(
                    await self.tokenizer.encode_chat(messages, add_generation_prompt=opens_answer, bound=bound)
                )
            case "token_ids":
                assert isinstance(message, inference_pb2.GenerateRequest)
                return convert.prompt_ids_of(message.token_ids, self.model)
            case _:
                names = " or ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["input"].fields)
                raise InvalidRequest("input", f"none is given; set {names}")

    def _model_for(self, caller: Identity) -> ServedModel:
        """What a caller's requests are checked against."""
        most = caller.limits.max_context
        if most is None or most >= self.model.max_model_len:
            return self.model
        return replace(self.model, max_model_len=most)

    async def _request(
        self,
        message: inference_pb2.GenerateRequest,
        options: convert.GenerateOptions,
        origin: Origin,
        model: ServedModel,
    ) -> Request:
        """The checked request. Cheap checks have gone before; encoding comes last."""
        prompt = await self.prompt_of(message)
        return convert.request_of(
            options,
            prompt,
            field=str(message.WhichOneof("input")),
            uid=self.engine.next_uid(options.n),
            model=model,
            prediction=await self._prediction(message),
            origin=origin,
        )

    async def _texts(self, request: Request) -> list[TextStream]:
        """One per sequence. Long prompts that are to be echoed are spelled in a thread."""

        def make() -> list[TextStream]:
            return [
                TextStream(self.tokenizer.detokenizer(), request.stopping, request.report, prompt=request.prompt)
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
                ids = await self.tokenizer.encode_part(message.prediction.text, self._prompt_bound, field)
                return convert.prediction_of(field, ids, self.model)
            case "token_ids":
                field = "prediction.token_ids.ids"
                return convert.prediction_of(field, message.prediction.token_ids.ids, self.model)
            case _:
                raise InvalidRequest("prediction", "is empty; set text or token_ids, or leave it out")

    @asynccontextmanager
    async def _until_closed(self) -> AsyncIterator[None]:
        """What a call does before it is submitted. Raises Unavailable as soon as `close` is called."""
        patience = asyncio.timeout(None)
        self._patience.add(patience)
        try:
            async with patience:
                yield
        except TimeoutError:
            if patience.expired():
                raise Unavailable(STOPPED) from None
            raise
        finally:
            self._patience.discard(patience)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Counts a call. Raises Unavailable while draining."""
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
