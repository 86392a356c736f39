"""A drafter whose acceptance is known beforehand, for measurements: the MTP head's passes, and drafts from elsewhere.

Every pass of the head is made, with its logits and its scores, and paid for. Of a request that brought a recorded
continuation each draft is then replaced, position by position: what stands is decided before it is drawn.

    c      the probability that the draft stands: evenly from α ± min(SPREAD, α, 1 − α), so that α is its mean and
           confidences differ between positions; published as the score, log (c / (1 − c)), and, by way of the
           calibration, as the confidence
    coin   with noise of its own: the recorded token with probability c, else another one

Where the output has left the recording or has run past it, drafts are other tokens than the head's, and their scores
are no confidence at all. Verification is the real one: greedy, it lets a recorded token stand and no other.

Knows no plan, no verification and no planner. Requests without a recording are drafted as by the head alone.

Shapes: S sequences, C the longest continuation among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.collectives import Group
from state.pools import DevicePools
from workers.draft.confidence import SCORE_LIMIT, Scorer
from workers.draft.mtp import MtpProposer
from workers.draft.proposer import Proposal
from workers.models.qwen3_next import Qwen3Next
from workers.ops.base import Ops
from workers.plan import NewSequence
from workers.sampling.processing import Processing
from workers.sampling.randomness import Purpose, uniforms
from workers.sampling.registers import SamplingRegisters

SPREAD = 0.25
"""Largest distance of a position's probability from the request's mean."""


class OracleProposer(MtpProposer):
    """See the module. Its registers, a row per slot, are the same on all ranks; the leader of those that share a
    sequence decides, and the others are told."""

    def __init__(
        self,
        model: Qwen3Next,
        pools: DevicePools,
        registers: SamplingRegisters,
        processing: Processing | None,
        ops: Ops,
        tp: Group,
        gamma_max: int,
        scorer: Scorer,
    ) -> None:
        super().__init__(model, pools, registers, processing, ops, tp, gamma_max, scorer)
        rows = pools.sizes.num_slots + 1
        self._vocab_size = model.config.vocab_size
        self._lengths = [0] * rows
        self._recorded = torch.zeros_like(pools.token_log, dtype=torch.int64)
        self._length = torch.zeros(rows, dtype=torch.int64, device=pools.device)
        self._acceptance = torch.zeros(rows, dtype=torch.float64, device=pools.device)
        self._on_recording_S: Tensor | None = None

    def begin(self, sequences: Sequence[NewSequence]) -> None:
        super().begin(sequences)
        for sequence in sequences:
            slot, oracle = sequence.slot, sequence.oracle
            length = 0 if oracle is None else len(oracle.continuation)
            self._lengths[slot] = length
            self._length[slot] = length
            if oracle is not None:
                self._acceptance[slot] = oracle.acceptance
                self._recorded[slot, :length] = torch.tensor(oracle.continuation, dtype=torch.int64)

    def _draft(
        self, proposal: Proposal, step: int, slots_S: Tensor, known_S: Tensor, hidden_SD: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        found = super()._draft(proposal, step, slots_S, known_S, hidden_SD)
        longest = max(self._lengths[slot] for slot in proposal.slots)
        if found is None or not longest:
            return found
        first_S = self._pools.prompt_len.index_select(0, slots_S)
        if step == 0:
            self._on_recording_S = self._follows(slots_S, first_S, known_S, longest)
        assert self._on_recording_S is not None
        return self._replaced(proposal.step_id, *found, slots_S, known_S + 1 + step - first_S, self._on_recording_S)

    def _follows(self, slots_S: Tensor, first_S: Tensor, known_S: Tensor, longest: int) -> Tensor:
        """Whether what was emitted is what was recorded, as far as that goes. first_S: log index of the first emitted
        token; known_S: of the newest."""
        place_C = torch.arange(longest, device=slots_S.device)
        index_SC = torch.minimum(first_S[:, None] + place_C, known_S[:, None])
        emitted_SC = self._pools.tokens_at(slots_S[:, None], index_SC)
        length_S = self._length.index_select(0, slots_S)
        counts_SC = place_C < torch.minimum(known_S - first_S + 1, length_S)[:, None]
        differs_SC = emitted_SC != self._recorded[:, :longest].index_select(0, slots_S)
        return ~(differs_SC & counts_SC).any(1)

    def _replaced(
        self, step_id: int, drafts_S: Tensor, score_S: Tensor, slots_S: Tensor, position_S: Tensor, follows_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drafts and scores of the requests that brought a recording, in place of the head's. position_S: output
        position of the drafts."""
        length_S = self._length.index_select(0, slots_S)
        mean_S = self._acceptance.index_select(0, slots_S)
        seed_S = self._registers.seed.index_select(0, slots_S)
        is_known_S = follows_S & (position_S < length_S)
        spread_S = torch.minimum(mean_S, 1 - mean_S).clamp(max=SPREAD)
        evenly_S = uniforms(seed_S, Purpose.ORACLE_CONFIDENCE, position_S, step_id)
        stands_with_S = mean_S + spread_S * (2 * evenly_S - 1)
        score_of_S = torch.logit(stands_with_S).float().clamp(-SCORE_LIMIT, SCORE_LIMIT)
        # Drawn with what was published, rounded as it is.
        coin_S = uniforms(seed_S, Purpose.ORACLE_COIN, position_S, step_id)
        stands_S = coin_S < torch.sigmoid(score_of_S.double())
        place_S = position_S.clamp(max=self._recorded.shape[1] - 1)
        recorded_S = self._recorded[slots_S, place_S]
        right_S = torch.where(is_known_S, recorded_S, drafts_S)
        wrong_S = (right_S + 1) % self._vocab_size
        is_ours_S = length_S > 0
        drafts_S = torch.where(is_ours_S, torch.where(is_known_S & stands_S, right_S, wrong_S), drafts_S)
        score_S = torch.where(is_ours_S, torch.where(is_known_S, score_of_S, -SCORE_LIMIT), score_S)
        return drafts_S, score_S
