"""One request from sending it to its last frame, with the times of its frames. Knows no load and no figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.request import Round
from workers.plan import OracleDrafts

if TYPE_CHECKING:
    import grpc.aio

    from outrider.v1 import inference_pb2
    from runtime.front.client import OutriderClient

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
    sent_s: when it was sent, on the clock of its frames. at_length: whether it ended at its longest.
    failure: the gRPC code that ended it, "" where it finished. failure_text: what the server said of it.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    num_passes: int
    sent_s: float
    frames: tuple[Frame, ...]
    at_length: bool = True
    failure: str = ""
    failure_text: str = ""

    @property
    def seconds(self) -> float:
        """From sending it to its last frame; 0 where none came."""
        return self.frames[-1].at_s - self.sent_s if self.frames else 0.0


def generate_request(
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = True,
    report_rounds: bool = True,
    oracle: OracleDrafts | None = None,
) -> inference_pb2.GenerateRequest:
    """A request for `max_tokens` tokens. prompt: text, or token ids. report_rounds: costs the server a search of the
    logits in every pass. oracle: drafts in place of the drafter's own, where the server takes them."""
    from outrider.v1 import inference_pb2, types_pb2

    request = inference_pb2.GenerateRequest(
        sampling=types_pb2.Sampling(temperature=temperature, seed=seed),
        stopping=types_pb2.Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos),
        report_rounds=report_rounds,
    )
    if oracle is not None:
        request.oracle.CopyFrom(inference_pb2.Oracle(continuation=oracle.continuation, acceptance=oracle.acceptance))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


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
    num_passes, at_length = 0, False
    sent_s = clock()
    try:
        async for frame in client.generate(request):
            frames.append(Frame(at_s=clock(), num_tokens=len(frame.token_ids)))
            tokens += frame.token_ids
            rounds += rounds_of(frame)
            num_passes = frame.usage.rounds
            at_length = frame.finish.reason == types_pb2.FINISH_REASON_LENGTH
    except grpc.aio.AioRpcError as raised:
        error = raised
    completion = Completion(
        tokens=tuple(tokens),
        rounds=tuple(rounds),
        num_passes=num_passes,
        sent_s=sent_s,
        frames=tuple(frames),
        at_length=at_length,
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
