"""Counter-based random numbers (Philox4x32-10) as a function of named keys. Knows no laws, tokens or sequences.

A variate is a function of (request seed, purpose, output position, step) and of nothing else, so there is no generator
state to roll back and no rank to desynchronise. The request seed is Philox's key; the counter's four words are

    word   0                 1         2                                        3
           output position   purpose   step of the variate, 0 for Purpose.TARGET  lane

Output position 0 is the first generated token. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_WORDS = 4
_LANES_MULTIPLE = 8
"""Lanes per row are rounded up to this, which makes a row of noise 32 floats or a multiple: see `exponential_noise`."""

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """What a variate decides; one purpose per use, so that no two decisions share one.

    TARGET: the noise of an output position that target and draft share in coupled mode; carries no step.
    DRAFT: drawing the draft of an output position in standard mode.
    ACCEPT: letting that draft stand or fall.
    ORACLE_CONFIDENCE, ORACLE_COIN: for measurements, how likely a draft is to stand, and whether it does
        (`workers/draft/oracle.py`).
    DRAW: the one token that ends a round, replacement or bonus, keyed by the round's first output position. A round
        makes exactly one such draw.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    DRAW = 3
    ORACLE_CONFIDENCE = 4
    ORACLE_COIN = 5


class KeyUse(NamedTuple):
    """One consumed key: everything a variate is a function of."""

    seed: int
    purpose: Purpose
    position: int
    step: int


@dataclass(slots=True)
class KeyAudit:
    """Keys in the order of their consumption. Keys of rows whose variate is then ignored are among them."""

    uses: list[KeyUse] = field(default_factory=list)

    def repeated(self) -> list[KeyUse]:
        """Keys consumed more than once. TARGET keys are exempt: draft and target share them by construction."""
        counts = Counter(use for use in self.uses if use.purpose is not Purpose.TARGET)
        return [use for use, count in counts.items() if count > 1]


_AUDIT: ContextVar[KeyAudit | None] = ContextVar("key_audit", default=None)


@contextmanager
def audit_keys() -> Iterator[KeyAudit]:
    """Record every key consumed in this context. For tests: recording reads tensors back to the host."""
    audit = KeyAudit()
    token = _AUDIT.set(audit)
    try:
        yield audit
    finally:
        _AUDIT.reset(token)


def signed_seed(seed: int) -> int:
    """The 64 bits of `seed` in [0, 2**64) as the signed integer that an int64 tensor can hold.

    Raises:
        ValueError: `seed` needs more than 64 bits or is negative.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is not an unsigned 64-bit number")
    return seed - 2**64 if seed >= 2**63 else seed


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10. All words are int64 tensors with values in [0, 2**32) that broadcast against each other.

    The 64-bit product of two 32-bit words wraps in int64, but its bits are right, so an arithmetic shift and a mask
    recover both halves. c1 and c3 keep garbage above bit 31 between rounds: they only enter through xor, before a mask.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = product1, product0
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def uniforms(seed: Tensor, purpose: Purpose, position: Tensor, step: int | Tensor) -> Tensor:
    """One uniform variate per key.

    seed, position, step: int64, broadcast against each other to the result's shape; one row of the batch has one key.
    Returns float64 in [0, 1) on the grid of 2**-53. Fewer bits would show: on a grid of 2**-24 an inverse-CDF draw
    misstates each of a large vocabulary's tail probabilities by up to 6e-8.
    """
    step = _as_tensor(step, seed)
    _record(seed, purpose, position, step)
    high, low, _, _ = philox4x32(
        (position & _MASK, _as_tensor(purpose, seed), step & _MASK, _as_tensor(0, seed)), _key(seed)
    )
    # 27 + 26 bits: the sum and the scaling are exact in float64, so no row depends on how the kernel is vectorised.
    return ((high >> 5) * 2**26 + (low >> 6)).to(torch.float64) * 2.0**-53


def exponential_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """The noise e of output positions under Purpose.TARGET: Exp(1) variates, one per token of the vocabulary.

    With Gumbel noise g = −log e, argmax(log p + g) = argmax(p / e), whose law is p.

    seed, position: int64 of one shape [*]. Returns float32 [*, vocab_size], positive and finite. The least e wins, so e
    is finely resolved near 0, in steps of 2**-32, and coarsely at its end near 16.6.

    Token v takes word v mod 4 of lane v div 4, whatever the vocabulary's size. The logarithm's vectorised body and
    scalar tail may differ in the last bit; rows are computed at a width that is a multiple of 32 floats, so with one
    thread no row has a tail and its bits do not depend on the other rows. Element-wise ops that callers apply to the
    result are on their own: reference numerics pads rows to a multiple of 32.
    """
    step = _as_tensor(0, seed)
    _record(seed, Purpose.TARGET, position, step)
    per_lane = _WORDS * _LANES_MULTIPLE
    num_lanes = (vocab_size + per_lane - 1) // per_lane * _LANES_MULTIPLE
    lanes = torch.arange(num_lanes, device=seed.device)
    key0, key1 = _key(seed.unsqueeze(-1))
    words = philox4x32(((position & _MASK).unsqueeze(-1), _as_tensor(Purpose.TARGET, seed), step, lanes), (key0, key1))
    uniform = (torch.stack(words, dim=-1).flatten(-2).to(torch.float32) + 0.5) * 2.0**-32
    noise = torch.log1p(-uniform.clamp_(max=_LARGEST_BELOW_ONE)).neg_()
    return noise[..., :vocab_size]


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & _MASK, (seed >> 32) & _MASK


def _as_tensor(value: int | Tensor, like: Tensor) -> Tensor:
    """A scalar as a tensor beside `like`, filled by the device rather than copied from the host."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), int(value), dtype=torch.int64, device=like.device)


def _record(seed: Tensor, purpose: Purpose, position: Tensor, step: Tensor) -> None:
    audit = _AUDIT.get()
    if audit is None:
        return
    shape = (seed + position + step).shape
    rows = torch.stack([column.expand(shape).flatten() for column in (seed, position, step)], dim=1)
    audit.uses += [
        KeyUse(row_seed, purpose, row_position, row_step) for row_seed, row_position, row_step in rows.tolist()
    ]
