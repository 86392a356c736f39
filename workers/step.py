"""One step of one rank: admit → gather → target pass → verify → clip → commit → draft. Knows no gRPC and no scheduling.

Prefill, chunk, decode and verification are one case: a sequence feeds `num_known` known tokens and its admitted drafts.
With C the committed length before the step and w = num_known + admitted rows:

    rows       positions [C, C + w); input tokens log[C .. C + w)
    laws       of log index C + num_known + j, from row num_known − 1 + j, j in 0 .. admitted
    emitted    n tokens to log[C + num_known ..); n = 1 .. admitted + 1
    committed  num_known + n − 1 rows, so that committed_len = known tokens − 1 in decode

Where ranks own whole experts, a rank whose batch is empty makes the same passes with zero rows, through the same code.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from configs.schema import WorkerSettings
from parallel.collectives import CollectiveError
from state.txn import StepTransaction
from workers.batch import Batch, Layout, build_batch, lay_out
from workers.constraints.compiler import ConstraintError
from workers.decide import Window, decide, open_window
from workers.demands import Constraint
from workers.draft.admit_on_device import admit_on_device
from workers.draft.proposer import Observation, Proposal
from workers.inputs import StepColumns
from workers.loading import Rank, load_rank
from workers.logprobs import score_prompts
from workers.passes import target_pass
from workers.plan import (
    BatchPlan,
    CollectiveFailed,
    NewSequence,
    Progress,
    RankReport,
    StalePlan,
    StepPlan,
    WorkerDescription,
)
from workers.report import make_report


class Worker:
    """A loaded rank. `execute` is called by one thread, plans in order."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.description: WorkerDescription = rank.description
        self._epochs = [0] * (rank.pools.sizes.num_slots + 1)
        self._last_step = -1

    @classmethod
    def load(cls, settings: WorkerSettings, progress: Progress) -> Worker:
        """Reads the checkpoint and allocates the pools. Raises LoadError, CollectiveFailed."""
        return cls(load_rank(settings, progress))

    def execute(self, plan: StepPlan) -> RankReport:
        """Runs one step. Raises StalePlan for a plan out of order, CollectiveFailed when other ranks are not with us;
        after any error the worker is not to be used."""
        try:
            return self._execute(plan)
        except CollectiveError as error:
            raise CollectiveFailed(f"step {plan.step_id}: {error}") from error

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> RankReport:
        rank, clock = self.rank, [time.perf_counter()]
        rank.groups.log.clear()
        if rank.model.owners is not None:
            rank.model.owners.clear()
        batch_plan = plan.batches[rank.groups.dp_rank]
        self._enter_and_leave(plan, batch_plan)
        # The batches whose passes this rank makes: all of them where it computes for others' rows.
        shared = plan if rank.groups.mesh.spreads_experts else replace(plan, batches=(batch_plan,))
        if not shared.num_sequences:
            return make_report(rank, plan, batch_plan, None, None, clock * 4)
        layout, sampling, chain = _lay_out(plan, batch_plan)
        columns = rank.inputs.stage(batch_plan, layout, sampling, chain)
        admitted_B = self._admit(plan, batch_plan, columns)
        batch = self._batch(batch_plan, layout, columns, admitted_B)
        exact = _is_settled(plan, batch_plan)
        window = open_window(rank, batch_plan, sampling, columns, batch, admitted_B, exact=exact)
        txn = StepTransaction(rank.pools, batch.slots_B, batch.buckets, batch.num_rows, rank.ops.delta_fold)
        hidden = target_pass(rank.model, rank.ops, rank.pools, batch, txn)
        clock.append(time.perf_counter())

        committed_B, decision = columns.num_known_B, None
        if window is not None:
            decision = decide(rank, window, hidden.for_logits, step_id=plan.step_id, report_margins=plan.report_margins)
            committed_B = committed_B.index_add(0, window.columns_S, decision.num_emitted_S - 1)
        prompts = score_prompts(rank, batch_plan, batch, hidden.for_logits)
        clock.append(time.perf_counter())
        txn.commit(committed_B)
        clock.append(time.perf_counter())

        # Of the drafts that waited, whose places those to come take.
        looked_up = () if rank.proposer is None else rank.proposer.looked_up(batch_plan.slots)
        self._draft(shared, batch_plan, batch, window, chain, columns, hidden.for_draft, committed_B)
        report = make_report(rank, plan, batch_plan, window, decision, clock, prompts, looked_up)
        if rank.proposer is not None and report.batch is not None:
            rank.proposer.accept(report.batch.num_admitted, report.batch.num_accepted)
        return report

    def check_integrity(self) -> list[str]:
        """Violated invariants of the device state; empty when all hold. For idle moments: it reads whole pools."""
        return self.rank.pools.check_integrity()

    def is_ready(self, constraint: Constraint) -> bool:
        """Whether `prepare` has nothing to compile for it; from any thread."""
        return self.rank.processing is None or self.rank.processing.compiler.is_ready(constraint)

    def prepare(self, constraint: Constraint) -> str:
        """Makes a constraint ready, beside steps and from any thread. Returns why it cannot be followed, "" where it
        can; a rank that does not decide has nothing to do."""
        if self.rank.processing is None:
            return ""
        try:
            self.rank.processing.compiler.prepare(constraint)
        except ConstraintError as error:
            return str(error)
        return ""

    def _enter_and_leave(self, plan: StepPlan, batch_plan: BatchPlan) -> None:
        if plan.step_id <= self._last_step:
            raise StalePlan(f"step {plan.step_id} after step {self._last_step}")
        self._last_step = plan.step_id
        rank = self.rank
        rank.pools.leave(batch_plan.released_slots)
        for slot in batch_plan.released_slots:
            self._epochs[slot] = 0
        entering = batch_plan.admitted
        self._give_slots(entering)
        rank.registers.enter(entering)
        if rank.processing is not None:
            rank.processing.leave(batch_plan.released_slots)
            rank.processing.enter(entering)
        if rank.proposer is not None:
            rank.proposer.leave(batch_plan.released_slots)
            rank.proposer.begin(entering)
        for sequence in entering:
            self._epochs[sequence.slot] = sequence.epoch
        for slot, epoch in zip(batch_plan.slots, batch_plan.epochs, strict=True):
            if self._epochs[slot] != epoch:
                raise StalePlan(f"slot {slot} holds a sequence of epoch {self._epochs[slot]}, the plan means {epoch}")

    def _give_slots(self, entering: Sequence[NewSequence]) -> None:
        """Of the pools, before anything of the step runs: who forks takes over what the other one has committed."""
        pools = self.rank.pools
        begun = [s for s in entering if s.fork is None]
        pools.enter([s.slot for s in begun], [s.prompt for s in begun], [s.tables for s in begun])
        forked = [(s, s.fork) for s in entering if s.fork is not None]
        for sequence, fork in forked:
            if self._epochs[fork.slot] != fork.epoch:
                raise StalePlan(
                    f"slot {fork.slot} holds a sequence of epoch {self._epochs[fork.slot]}, sequence {sequence.uid} "
                    f"forks from epoch {fork.epoch}"
                )
        pools.fork(
            [fork.slot for _, fork in forked],
            [s.slot for s, _ in forked],
            [s.tables for s, _ in forked],
            [fork.pages for _, fork in forked],
        )

    def _admit(self, plan: StepPlan, batch_plan: BatchPlan, columns: StepColumns) -> Tensor:
        """Waiting drafts per sequence that go to verification, ranked by their confidence under the plan's budget."""
        if _admits_all(plan, batch_plan):
            return columns.num_drafts_B
        if batch_plan.verify_budget == 0:
            return torch.zeros_like(columns.num_drafts_B)
        return admit_on_device(
            self.rank.pools.confidence.index_select(0, columns.slots_B),
            columns.num_drafts_B,
            self.rank.registers.uid.index_select(0, columns.slots_B),
            batch_plan.verify_budget,
            columns.num_forced_B if any(batch_plan.num_forced) else None,
            plan.min_survival,
        )

    def _batch(self, plan: BatchPlan, layout: Layout, columns: StepColumns, admitted_B: Tensor) -> Batch:
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
        batch_plan: BatchPlan,
        batch: Batch,
        window: Window | None,
        chain: Layout,
        columns: StepColumns,
        hidden_ND: Tensor,
        committed_B: Tensor,
    ) -> None:
        """The drafter sees what was committed; then it drafts for the sequences that sampled. plan: with the batches
        whose passes this rank makes."""
        rank = self.rank
        if rank.proposer is None:
            return
        observation = Observation(
            batch=batch,
            slots=batch_plan.slots,
            num_unfed=batch_plan.num_unfed,
            catches_up=plan.catches_up,
            hidden_ND=hidden_ND,
            committed_B=committed_B,
        )
        rank.proposer.observe(observation, feed=plan.feed_drafter)
        if plan.gamma and plan.samples:
            rank.proposer.propose(
                Proposal(
                    slots=window.slots if window is not None else (),
                    modes=window.modes if window is not None else rank.registers.modes(()),
                    gamma=plan.gamma,
                    longest=window.longest if window is not None else 1,
                    step_id=plan.step_id,
                    calibration=plan.calibration,
                    chain=chain,
                    columns_S=columns.sampling_S,
                    chain_order_S=columns.chain_order_S,
                    chain_base_S=columns.chain_base_S,
                )
            )


