"""One request from sending it to its last frame, with the times of its frames. Knows no load and no figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.bench.counters import DraftCounts
from runtime.bench.extras import NOTHING, Conversation, Extras
from runtime.request import Round
from workers.plan import OracleDrafts

if TYPE_CHECKING:
    import grpc.aio

    from outrider.v1 import inference_pb2
    from runtime.front.client import OutriderClient

AT_LENGTH = "LENGTH"
NO_DRAFTS = DraftCounts()

Clock = Callable[[], float]
"""Seconds, on a clock that never steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame that arrived. at_s: on the reader's clock. num_tokens: new ones in it; a last frame may bring none."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came of one request.

    rounds: () unless the request asked for them. num_passes: of the target, that of the prompt's last chunk among them.
    drafts: by where they came from. sent_s: when it was sent, on the clock of its frames.
    finish: why it ended, a FinishReason without its prefix; "" where it failed.
    failure: the gRPC code that ended it, "" where it finished. failure_text: what the server said of it.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    num_passes: int
    sent_s: float
    frames: tuple[Frame, ...]
    drafts: DraftCounts = NO_DRAFTS
    finish: str = AT_LENGTH
    failure: str = ""
    failure_text: str = ""

    @property
    def at_length(self) -> bool:
        """Whether it ended at its longest."""
        return self.finish == AT_LENGTH

    @property
    def seconds(self) -> float:
        """From sending it to its last frame; 0 where none came."""
        return self.frames[-1].at_s - self.sent_s if self.frames else 0.0


def generate_request(
    prompt: str | Sequence[int] | Conversation,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = True,
    report_rounds: bool = True,
    extras: Extras = NOTHING,
    oracle: OracleDrafts | None = None,
) -> inference_pb2.GenerateRequest:
    """A request for `max_tokens` tokens. prompt: text, token ids, or messages. report_rounds: costs the server a search
    of the logits in every pass. oracle: drafts in place of the drafter's own, where the server takes them."""
    from outrider.v1 import inference_pb2, types_pb2

    request = inference_pb2.GenerateRequest(
        sampling=types_pb2.Sampling(temperature=temperature, seed=seed),
        stopping=types_pb2.Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos),
        report_rounds=report_rounds,
    )
    if oracle is not None:
        request.oracle.CopyFrom(inference_pb2.Oracle(continuation=oracle.continuation, acceptance=oracle.acceptance))
    match prompt:
        case str():
            request.text = prompt
        case Conversation():
            request.chat.CopyFrom(chat_of(prompt))
        case _:
            request.token_ids.ids.extend(prompt)
    _add_extras(request, extras)
    return request


def chat_of(conversation: Conversation) -> inference_pb2.Chat:
    from outrider.v1 import inference_pb2

    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in conversation.messages]
    return inference_pb2.Chat(messages=messages)


def _add_extras(request: inference_pb2.GenerateRequest, extras: Extras) -> None:
    if isinstance(extras.prediction, str):
        request.prediction.text = extras.prediction
    elif extras.prediction:
        request.prediction.token_ids.ids.extend(extras.prediction)
    if extras.json_schema:
        request.constraint.json_schema = extras.json_schema
    if extras.ngram:
        request.ngram = True


async def complete(
    client: OutriderClient, request: inference_pb2.GenerateRequest, clock: Clock = time.perf_counter
) -> Completion:
    """Sends a request and reads it to its end. Raises AioRpcError where it fails."""
    completion, error = await attempt(client, request, clock)
    if error is not None:
        raise error
    return completion


async def attempt(
    client: OutriderClient, request: inference_pb2.GenerateRequest, clock: Clock = time.perf_counter
) -> tuple[Completion, grpc.aio.AioRpcError | None]:
    """Like `complete`, but a request that fails leaves what had come of it until then, beside the error."""
    import grpc.aio

    from outrider.v1 import types_pb2

    tokens: list[int] = []
    rounds: list[Round] = []
    frames: list[Frame] = []
    error: grpc.aio.AioRpcError | None = None
    usage, finish = types_pb2.Usage(), ""
    sent_s = clock()
    try:
        async for frame in client.generate(request):
            frames.append(Frame(at_s=clock(), num_tokens=len(frame.token_ids)))
            tokens += frame.token_ids
            rounds += rounds_of(frame)
            usage = frame.usage
            if frame.HasField("finish"):
                finish = types_pb2.FinishReason.Name(frame.finish.reason).removeprefix("FINISH_REASON_")
    except grpc.aio.AioRpcError as raised:
        error = raised
    completion = Completion(
        tokens=tuple(tokens),
        rounds=tuple(rounds),
        num_passes=usage.rounds,
        sent_s=sent_s,
        frames=tuple(frames),
        drafts=DraftCounts.of(usage),
        finish=finish,
        failure="" if error is None else error.code().name,
        failure_text="" if error is None else error.details() or "",
    )
    return completion, error


def rounds_of(frame: inference_pb2.GenerateResponse) -> list[Round]:
    """The rounds of a frame as domain values."""
    return [
        Round(
            drafted=tuple(message.drafted_token_ids),
            accepted=message.accepted,
            emitted=tuple(message.emitted_token_ids),
            margins=tuple(message.emitted_margins),
        )
        for message in frame.rounds
    ]
