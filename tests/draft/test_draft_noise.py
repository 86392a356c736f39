"""Why draft noise carries the step: a budget taken from the past must not know the draws it is spent on."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import torch
from draft.admission_laws import RequestModel, coin, verified

from workers.draft.admit import admit
from workers.sampling.randomness import KeyUse, audit_keys
from workers.sampling.verify import DrawParams, draw_draft

MODEL = RequestModel(p=lambda _: coin("3/4"), q=lambda _: coin("1/2"), confidence=lambda _: 1.0)
NEXT = 1
"""Output position that round 1 drafts as its second draft and round 2 as its first; round 1 emits one token."""


def keys_of_two_rounds() -> list[KeyUse]:
    """The keys `draw_draft` consumes when positions 0 and NEXT are drafted in round 1, and NEXT again in round 2."""
    off = torch.zeros(1, dtype=torch.bool)
    with audit_keys() as audit:
        for step, position in ((1, 0), (1, NEXT), (2, NEXT)):
            params = DrawParams(
                greedy_N=off, coupled_N=off, seed_N=torch.tensor([8]), position_N=torch.tensor([position])
            )
            draw_draft(torch.full((1, 2), 0.5), params, step, any_standard=True, any_coupled=False)
    return audit.uses


def law_at_next(identity: Callable[[KeyUse], object]) -> Fraction:
    """P(token 0) at NEXT, enumerated over every table from distinct keys to the two faces of q's fair coin.

    Round 2 has budget 1 if round 1's second draft was token 0, else 0: a statistic of the past.
    """
    keys = [identity(key) for key in keys_of_two_rounds()]
    distinct = list(dict.fromkeys(keys))
    total = Fraction(0)
    for faces in product((0, 1), repeat=len(distinct)):
        table = dict(zip(distinct, faces, strict=True))
        _, old_draft, new_draft = (table[key] for key in keys)
        budget = 1 if old_draft == 0 else 0
        confidence_BG = np.array([[MODEL.confidence(())]], dtype=np.float32)
        (num_admitted,) = admit(confidence_BG, np.array([1]), np.array([0]), budget)
        total += verified(MODEL, (new_draft,), num_admitted, 1).get((0,), Fraction(0))
    return total / 2 ** len(distinct)


def test_the_law_is_exact_with_the_keys_in_use() -> None:
    assert law_at_next(lambda key: key) == Fraction(3, 4)


def test_noise_keyed_by_position_alone_is_rejected() -> None:
    assert law_at_next(lambda key: key._replace(step=0)) == Fraction(7, 8)
