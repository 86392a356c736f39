"""What requests have done to logits before a law is made of them. Pure functions of (logits, tokens so far); knows no
law, no noise, no model.

A row is one law to come: of log index `index` of a slot. Its history is that slot's log below the index: the prompt,
what was output, and in a draft's rows the drafts before it, which lie in the log behind the newest token. Target rows,
rows of plain decoding and a drafter's rows go through the same code, and nothing is kept that would have to be rolled
back.

Order, see `workers.demands.Shaping`: repetition, frequency, presence, bias; then what may not stand.

Shapes: R rows, V vocabulary, N sequences, L longest history among them, D tokens that rows of a sequence may be apart,
K bad words or biases, M the longest bad word's tokens but the last, B bytes of a mask.

Sources: repetition penalty, Keskar et al. 1909.05858 §4.1 in the sign-aware form that is in use; frequency and presence
penalties as in OpenAI's API reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FORBIDDEN = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of histories, a row each. stood: whether a token is in prompt or output, bool [R, V]. output: how often in the
    output, int32 [R, V]."""

    stood: Tensor
    output: Tensor

    def of(self, rows_R: Tensor) -> Counts:
        return Counts(stood=self.stood.index_select(0, rows_R), output=self.output.index_select(0, rows_R))

    def behind(self, token_RD: Tensor, counts_RD: Tensor) -> Counts:
        """With those more tokens of the output that count. token_RD: int64; counts_RD: bool."""
        output_RV = self.output.scatter_add(1, token_RD, counts_RD.to(torch.int32))
        return Counts(stood=self.stood | (output_RV > 0), output=output_RV)


def count_tokens(log_NL: Tensor, prompt_len_N: Tensor, end_N: Tensor, vocab_size: int) -> Counts:
    """log_NL: int64, a log each; what lies at and beyond end_N counts for nothing."""
    place_L = torch.arange(log_NL.shape[1], device=log_NL.device)
    is_known_NL = place_L < end_N[:, None]
    is_output_NL = is_known_NL & (place_L >= prompt_len_N[:, None])
    token_NL = log_NL.clamp(0, vocab_size - 1)
    zeros_NV = torch.zeros(log_NL.shape[0], vocab_size, dtype=torch.int32, device=log_NL.device)
    return Counts(
        stood=zeros_NV.scatter_add(1, token_NL, is_known_NL.to(torch.int32)) > 0,
        output=zeros_NV.scatter_add(1, token_NL, is_output_NL.to(torch.int32)),
    )


def penalise(
    logits_RV: Tensor, counts: Counts, repetition_R: Tensor, frequency_R: Tensor, presence_R: Tensor
) -> Tensor:
    """Penalties, float32 [R]; 1, 0 and 0 leave a row as it is, bit for bit."""
    repetition_R1 = repetition_R[:, None]
    lowered_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(counts.stood, lowered_RV, logits_RV)
    logits_RV = logits_RV - frequency_R[:, None] * counts.output
    return logits_RV - presence_R[:, None] * (counts.output > 0)


def completes_bad_word(before_RM: Tensor, exists_RM: Tensor, words_RKM: Tensor, lengths_RK: Tensor) -> Tensor:
    """Whether the last token of a bad word would complete it behind a row's history, bool [R, K].

    before_RM: int64, the history's last M tokens; exists_RM: bool, as far as it has so many.
    words_RKM: int64, each word's tokens but the last, ending at M; what is before them is not looked at.
    lengths_RK: int64, of whole words; 0 for none.
    """
    back_M = torch.arange(words_RKM.shape[-1], 0, -1, device=words_RKM.device)
    counts_RKM = back_M < lengths_RK[..., None]
    agrees_RKM = (before_RM[:, None] == words_RKM) & exists_RM[:, None]
    return (agrees_RKM | ~counts_RKM).all(-1) & (lengths_RK > 0)


def mark(token_RK: Tensor, holds_RK: Tensor, vocab_size: int) -> Tensor:
    """The tokens that hold, bool [R, V]. A token may stand twice in a row, once holding and once not."""
    beyond_RK = torch.where(holds_RK, token_RK, vocab_size)
    marks_RV = torch.zeros(len(token_RK), vocab_size + 1, dtype=torch.bool, device=token_RK.device)
    return marks_RV.scatter(1, beyond_RK, True)[:, :vocab_size]


def unpack(allowed_RB: Tensor, vocab_size: int) -> Tensor:
    """Whether each token is left out, bool [R, V]. allowed_RB: uint8, a bit each, the lowest id in the lowest bit."""
    bit_8 = torch.arange(8, dtype=torch.uint8, device=allowed_RB.device)
    return ((allowed_RB[..., None] >> bit_8) & 1).flatten(1)[:, :vocab_size] == 0


def forbid(logits_RV: Tensor, hard_RV: Tensor | None, soft_RV: Tensor | None, mask_RV: Tensor | None) -> Tensor:
    """Takes the tokens that may not stand out of each row. bool [R, V] each, True where a token may not; None: none is.

    Where all three leave nothing, hard and mask count; where these leave nothing, mask alone does; where it leaves
    nothing either, all may stand.
    """
    out_RV: Tensor | None = None
    # From what counts least to what counts most: each set of bans gives way to the one before it.
    for bans in ((mask_RV,), (mask_RV, hard_RV), (mask_RV, hard_RV, soft_RV)):
        if bans[-1] is None:
            continue
        less_RV, out_RV = out_RV, _any(bans)
        if less_RV is None:
            less_RV = torch.zeros_like(out_RV)
        out_RV = torch.where(out_RV.all(-1, keepdim=True), less_RV, out_RV)
    return logits_RV if out_RV is None else logits_RV.masked_fill(out_RV, FORBIDDEN)


def _any(bans: tuple[Tensor | None, ...]) -> Tensor:
    first, *others = (each for each in bans if each is not None)
    for other in others:
        first = first | other
    return first
