"""The queue between engine and front, one batch of values each way per step. Knows nothing of gRPC or torch.

    engine ── list[TokenEvent | ErrorEvent] ──▶ front      once a step
    engine ◀── submit, abort, verdicts ──────── front

The front detokenises and finds stop strings. A sequence with stop strings is not scheduled again before its verdict is
in, so no work is done and nothing is published beyond a match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.front.errors import OutriderError
from runtime.request import Finish, Round, Usage
from workers.demands import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """Tokens committed for one request since its last event.

    logprobs: one per token, where the request wants them. prompt_logprobs: of prompt tokens from the second on, in the
        order in which passes have come to them.
    finish: set in the last event of a request.
    needs_verdict: the engine waits for a Verdict before it ends the request or schedules it again.
    """

    uid: int
    tokens: tuple[int, ...]
    usage: Usage
    rounds: tuple[Round, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    needs_verdict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent:
    """The request ends without a result."""

    uid: int
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The front's answer to an event that needed one.

    stop: a stop string ended the request, whatever end the event had. The front has cut tokens and text; the engine
        only lets go of the sequence.
    num_cut: with `stop`, tokens of the event behind the match.
    gone: the stream is no more, for another reason; the engine lets go of the sequence too. error: that reason, where
        there is one.
    """

    uid: int
    stop: bool
    num_cut: int = 0
    gone: bool = False
    error: OutriderError | None = None


class EventSink(Protocol):
    """The front's end of the queue."""

    def deliver(self, events: list[TokenEvent | ErrorEvent]) -> list[Verdict]:
        """Takes one step's events; answers those that need a verdict. Never blocks."""
        ...
