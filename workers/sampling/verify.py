"""Which drafts stand, and the token that ends the round. Knows laws and noise; no model, no state, no schedule.

Glossary
    draft         a token the drafter proposed for an output position, admitted to the target pass.
    accepted      a draft that stands: it and all drafts before it in its round were let stand.
    replacement   the token drawn at the first position whose draft fell; drafts after it are void.
    bonus         the token drawn after the last draft when all of them stood; the only token of a round without drafts.
    emitted       the accepted drafts and then the replacement or the bonus: num_accepted + 1 tokens, before clipping.

Shapes: B sequences, W window rows = 1 + G, G the most drafts of any sequence, V vocabulary, R rows, S stop ids. Row j
of a window is the target's law of output position position + j, given drafts 0 .. j − 1.

Sources: Leviathan, Kalman, Matias 2211.17192 and Chen et al. 2302.01318 (standard); Daliri, Musco, Suresh 2408.07978
(coupled); Cai et al. 2401.10774 §2.3.1 (typical, which is lossy).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.sampling.randomness import Purpose, exponential_noise, uniforms

NO_TOKEN = -1
"""Fills the window behind the last emitted token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a round emits.

    tokens_BW: int64; num_accepted accepted drafts, the replacement or bonus, then NO_TOKEN.
    num_accepted_B: int64.
    acceptance_BG: with which probability a draft stands at each position, given those before it; it counts up to and
        including the first draft that fell. float64; int64, in units of the laws' mass, where these are integers.
    """

    tokens_BW: Tensor
    num_accepted_B: Tensor
    acceptance_BG: Tensor

    @property
    def num_emitted_B(self) -> Tensor:
        """int64 [B], 1 at least."""
        return self.num_accepted_B + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """How each of N sequences or rows draws its tokens, and the keys of its noise.

    greedy_N, coupled_N: bool; coupled means nothing where greedy. Rows that are neither are standard, and draw so where
        they are verified as typical.
    seed_N: int64, the 64 bits of the request's seed (`randomness.signed_seed`).
    position_N: int64, output position of the row, or of the first row of the sequence's window.
    """

    greedy_N: Tensor
    coupled_N: Tensor
    seed_N: Tensor
    position_N: Tensor

    @property
    def standard_N(self) -> Tensor:
        return ~(self.greedy_N | self.coupled_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalParams:
    """Which of B sequences are verified by how typical their drafts are, bool, none of them greedy or coupled; and the
    thresholds of those, float32."""

    lossy_B: Tensor
    epsilon_B: Tensor
    delta_B: Tensor


def verify_standard(
    p_BWV: Tensor,
    q_BGV: Tensor,
    drafts_BG: Tensor,
    num_drafts_B: Tensor,
    u_accept_BG: Tensor,
    u_draw_B: Tensor,
    *,
    scale: float,
) -> Verdict:
    """Speculative sampling: draft x stands with probability min(1, p(x) / q(x)), a replacement is drawn from the
    normalised positive part of p − q, a bonus from p. The emitted tokens then follow p.

    Only products, differences, cumulative sums and comparisons are used, so the same function runs on integers, where
    the law over all integer uniforms is exact. Floats are widened to float64, integers to int64.

    A draft that is yet to be drawn from q stands with probability Σ min(p, q), which is its acceptance.

    p_BWV, q_BGV: float or int; every row of either sums to one total. drafts_BG: int64, drawn from q; entries at and
        beyond num_drafts are ignored and may hold any number, as may the rows of q and of u_accept.
    u_accept_BG, u_draw_B: uniforms in [0, scale), float64 or int64.
    scale: 1.0 with floats; with integers, how many values a uniform takes.
    """
    wide = torch.float64 if p_BWV.is_floating_point() else torch.int64
    _, window, vocab_size = p_BWV.shape
    picked_BG1 = drafts_BG.clamp(0, vocab_size - 1).unsqueeze(-1)
    p_drafted_BG = p_BWV[:, :-1].gather(-1, picked_BG1).squeeze(-1).to(wide)
    q_drafted_BG = q_BGV.gather(-1, picked_BG1).squeeze(-1).to(wide)
    stands_BG = u_accept_BG * q_drafted_BG < p_drafted_BG * scale
    num_accepted_B = _leading(stands_BG, num_drafts_B)

    p_BV = _laws_at(p_BWV, num_accepted_B).to(wide)
    residual_BV = p_BV
    if window > 1:
        q_BV = _laws_at(q_BGV, num_accepted_B.clamp(max=window - 2)).to(wide)
        fell_B1 = (num_accepted_B < num_drafts_B).unsqueeze(-1)
        residual_BV = torch.where(fell_B1, (p_BV - q_BV).clamp(min=0), p_BV)
        # A draft falls only where q > p, so some residual is positive elsewhere unless rounding of the laws took it.
        residual_BV = torch.where(residual_BV.sum(dim=-1, keepdim=True) > 0, residual_BV, p_BV)
    drawn_B = _inverse_cdf(residual_BV, u_draw_B, scale)
    return _verdict(drafts_BG, num_accepted_B, drawn_B, _overlap(p_BWV, q_BGV, wide))


def verify_coupled(y_BW: Tensor, drafts_BG: Tensor, num_drafts_B: Tensor) -> Verdict:
    """A draft stands iff it is the token the target itself takes there; for greedy and for coupled sequences.

    Its acceptance is 1 or 0: a greedy law is a point mass, and shared noise leaves nothing to chance.

    y_BW: int64, the target's own token of each row. drafts_BG, num_drafts_B: as in `verify_standard`.
    """
    stands_BG = drafts_BG == y_BW[:, :-1]
    num_accepted_B = _leading(stands_BG, num_drafts_B)
    last_B = y_BW.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
    return _verdict(drafts_BG, num_accepted_B, last_B, stands_BG.to(torch.float64))


def verify_typical(
    p_BWV: Tensor,
    drafts_BG: Tensor,
    num_drafts_B: Tensor,
    epsilon_B: Tensor,
    delta_B: Tensor,
    u_draw_B: Tensor,
    *,
    scale: float,
) -> Verdict:
    """Lossy: a draft x stands where p(x) > min(ε, δ · exp(−H(p))), H(p) the entropy of p in nats; a replacement and a
    bonus are drawn from p.

    So of drafts drawn from q a token x follows with probability q(x) · [x is typical] + p(x) · Σ q(y) over the y that
    are not: not p, unless no draft that q gives is typical. A token that p cannot give never stands. Of a greedy law, a
    point mass, the exact stream comes out, and such rows need not come here. The acceptance of a draft is 1 or 0.

    p_BWV, drafts_BG, num_drafts_B, u_draw_B, scale: as in `verify_standard`. epsilon_B, delta_B: float.
    """
    picked_BG = drafts_BG.clamp(0, p_BWV.shape[-1] - 1)
    stands_BG = torch.empty_like(drafts_BG, dtype=torch.bool)
    for j in range(drafts_BG.shape[1]):  # one position after the other, as in `_overlap`
        law_BV = p_BWV[:, j].to(torch.float64)
        law_BV = law_BV / law_BV.sum(dim=-1, keepdim=True)
        likely_B = law_BV.gather(-1, picked_BG[:, j : j + 1]).squeeze(-1)
        entropy_B = torch.special.entr(law_BV).sum(dim=-1)
        stands_BG[:, j] = likely_B > torch.minimum(epsilon_B, delta_B * (-entropy_B).exp())
    num_accepted_B = _leading(stands_BG, num_drafts_B)
    wide = torch.float64 if p_BWV.is_floating_point() else torch.int64
    drawn_B = _inverse_cdf(_laws_at(p_BWV, num_accepted_B).to(wide), u_draw_B, scale)
    return _verdict(drafts_BG, num_accepted_B, drawn_B, stands_BG.to(torch.float64))


def verify(
    p_BWV: Tensor,
    q_BGV: Tensor | None,
    drafts_BG: Tensor,
    num_drafts_B: Tensor,
    params: DrawParams,
    step: int | Tensor,
    *,
    any_standard: bool,
    any_coupled: bool,
    typical: TypicalParams | None = None,
) -> Verdict:
    """The round of every sequence, each by its own mode.

    p_BWV: float32, the target's laws as sampled (`processors.target_law`). q_BGV: float32, the laws the drafts were
        drawn from; None where W is 1 or no sequence is standard. drafts_BG: int64 [B, W − 1].
    params: one entry per sequence. step: counter of the round, never used twice for a request: int, or int64 [B].
    any_standard, any_coupled: False promises that no sequence has the mode and saves its work; so does None as typical.
    Raises ValueError: standard sequences and drafts, but no q.
    """
    if q_BGV is None and any_standard and drafts_BG.shape[1] > 0:
        raise ValueError("standard verification of drafts needs the laws they were drawn from")
    position_BW = params.position_N.unsqueeze(1) + torch.arange(p_BWV.shape[1], device=p_BWV.device)
    seed_BW = params.seed_N.unsqueeze(1).expand_as(position_BW)
    y_BW = _own_tokens(p_BWV, seed_BW, position_BW, params.coupled_N.unsqueeze(1), any_coupled=any_coupled)
    verdict = verify_coupled(y_BW, drafts_BG, num_drafts_B)
    if not any_standard and typical is None:
        return verdict
    u_draw_B = uniforms(params.seed_N, Purpose.DRAW, params.position_N, step)
    if any_standard:
        u_accept_BG = uniforms(seed_BW[:, 1:], Purpose.ACCEPT, position_BW[:, :-1], _column(step))
        q_BGV = p_BWV[:, :0] if q_BGV is None else q_BGV
        standard = verify_standard(p_BWV, q_BGV, drafts_BG, num_drafts_B, u_accept_BG, u_draw_B, scale=1.0)
        verdict = _either(params.standard_N, standard, verdict)
    if typical is not None:
        thresholds = typical.epsilon_B, typical.delta_B
        lossy = verify_typical(p_BWV, drafts_BG, num_drafts_B, *thresholds, u_draw_B, scale=1.0)
        verdict = _either(typical.lossy_B, lossy, verdict)
    return verdict


def draw_draft(
    q_RV: Tensor, params: DrawParams, step: int | Tensor, *, any_standard: bool, any_coupled: bool
) -> Tensor:
    """One draft per row: the most probable token (greedy), the token that the target's noise of this output position
    picks from q (coupled), or a draw with noise of its own (standard).

    q_RV: float32, the drafter's laws as sampled. params: one entry per row, with the output position being drafted.
    step: counter of the round that drafts: int, or int64 [R]. Returns int64 [R].
    """
    tokens_R = _own_tokens(q_RV, params.seed_N, params.position_N, params.coupled_N, any_coupled=any_coupled)
    if not any_standard:
        return tokens_R
    u_R = uniforms(params.seed_N, Purpose.DRAFT, params.position_N, step)
    return torch.where(params.standard_N, _inverse_cdf(q_RV.to(torch.float64), u_R, 1.0), tokens_R)


def clip_emitted(tokens_BW: Tensor, num_emitted_B: Tensor, stop_ids_BS: Tensor, room_B: Tensor) -> Tensor:
    """How many emitted tokens a sequence keeps: up to and including its first stop token, and no more than its room.

    stop_ids_BS: int64, rows filled up with −1. room_B: int64, tokens its limit still allows. Returns int64 [B].
    """
    is_stop_BW = (tokens_BW.unsqueeze(-1) == stop_ids_BS.unsqueeze(1)).any(dim=-1)
    stops_before_BW = is_stop_BW.cumsum(dim=1) - is_stop_BW.to(torch.int64)
    return (stops_before_BW == 0).sum(dim=1).minimum(num_emitted_B).minimum(room_B)


def _own_tokens(law_NV: Tensor, seed_N: Tensor, position_N: Tensor, coupled_N: Tensor, *, any_coupled: bool) -> Tensor:
    """argmax(law / e) where coupled, else argmax(law); the lowest id of equals. N stands for any leading axes.

    The law of a greedy row is a point mass, which noise does not move.
    """
    if any_coupled:
        noise_NV = exponential_noise(seed_N, position_N, law_NV.shape[-1])
        law_NV = torch.where(coupled_N.unsqueeze(-1), law_NV / noise_NV, law_NV)
    return law_NV.argmax(dim=-1)


def _leading(stands_BG: Tensor, num_drafts_B: Tensor) -> Tensor:
    """Length of the leading run of drafts that stand, int64 [B]."""
    drafted_BG = torch.arange(stands_BG.shape[1], device=stands_BG.device) < num_drafts_B.unsqueeze(1)
    return (stands_BG & drafted_BG).to(torch.int64).cumprod(dim=1).sum(dim=1)


def _laws_at(law_BWV: Tensor, row_B: Tensor) -> Tensor:
    """One row of each window, [B, V]."""
    row_B11 = row_B.view(-1, 1, 1).expand(-1, 1, law_BWV.shape[-1])
    return law_BWV.gather(1, row_B11).squeeze(1)


def _overlap(p_BWV: Tensor, q_BGV: Tensor, wide: torch.dtype) -> Tensor:
    """Σ min(p, q) of each draft position, [B, G]. One position after the other: widened all at once, the smaller laws
    would take more memory than both that they are of."""
    overlap_BG = torch.empty(q_BGV.shape[:2], dtype=wide, device=p_BWV.device)
    for j in range(q_BGV.shape[1]):
        overlap_BG[:, j] = torch.minimum(p_BWV[:, j], q_BGV[:, j]).sum(dim=-1, dtype=wide)
    return overlap_BG


def _inverse_cdf(mass_NV: Tensor, u_N: Tensor, scale: float) -> Tensor:
    """The smallest v with scale · (mass_0 + … + mass_v) > u · total. Exact on integers. Returns int64 [N].

    Sums at tokens without mass are blanked and the total is taken as their maximum: no change in exact arithmetic, but
    a parallel scan whose sums waver in the last bit can then neither pick such a token nor pick none.
    """
    reached_NV = torch.where(mass_NV > 0, mass_NV.cumsum(dim=-1), 0)
    threshold_N1 = u_N.unsqueeze(-1) * reached_NV.amax(dim=-1, keepdim=True)
    return (reached_NV * scale > threshold_N1).to(torch.uint8).argmax(dim=-1)


def _verdict(drafts_BG: Tensor, num_accepted_B: Tensor, last_B: Tensor, acceptance_BG: Tensor) -> Verdict:
    """Lay out accepted drafts, then `last`, then NO_TOKEN."""
    num_accepted_B1 = num_accepted_B.unsqueeze(1)
    drafts_BW = torch.cat([drafts_BG, torch.full_like(num_accepted_B1, NO_TOKEN)], dim=1)
    index_W = torch.arange(drafts_BW.shape[1], device=drafts_BG.device)
    tokens_BW = torch.where(index_W < num_accepted_B1, drafts_BW, NO_TOKEN)
    tokens_BW = torch.where(index_W == num_accepted_B1, last_B.unsqueeze(1), tokens_BW)
    return Verdict(tokens_BW=tokens_BW, num_accepted_B=num_accepted_B, acceptance_BG=acceptance_BG)


def _either(is_first_B: Tensor, first: Verdict, second: Verdict) -> Verdict:
    """Each sequence's from one or the other."""
    is_first_B1 = is_first_B.unsqueeze(1)
    return Verdict(
        tokens_BW=torch.where(is_first_B1, first.tokens_BW, second.tokens_BW),
        num_accepted_B=torch.where(is_first_B, first.num_accepted_B, second.num_accepted_B),
        acceptance_BG=torch.where(is_first_B1, first.acceptance_BG, second.acceptance_BG),
    )


def _column(step: int | Tensor) -> int | Tensor:
    return step.unsqueeze(1) if isinstance(step, Tensor) else step
