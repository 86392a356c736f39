"""The MTP head as a proposer: one module chained to any length, its KV a cache group of its own.

Entry p of the drafter's KV depends on token p + 1 and the target's hidden state at p. So after every pass of the target
the committed rows are run through the module with the target's hidden states, overwriting what drafting left there, and
drafting goes on from the last of them with the module's own output:

    positions        C ......... C' − 1 | C'      C' + 1  ...
    token beside it  x_{C+1} ... x_{C'} | d_1     d_2
    hidden           target's           | module's own          (provisional; overwritten by the next observation)

With the drafter switched off, hidden states of the last W committed tokens wait in a window and are fed in one pass
when it is switched on again; what is older is a gap, masked in the module's attention.

Drafts that were looked up take the place of its own from the first on; the passes are the same, and see them. So where
they are fewer than the plan draws, the module goes on behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import Group
from parallel.vocabulary import Best, best_of
from state.pools import DevicePools
from workers.batch import Batch, build_batch, lay_out, stage_layout
from workers.draft.confidence import Calibrator, Scorer
from workers.draft.lookups import LookedUp, Lookups
from workers.draft.proposer import DraftCounts, Observation, Proposal
from workers.models.qwen3_next import Qwen3Next
from workers.ops.base import Ops
from workers.passes import drafter_pass
from workers.plan import NewSequence, Origin
from workers.rows import pad_rows
from workers.sampling.processing import Processing
from workers.sampling.processors import target_law
from workers.sampling.registers import SamplingRegisters
from workers.sampling.shaper import Rows
from workers.sampling.verify import DrawParams, draw_draft


class MtpProposer:
    """See the module. Drafts are drawn from the law that a request's sampling parameters make of the head's logits."""

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
        assert model.drafter is not None
        self.gamma_max = gamma_max
        self._scorer, self._calibrator = scorer, Calibrator(gamma_max, pools.device)
        self._model = model
        self._pools, self._registers, self._ops, self._tp = pools, registers, ops, tp
        self._processing = processing
        self._lookups = None if processing is None else Lookups(pools, processing.matchers)
        self._looked_up: LookedUp | None = None
        self._fed: tuple[Batch, Tensor, Tensor] | None = None
        self._verified = [0] * gamma_max
        self._accepted = [0] * gamma_max

    def begin(self, sequences: Sequence[NewSequence]) -> None:
        """The head needs to know nothing of a request before its first tokens; lookups do."""
        if self._lookups is not None:
            self._lookups.begin(sequences)

    def leave(self, slots: Sequence[int]) -> None:
        if self._lookups is not None:
            self._lookups.leave(slots)

    def looked_up(self, slots: Sequence[int]) -> tuple[tuple[Origin, int], ...]:
        return () if self._lookups is None else self._lookups.looked_up(slots)

    def observe(self, observation: Observation, *, feed: bool) -> None:
        self._fed = None
        if not feed:
            self._stow(observation)
            return
        if observation.catches_up:
            self._catch_up(observation)
        batch = observation.batch
        hidden_ND = self._run(batch, observation.hidden_ND)
        end_B = batch.committed_B + observation.committed_B
        self._pools.draft_len.index_copy_(0, batch.slots_B, end_B)
        last_B = (batch.starts_B + observation.committed_B - 1).clamp(min=0)
        self._fed = (batch, hidden_ND.index_select(0, last_B), end_B)

    def propose(self, proposal: Proposal) -> None:
        assert self._fed is not None
        batch, last_BD, end_B = self._fed
        slots_S = batch.slots_B.index_select(0, proposal.columns_S)
        known_S = end_B.index_select(0, proposal.columns_S)  # position of the newest token
        hidden_SD = last_BD.index_select(0, proposal.columns_S)
        if self._lookups is not None:
            self._looked_up = self._lookups.look_up(proposal, slots_S, known_S)
        self._draw(proposal, 0, slots_S, known_S, hidden_SD)
        if proposal.gamma == 1:
            return
        chain = build_batch(
            proposal.chain,
            slots_B=slots_S,
            order_B=proposal.chain_order_S,
            base_B=proposal.chain_base_S,
            counts_B=torch.ones_like(known_S),
            committed_B=known_S,
            num_real=len(proposal.slots),
            row_multiple=self._ops.row_multiple,
        )
        for step in range(1, proposal.gamma):
            hidden_SD = self._run(chain, pad_rows(hidden_SD, self._ops.row_multiple))[: len(proposal.slots)]
            self._draw(proposal, step, slots_S, known_S, hidden_SD)
            chain = chain.next_position()

    def accept(self, num_admitted: Sequence[int], num_accepted: Sequence[int]) -> None:
        for admitted, accepted in zip(num_admitted, num_accepted, strict=True):
            for position in range(admitted):
                self._verified[position] += 1
                self._accepted[position] += position < accepted

    def counts(self) -> DraftCounts:
        return DraftCounts(verified=tuple(self._verified), accepted=tuple(self._accepted))

    def _run(self, batch: Batch, hidden_ND: Tensor) -> Tensor:
        """The module's hidden states over rows whose next tokens are in the log."""
        return drafter_pass(self._model, self._ops, self._pools, batch, hidden_ND).for_draft

    def _draw(self, proposal: Proposal, step: int, slots_S: Tensor, known_S: Tensor, hidden_SD: Tensor) -> None:
        """Draft number `step` of each sequence: law, score and confidence (before the draw) and token go to their
        registers.

        The leader of the ranks that share the sequences draws; the others are told, bit for bit."""
        if not proposal.slots:
            return
        pools = self._pools
        found = self._draft(proposal, step, slots_S, known_S, hidden_SD)
        drawn_S3 = torch.empty(len(proposal.slots), 3, dtype=torch.int64, device=pools.device)
        if found is not None:
            drafts_S, score_S = found
            class_S = self._registers.temperature_class.index_select(0, slots_S)
            confidence_S = self._calibrator.confidence(score_S, class_S, step, proposal.calibration)
            if self._looked_up is not None:
                drafts_S, score_S, confidence_S = self._looked_up.instead_of(step, drafts_S, score_S, confidence_S)
            bits_S2 = torch.stack([score_S, confidence_S], 1).view(torch.int32)
            drawn_S3 = torch.cat([drafts_S[:, None], bits_S2.to(torch.int64)], 1)
        drawn_S3 = self._tp.broadcast(drawn_S3)
        for register, bits_S in zip((pools.score, pools.confidence), drawn_S3[:, 1:].unbind(1), strict=True):
            register[:, step].index_copy_(0, slots_S, bits_S.to(torch.int32).view(torch.float32))
        pools.log_tokens(slots_S, known_S + 1 + step, drawn_S3[:, 0])

    def _draft(
        self, proposal: Proposal, step: int, slots_S: Tensor, known_S: Tensor, hidden_SD: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Drafts int64 [S] and their scores float32 [S], on the leader; None elsewhere."""
        logits_RP = self._model.logits(pad_rows(hidden_SD, self._ops.row_multiple))
        chosen = self._choose(proposal, step, slots_S, known_S, logits_RP)
        if chosen is None:
            return None
        drafts_S, best = chosen
        return drafts_S, self._scorer.score(best, hidden_SD)

    def _choose(
        self, proposal: Proposal, step: int, slots_S: Tensor, known_S: Tensor, logits_RP: Tensor
    ) -> tuple[Tensor, Best] | None:
        """Drafts int64 [S], and what their scores are made of, on the leader; None elsewhere."""
        pools, modes, count = self._pools, proposal.modes, len(proposal.slots)
        if not modes.any_sampled and not modes.any_whole:
            best = self._model.vocabulary.best(logits_RP[:count], **self._scorer.needs)
            return None if best is None else (best.id_R, best)
        logits_RV = self._model.vocabulary.gather(logits_RP)
        if logits_RV is None:
            return None
        if modes.any_whole:
            logits_RV = self._processed(proposal, step, slots_S, known_S, logits_RV)
        slots_R = pad_rows(slots_S, self._ops.row_multiple)
        params = self._registers.row_params(slots_R)
        law_RV = target_law(
            logits_RV, params, any_sampled=modes.any_sampled, any_sorted=modes.any_sorted, any_typical=modes.any_typical
        )
        draw = DrawParams(
            greedy_N=params.greedy,
            coupled_N=self._registers.coupled.index_select(0, slots_R),
            seed_N=self._registers.seed.index_select(0, slots_R),
            position_N=pad_rows(known_S + 1 + step - pools.prompt_len.index_select(0, slots_S), self._ops.row_multiple),
        )
        drafts_R = draw_draft(
            law_RV, draw, proposal.step_id, any_standard=modes.draws_drafts, any_coupled=modes.any_coupled
        )
        if modes.any_standard:
            pools.draft_law[:, step].index_copy_(0, slots_S, law_RV[:count])
        return drafts_R[:count], best_of(logits_RV[:count], **self._scorer.needs)

    def _processed(self, proposal: Proposal, step: int, slots_S: Tensor, known_S: Tensor, logits_RV: Tensor) -> Tensor:
        """The logits as requests have them, on the drafts so far."""
        assert self._processing is not None
        missing = len(logits_RV) - len(proposal.slots)
        before_SJ = self._pools.tokens_at(
            slots_S[:, None], known_S[:, None] + 1 + torch.arange(step, device=self._pools.device)
        )
        index_S = known_S + 1 + step
        rows = Rows(
            slots=proposal.slots,
            slots_S=slots_S,
            owners_R=F.pad(torch.arange(len(proposal.slots), device=self._pools.device), (0, missing)),
            index_R=F.pad(index_S, (0, missing)),
            first_S=index_S,
            width=1,
            longest=proposal.longest + step,
        )
        return self._processing.of_drafts(logits_RV, rows, before_SJ)

    def _stow(self, observation: Observation) -> None:
        """Hidden states of the last committed rows go to the window; what falls out of it becomes a gap."""
        pools, batch = self._pools, observation.batch
        window = pools.hidden_window.shape[1]
        end_B = batch.committed_B + observation.committed_B
        end_N = end_B.index_select(0, batch.column_N)
        keep_N = batch.real_N & (batch.position_N < end_N) & (batch.position_N >= end_N - window)
        row_N = (batch.slot_N * window + batch.position_N % window) * keep_N  # rows not kept land in the null slot
        pools.hidden_window.view(-1, observation.hidden_ND.shape[1]).index_copy_(0, row_N, observation.hidden_ND)

    def _catch_up(self, observation: Observation) -> None:
        """Feeds what waits in the windows, in one pass, before the rows of the present step."""
        pools = self._pools
        window = pools.hidden_window.shape[1]
        columns = [i for i, count in enumerate(observation.num_unfed) if count]
        slots = [observation.slots[i] for i in columns]
        counts = [min(observation.num_unfed[i], window) for i in columns]
        layout = lay_out(counts, [observation.batch.max_length] * len(slots), exact=False)
        slots_B, order_B, base_B = stage_layout(layout, slots, pools.device)
        columns_B = torch.tensor(columns, dtype=torch.int64).to(pools.device)
        committed_B = observation.batch.committed_B.index_select(0, columns_B)
        covered_B = pools.draft_len.index_select(0, slots_B)
        start_B = torch.maximum(covered_B, committed_B - window)
        # One gap per sequence: a second one swallows the good entries between the two.
        gap_start_B, gap_end_B = pools.gap_start.index_select(0, slots_B), pools.gap_end.index_select(0, slots_B)
        had_gap_B = gap_end_B > gap_start_B
        new_gap_B = start_B > covered_B
        pools.gap_start.index_copy_(0, slots_B, torch.where(had_gap_B | ~new_gap_B, gap_start_B, covered_B))
        pools.gap_end.index_copy_(0, slots_B, torch.where(new_gap_B, start_B, gap_end_B))
        batch = build_batch(
            layout,
            slots_B=slots_B,
            order_B=order_B,
            base_B=base_B,
            counts_B=committed_B - start_B,
            committed_B=start_B,
            num_real=sum(counts),
            row_multiple=self._ops.row_multiple,
        )
        row_N = batch.slot_N * window + batch.position_N % window
        self._run(batch, pools.hidden_window.view(-1, pools.hidden_window.shape[2]).index_select(0, row_N))
