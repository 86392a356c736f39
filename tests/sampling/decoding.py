"""Whole streams decoded in rounds against a target that depends on the previous token only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.sampling.verify import DrawParams, draw_draft, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """tokens_BN of the first N output positions; how many drafts were verified and accepted over all rounds."""

    tokens_BN: Tensor
    num_verified: int
    num_accepted: int


def decode(
    p_VV: Tensor,
    q_VV: Tensor,
    *,
    greedy_B: Tensor,
    coupled_B: Tensor,
    seed_B: Tensor,
    num_tokens: int,
    gamma_of_round: Callable[[int], int],
    claimed_q_VV: Tensor | None = None,
    step_of_round: Callable[[int], int] = lambda index: index,
) -> Streams:
    """Decode all sequences from token 0 until each has `num_tokens`.

    p_VV, q_VV: laws of the next token by previous token. greedy_B sequences must be given point masses by the caller.
    claimed_q_VV: what verification is told the drafts were drawn from, q_VV unless the test lies. Sequences verify
    between 0 and gamma of their drafts, in turn.
    """
    num_sequences, vocab_size = len(seed_B), len(p_VV)
    claimed_q_VV = q_VV if claimed_q_VV is None else claimed_q_VV
    sequence_B = torch.arange(num_sequences)
    last_B = torch.zeros(num_sequences, dtype=torch.int64)
    position_B = torch.zeros(num_sequences, dtype=torch.int64)
    tokens_BN = torch.full((num_sequences, num_tokens + 1), -1)
    modes = {
        "any_standard": bool((~(greedy_B | coupled_B)).any()),
        "any_coupled": bool(coupled_B.any()),
    }
    num_verified = num_accepted = index = 0
    while int(position_B.min()) < num_tokens:
        gamma, step = gamma_of_round(index), step_of_round(index)
        previous = [last_B]
        for j in range(gamma):
            params = DrawParams(greedy_N=greedy_B, coupled_N=coupled_B, seed_N=seed_B, position_N=position_B + j)
            previous.append(draw_draft(q_VV[previous[-1]], params, step, **modes))
        previous_BW = torch.stack(previous, dim=1)
        num_drafts_B = gamma - (sequence_B + index) % (gamma + 1) // 2
        params = DrawParams(greedy_N=greedy_B, coupled_N=coupled_B, seed_N=seed_B, position_N=position_B)
        q_BGV = claimed_q_VV[previous_BW[:, :-1]].view(num_sequences, gamma, vocab_size)
        verdict = verify(p_VV[previous_BW], q_BGV, previous_BW[:, 1:], num_drafts_B, params, step, **modes)
        # Column num_tokens takes what lies beyond the last position or behind the emitted run.
        window = torch.arange(gamma + 1)
        target_BW = (position_B.unsqueeze(1) + window).where(verdict.tokens_BW >= 0, num_tokens).clamp(max=num_tokens)
        tokens_BN.scatter_(1, target_BW, verdict.tokens_BW)
        last_B = verdict.tokens_BW.gather(1, verdict.num_accepted_B.unsqueeze(1)).squeeze(1)
        position_B = position_B + verdict.num_emitted_B
        num_verified += int(num_drafts_B.sum())
        num_accepted += int(verdict.num_accepted_B.sum())
        index += 1
    return Streams(tokens_BN=tokens_BN[:, :num_tokens], num_verified=num_verified, num_accepted=num_accepted)