def _admits_all(plan: StepPlan, batch_plan: BatchPlan) -> bool:
    """Whether every waiting draft is verified, known before any confidence is looked at."""
    num_drafts = sum(batch_plan.num_drafts)
    return num_drafts == 0 or (batch_plan.verify_budget >= num_drafts and plan.min_survival <= 0)


def _is_settled(plan: StepPlan, batch_plan: BatchPlan) -> bool:
    """Whether the plan alone says how many drafts of each sequence are verified: all, or none."""
    return batch_plan.verify_budget == 0 or _admits_all(plan, batch_plan)


def _lay_out(plan: StepPlan, batch_plan: BatchPlan) -> tuple[Layout, tuple[int, ...], Layout]:
    """Layout of the target pass, the columns that sample, and the layout of their draft chain, a row each."""
    # A sequence has no more drafts in the pass than all of them together may have.
    drafts = [min(count, batch_plan.verify_budget) for count in batch_plan.num_drafts]
    counts = [known + count for known, count in zip(batch_plan.num_known, drafts, strict=True)]
    lengths = [bound + count for bound, count in zip(batch_plan.max_committed, counts, strict=True)]
    sampling = tuple(i for i, samples in enumerate(batch_plan.samples) if samples)
    # The newest token and gamma − 1 drafts lie beyond what the pass itself wrote.
    chain = lay_out([1] * len(sampling), [lengths[i] + plan.gamma for i in sampling], exact=True)
    return lay_out(counts, lengths, exact=_is_settled(plan, batch_plan)), sampling, chain
