"""One step of one rank: admit → gather → target pass → verify → clip → commit → draft. Knows no gRPC and no scheduling.

Prefill, chunk, decode and verification are one case: a sequence feeds `num_known` known tokens and its admitted drafts.
With C the committed length before the step and w = num_known + admitted rows:

    rows       positions [C, C + w); input tokens log[C .. C + w)
    laws       of log index C + num_known + j, from row num_known − 1 + j, j in 0 .. admitted
    emitted    n tokens to log[C + num_known ..); n = 1 .. admitted + 1
    committed  num_known + n − 1 rows, so that committed_len = known tokens − 1 in decode
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from configs.schema import WorkerSettings
from state.txn import StepTransaction
from workers.batch import Batch, Layout, build_batch, lay_out
from workers.decide import Decision, Window, decide, open_window
from workers.draft.admit import admit_on_device
from workers.draft.proposer import Observation, Proposal
from workers.inputs import StepColumns
from workers.loading import Rank, load_rank
from workers.passes import target_pass
from workers.plan import Progress, StalePlan, StepPlan, StepResult, StepTimings, WorkerDescription


class Worker:
    """A loaded rank. `execute` is called by one thread, plans in order."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.description: WorkerDescription = rank.description
        self._epochs = [0] * (rank.pools.sizes.num_slots + 1)
        self._last_step = -1

    @classmethod
    def load(cls, settings: WorkerSettings, progress: Progress) -> Worker:
        """Reads the checkpoint and allocates the pools. Raises LoadError."""
        return cls(load_rank(settings, progress))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. Raises StalePlan for a plan out of order; after any error the worker is not to be used."""
        clock = [time.perf_counter()]
        self._enter_and_leave(plan)
        if not plan.slots:
            return _result(plan, None, None, clock * 4)
        rank = self.rank
        layout, sampling, chain = _lay_out(plan)
        columns = rank.inputs.stage(plan, layout, sampling, chain)
        admitted_B = self._admit(plan, columns)
        batch = self._batch(plan, layout, columns, admitted_B)
        window = open_window(rank, plan, sampling, columns, batch, admitted_B)
        txn = StepTransaction(rank.pools, batch.slots_B, batch.buckets, batch.num_rows, rank.ops.delta_fold)
        hidden = target_pass(rank.model, rank.ops, rank.pools, batch, txn)
        clock.append(time.perf_counter())

        committed_B, decision = columns.num_known_B, None
        if window is not None:
            decision = decide(rank, window, hidden.for_logits, plan)
            committed_B = committed_B.index_add(0, window.columns_S, decision.num_emitted_S - 1)
        clock.append(time.perf_counter())
        txn.commit(committed_B)
        clock.append(time.perf_counter())

        self._draft(plan, batch, window, chain, columns, hidden.for_draft, committed_B)
        result = _result(plan, window, decision, clock)
        if rank.proposer is not None:
            rank.proposer.accept(result.num_admitted, result.num_accepted)
        return result

    def check_integrity(self) -> list[str]:
        """Violated invariants of the device state; empty when all hold. For idle moments: it reads whole pools."""
        return self.rank.pools.check_integrity()

    def _enter_and_leave(self, plan: StepPlan) -> None:
        if plan.step_id <= self._last_step:
            raise StalePlan(f"step {plan.step_id} after step {self._last_step}")
        self._last_step = plan.step_id
        rank = self.rank
        rank.pools.leave(plan.released_slots)
        for slot in plan.released_slots:
            self._epochs[slot] = 0
        entering = plan.admitted
        rank.pools.enter([s.slot for s in entering], [s.prompt for s in entering], [s.tables for s in entering])
        rank.registers.enter(entering)
        if rank.proposer is not None:
            rank.proposer.begin([s.slot for s in entering])
        for sequence in entering:
            self._epochs[sequence.slot] = sequence.epoch
        for slot, epoch in zip(plan.slots, plan.epochs, strict=True):
            if self._epochs[slot] != epoch:
                raise StalePlan(f"slot {slot} holds a sequence of epoch {self._epochs[slot]}, the plan means {epoch}")

    def _admit(self, plan: StepPlan, columns: StepColumns) -> Tensor:
        """Waiting drafts per sequence that go to verification, ranked by their confidence under the plan's budget."""
        if plan.verify_budget >= sum(plan.num_drafts):
            return columns.num_drafts_B
        return admit_on_device(
            self.rank.pools.confidence.index_select(0, columns.slots_B),
            columns.num_drafts_B,
            self.rank.registers.uid.index_select(0, columns.slots_B),
            plan.verify_budget,
        )

    def _batch(self, plan: StepPlan, layout: Layout, columns: StepColumns, admitted_B: Tensor) -> Batch:
        return build_batch(
            layout,
            slots_B=columns.slots_B,
            order_B=columns.order_B,
            base_B=columns.base_B,
            counts_B=columns.num_known_B + admitted_B,
            committed_B=self.rank.pools.committed_len.index_select(0, columns.slots_B),
            num_real=sum(plan.num_known) + min(sum(plan.num_drafts), plan.verify_budget),
            row_multiple=self.rank.ops.row_multiple,
        )

    def _draft(
        self,
        plan: StepPlan,
        batch: Batch,
        window: Window | None,
        chain: Layout,
        columns: StepColumns,
        hidden_ND: Tensor,
        committed_B: Tensor,
    ) -> None:
        """The drafter sees what was committed; then it drafts for the sequences that sampled."""
        proposer = self.rank.proposer
        if proposer is None:
            return
        observation = Observation(
            batch=batch,
            slots=plan.slots,
            max_counts=_max_counts(plan),
            hidden_ND=hidden_ND,
            committed_B=committed_B,
        )
        proposer.observe(observation, feed=plan.feed_drafter)
        if window is not None and plan.gamma:
            proposer.propose(
                Proposal(
                    slots=window.slots,
                    modes=window.modes,
                    gamma=plan.gamma,
                    step_id=plan.step_id,
                    chain=chain,
                    columns_S=window.columns_S,
                    chain_order_S=columns.chain_order_S,
                    chain_base_S=columns.chain_base_S,
                )
            )


