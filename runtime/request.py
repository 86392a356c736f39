"""What a caller asked for and what comes back, as frozen values. Knows nothing of gRPC, torch or scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workers.plan import MAX_EOS_IDS, MAX_STOP_IDS, OracleDrafts

MAX_STOP_TOKEN_IDS = MAX_STOP_IDS - MAX_EOS_IDS
"""Stop token ids a request may name: what the worker's table leaves when the checkpoint's own ids are in it."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; defaults already applied.

    `coupled` chooses the verification of sampled requests (Gumbel noise keyed by output position); greedy ones
    (temperature 0) ignore it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    coupled: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When a sequence ends. `eos_token_ids` is empty for requests that ignore them."""

    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated request. `uid` is unique for the life of the server; `request_id` is the caller's name for it.

    max_drafts: drafts per round at most, whatever the policy says; None sets no limit.
    oracle: for measurements, drafts in place of the drafter's own.
    """

    uid: int
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StopParams
    priority: int = 0
    report_rounds: bool = False
    max_drafts: int | None = None
    oracle: OracleDrafts | None = None


class FinishReason(Enum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cumulative counts of one sequence; completion = accepted + rounds − trimmed."""

    prompt: int
    completion: int = 0
    rounds: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    trimmed: int = 0
    seed: int = 0


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
