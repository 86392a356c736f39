"""From logits to the law that is actually sampled. Pure functions of rows; knows no randomness and no drafts.

Target and drafter both call `target_law`, so p and q of verification are the laws that tokens are drawn from.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Sampling parameters, one entry per row.

    temperature: float32 [R]; 0 is greedy, and the other parameters of such a row mean nothing.
    top_k: int64 [R]; 0 is off.
    top_p: float32 [R] in [0, 1]; 1 is off, 0 leaves the most probable token.
    min_p: float32 [R] in [0, 1]; 0 is off.
    typical_p: float32 [R] in (0, 1]; 1 is off.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor

    @property
    def greedy(self) -> Tensor:
        """bool [R]."""
        return self.temperature == 0


def target_law(
    logits_RV: Tensor, params: RowParams, *, any_sampled: bool, any_sorted: bool, any_typical: bool = False
) -> Tensor:
    """The law each row is sampled from.

    Order: temperature, top-k, top-p, min-p, typical-p, renormalise. Top-p takes the law after top-k, min-p the ratio to
    the most probable token, typical-p the law after all of them. All but the last keep the most probable token; of
    equal logits the lower id counts as the more probable. A greedy row is a point mass on its most probable token.

    logits_RV: any float dtype; −inf forbids a token; one finite logit per row at least.
    any_sampled: False promises that every row is greedy. any_sorted, any_typical: False promises that no row that is
        not greedy has top-k or top-p on, or typical-p, and saves a sort. All are decided on the host from the requests'
        parameters.
    Returns float32 [R, V]; rows sum to 1 and do not depend on each other.
    """
    logits_RV = logits_RV.to(torch.float32)
    vocab_size = logits_RV.shape[-1]
    token_V = torch.arange(vocab_size, device=logits_RV.device)
    point_RV = (token_V == logits_RV.argmax(dim=-1, keepdim=True)).to(torch.float32)
    if not any_sampled:
        return point_RV
    greedy_R1 = params.greedy.unsqueeze(-1)
    temperature_R1 = torch.where(greedy_R1, 1.0, params.temperature.unsqueeze(-1))
    # Differences to the maximum first: a small temperature then overflows to −inf, never to +inf.
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R1
    law_RV = torch.softmax(scaled_RV, dim=-1)
    if any_sorted:
        law_RV = _keep_top(law_RV, logits_RV, params)
    law_RV = torch.where(law_RV >= params.min_p.unsqueeze(-1) * law_RV.amax(dim=-1, keepdim=True), law_RV, 0.0)
    law_RV = law_RV / law_RV.sum(dim=-1, keepdim=True)
    if any_typical:
        typical_RV = _keep_typical(law_RV, params.typical_p)
        # Rows without it keep their bits, which dividing by their sum once more would not.
        is_cut_R1 = params.typical_p.unsqueeze(-1) < 1
        law_RV = torch.where(is_cut_R1, typical_RV / typical_RV.sum(dim=-1, keepdim=True), law_RV)
    return torch.where(greedy_R1, point_RV, law_RV)


def _keep_top(law_RV: Tensor, logits_RV: Tensor, params: RowParams) -> Tensor:
    """Top-k, then top-p: the law with the other tokens' mass set to 0, not renormalised.

    Top-p keeps the smallest prefix of the descending law whose share of the mass left by top-k reaches top_p; that is,
    a token stays while the mass before it is below top_p. Ranks come from the logits, stably: two tokens whose
    probabilities have rounded to one value keep the order of their logits, and equal logits that of their ids.
    """
    vocab_size = law_RV.shape[-1]
    order_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices
    rank_V = torch.arange(vocab_size, device=law_RV.device)
    top_k_R1 = params.top_k.unsqueeze(-1)
    in_top_k_RV = (rank_V < top_k_R1) | (top_k_R1 == 0)
    sorted_RV = torch.where(in_top_k_RV, law_RV.gather(-1, order_RV), 0.0)
    reached_RV = sorted_RV.cumsum(dim=-1, dtype=torch.float64)
    before_RV = torch.cat([torch.zeros_like(reached_RV[:, :1]), reached_RV[:, :-1]], dim=-1)
    top_p_R1 = params.top_p.unsqueeze(-1).to(torch.float64)
    # top_p = 1 by name rather than by sums: the mass before a tail token may round to all of it.
    in_top_p_RV = (before_RV < top_p_R1 * reached_RV[:, -1:]) | (top_p_R1 >= 1) | (rank_V == 0)
    kept_RV = torch.where(in_top_p_RV, sorted_RV, 0.0)
    return torch.zeros_like(law_RV).scatter(-1, order_RV, kept_RV)


def _keep_typical(law_RV: Tensor, typical_p_R: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2202.00666): the tokens whose surprise is nearest to the entropy, the
    fewest whose mass reaches typical_p. The law with the other tokens' mass set to 0, not renormalised. Of tokens as
    near the lower id counts as the nearer.
    """
    surprise_RV = torch.where(law_RV > 0, -law_RV.clamp(min=torch.finfo(law_RV.dtype).tiny).log(), 0.0)
    entropy_R1 = (law_RV * surprise_RV).sum(dim=-1, keepdim=True)
    distance_RV = torch.where(law_RV > 0, (surprise_RV - entropy_R1).abs(), float("inf"))
    order_RV = distance_RV.sort(dim=-1, stable=True).indices
    sorted_RV = law_RV.gather(-1, order_RV)
    reached_RV = sorted_RV.cumsum(dim=-1, dtype=torch.float64)
    before_RV = torch.cat([torch.zeros_like(reached_RV[:, :1]), reached_RV[:, :-1]], dim=-1)
    typical_p_R1 = typical_p_R.unsqueeze(-1).to(torch.float64)
    rank_V = torch.arange(law_RV.shape[-1], device=law_RV.device)
    kept_RV = (before_RV < typical_p_R1 * reached_RV[:, -1:]) | (rank_V == 0)
    return torch.zeros_like(law_RV).scatter(-1, order_RV, torch.where(kept_RV, sorted_RV, 0.0))
