"""What a caller asked for and what comes back, as frozen values. Knows nothing of gRPC, torch or scheduling."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from workers.demands import NO_SHAPING, Constraint, Shaping, Typical
from workers.plan import MAX_EOS_IDS, MAX_STOP_IDS, OracleDrafts

MAX_STOP_TOKEN_IDS = MAX_STOP_IDS - MAX_EOS_IDS
"""Stop token ids a request may name: what the worker's table leaves when the checkpoint's own ids are in it."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; defaults already applied.

    `coupled` chooses the verification of sampled requests (Gumbel noise keyed by output position); greedy ones
    (temperature 0) ignore it. `typical` comes before it, and is lossy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    coupled: bool = False
    shaping: Shaping = NO_SHAPING
    constraint: Constraint | None = None
    typical: Typical | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When a sequence ends. `eos_token_ids` is empty for requests that ignore them.

    include_stop: what ended it is text too. time_limit_s: from intake on.
    """

    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportParams:
    """What is told of the tokens besides their ids and text.

    num_logprobs, num_prompt_logprobs: likeliest tokens beside each one's log-probability; None tells none.
    echo: text and ids begin with the prompt's. offsets: where in the text each token begins. rounds: what was drafted.
    """

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    echo: bool = False
    offsets: bool = False
    rounds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a request came from. identity: who asked, by the name that access knows. face: the service that was called.
    traceparent, tracestate: the caller's span, in the W3C form; empty where there is none. deadline_s: on the monotonic
    clock, when the caller stops waiting; None where it has not said."""

    identity: str = "anyone"
    face: str = ""
    traceparent: str = ""
    tracestate: str = ""
    deadline_s: float | None = None


UNKNOWN_ORIGIN = Origin()
"""Of requests that came by no call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated request. `uid` is unique for the life of the server; `request_id` is the caller's name for it.

    n: independent sequences behind the prompt, with uids from `uid` on. index: which of them this is, once they are
        told apart (`sequences_of`); what has n > 1 and index 0 stands for all of them until then.
    prediction: tokens that the output may have in common with. looks_back: drafts are looked up in what it has.
    max_drafts: drafts per round at most, whatever the policy says; None sets no limit.
    oracle: for measurements, drafts in place of the drafter's own. origin: whom to name in logs and traces.
    """

    uid: int
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StopParams
    priority: int = 0
    report: ReportParams = ReportParams()
    n: int = 1
    index: int = 0
    prediction: tuple[int, ...] = ()
    looks_back: bool = False
    max_drafts: int | None = None
    oracle: OracleDrafts | None = None
    origin: Origin = UNKNOWN_ORIGIN


def sequences_of(request: Request) -> tuple[Request, ...]:
    """The sequences of a request, in order: each with its uid and seed. The first keeps those of the request."""
    return tuple(
        replace(
            request,
            uid=request.uid + index,
            index=index,
            sampling=replace(request.sampling, seed=seed_of_sequence(request.sampling.seed, index)),
        )
        for index in range(request.n)
    )


def seed_of_sequence(seed: int, index: int) -> int:
    """The seed of a request's sequence: a function of both alone, uint64; the request's own for index 0."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8, person=b"outrider seq").digest()
    return int.from_bytes(digest, "little")


class FinishReason(Enum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONSTRAINT = "constraint"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cumulative counts of one sequence; completion = accepted + rounds − trimmed.

    cached: prompt tokens that another sequence had computed. forbidden: admitted drafts at and behind one that the
    constraint forbids. predicted_*, ngram_*: part of drafted, admitted and accepted, by what made the drafts.
    """

    prompt: int
    completion: int = 0
    rounds: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    trimmed: int = 0
    seed: int = 0
    cached: int = 0
    forbidden: int = 0
    predicted_drafted: int = 0
    predicted_admitted: int = 0
    predicted_accepted: int = 0
    ngram_drafted: int = 0
    ngram_admitted: int = 0
    ngram_accepted: int = 0


def total_of(usages: Sequence[Usage]) -> Usage:
    """Of all sequences of a request, in order of index. Sums, but for what they share: the prompt, what of it was
    cached, and the request's seed, which are those of the first."""
    first = usages[0]
    sums = {name: sum(getattr(usage, name) for usage in usages) for name in Usage.__slots__}
    return replace(Usage(**sums), prompt=first.prompt, cached=first.cached, seed=first.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One target pass of one sequence: what was drafted, how many drafts stood, what was emitted after clipping.

    margins: one per emitted token, by how much the target's largest logit led the second largest there; empty where the
        worker was not asked. A small one marks a near tie, which rounding decides.
    """

    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    margins: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a sequence ended, and what matched."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None