def _max_counts(plan: StepPlan) -> list[int]:
    """Rows of each sequence if every waiting draft is admitted."""
    return [known + drafts for known, drafts in zip(plan.num_known, plan.num_drafts, strict=True)]


def _lay_out(plan: StepPlan) -> tuple[Layout, tuple[int, ...], Layout]:
    """Layout of the target pass, the columns that sample, and the layout of their draft chain, a row each."""
    counts = _max_counts(plan)
    lengths = [bound + count for bound, count in zip(plan.max_committed, counts, strict=True)]
    sampling = tuple(i for i, samples in enumerate(plan.samples) if samples)
    # The newest token and gamma − 1 drafts lie beyond what the pass itself wrote.
    chain = lay_out([1] * len(sampling), [lengths[i] + plan.gamma for i in sampling], exact=True)
    return lay_out(counts, lengths, exact=plan.verify_budget >= sum(plan.num_drafts)), sampling, chain


def _result(plan: StepPlan, window: Window | None, decision: Decision | None, clock: list[float]) -> StepResult:
    """The step's one read from the device, taken apart by sequence."""
    count = len(plan.slots)
    emitted: list[tuple[int, ...]] = [()] * count
    drafted: list[tuple[int, ...]] = [()] * count
    margins: list[tuple[float, ...]] = [()] * count if plan.report_margins else []
    accepted, admitted = [0] * count, [0] * count
    if window is not None and decision is not None:
        numbers = torch.stack([decision.num_emitted_S, decision.verdict.num_accepted_B, window.num_drafts_S], 1)
        parts = [numbers, decision.verdict.tokens_BW, window.drafts_SG]
        if decision.margins_SW is not None:
            # As bits of float64 they fit between the integers, and there is still but one read.
            parts.append(decision.margins_SW.to(torch.float64).view(torch.int64))
        read = torch.cat(parts, 1).cpu()
        first_draft = 3 + window.width
        for column, row in zip(window.columns, read.tolist(), strict=True):
            emitted[column] = tuple(row[3 : 3 + row[0]])
            drafted[column] = tuple(row[first_draft : first_draft + plan.num_drafts[column]])
            accepted[column], admitted[column] = row[1], row[2]
        if decision.margins_SW is not None:
            leads = read[:, -window.width :].view(torch.float64).tolist()
            for column, lead in zip(window.columns, leads, strict=True):
                margins[column] = tuple(lead[: len(emitted[column])])
    begin, target, verified, committed = clock[:4]
    end = time.perf_counter()
    return StepResult(
        step_id=plan.step_id,
        epoch=plan.epoch,
        emitted=tuple(emitted),
        drafted=tuple(drafted),
        num_admitted=tuple(admitted),
        num_accepted=tuple(accepted),
        margins=tuple(margins),
        # On GPUs work is queued and these are times of launching, but for the last, which waits.
        timings=StepTimings(
            total_s=end - begin,
            target_s=target - begin,
            verify_s=verified - target,
            commit_s=committed - verified,
            draft_s=end - committed,
        ),
    )
