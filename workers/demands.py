"""What a request demands of its tokens, as a rank gets it: the processing of logits, constraints, predictions, reports.

No torch, no wire format. Everything here is a function of the committed position and of what is given once, when the
sequence enters; nothing has to be rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is done to logits before a law is made of them, in this order:

    repetition: logits of tokens in prompt or output are divided by it where positive, else multiplied; 1 is off.
    frequency, presence: taken from the logit of a token in the output, for each time and at all; 0 is off.
    bias: (id, what is added to its logit).
    allowed: the only ids that may stand; () allows all. banned: ids that may not.
    bad_words: runs of two ids or more whose last one may not stand behind the others.
    min_tokens: before so many output tokens no stop id may stand.

    Then the constraint counts. Where nothing is left, bad_words and min_tokens do not count; where still nothing is,
    allowed and banned do not either.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    @property
    def penalises(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


NO_SHAPING = Shaping()

ConstraintKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What the output must be as a whole. text: the schema, expression or grammar; choices as a JSON list."""

    kind: ConstraintKind
    text: str = ""


MAX_PREPARING = 2
"""Constraints that a rank compiles at a time; the runtime keeps the others waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """Lossy, by explicit wish: a draft x stands where p(x) > min(epsilon, delta · exp(−H(p))); Cai et al. 2401.10774"""

    epsilon: float = 0.09
    delta: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A sequence that begins as the copy of another one of its rank, which has committed all of their prompt but the
    last token, before anything of the step runs.

    slot, epoch: of that other one. Where they are those that the sequence enters itself, it goes on in the place of one
        that has ended before it drew a token, however much of the prompt that has committed.
    pages: per cache group, (its page, the new one's) where a page that both would write to is copied; the pages before
        it are shared.
    """

    slot: int
    epoch: int
    pages: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely the target held a token by its own logits, before any processing; natural logarithms, float32.
    top: the likeliest ids in order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
