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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import WorkerSettings
from state.layout import TARGET_GROUP
from state.txn import StepTransaction
from workers.batch import Batch, build_batch
from workers.draft.admit import admit_on_device
from workers.draft.proposer import Observation, Proposal
from workers.inputs import StepColumns
from workers.layers.context import PassContext
from workers.loading import Rank, load_rank
from workers.plan import StalePlan, StepPlan, StepResult, StepTimings, WorkerDescription
from workers.rows import pad_rows
from workers.sampling.processors import target_law
from workers.sampling.registers import Modes
from workers.sampling.verify import DrawParams, Verdict, clip_emitted, verify, verify_coupled

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Sequences that sample in this step: their columns, and W = 1 + the most drafts of any of them.
    drafts_SG: the waiting drafts, G = W − 1; num_drafts_S: how many of them were admitted."""

    columns: tuple[int, ...]
    slots: tuple[int, ...]
    columns_S: Tensor
    slots_S: Tensor
    width: int
    drafts_SG: Tensor
    num_drafts_S: Tensor
    first_row_S: Tensor
    first_index_S: Tensor
    modes: Modes


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
            return StepResult(
                step_id=plan.step_id, epoch=plan.epoch, emitted=(), drafted=(), num_admitted=(), num_accepted=()
            )
        rank = self.rank
        columns = rank.inputs.stage(plan)
        admitted_B = admit_on_device(
            rank.pools.confidence.index_select(0, columns.slots_B),
            columns.num_drafts_B,
            rank.registers.uid.index_select(0, columns.slots_B),
            plan.verify_budget,
        )
        batch = self._lay_out(plan, columns, admitted_B)
        window = self._window(plan, columns, batch, admitted_B)
        txn = StepTransaction(rank.pools, batch.slots_B, batch.buckets, batch.num_rows, rank.ops.delta_fold)
        hidden = self._target_pass(batch, txn)
        logits_RV = self._window_logits(window, hidden.for_logits) if window else None
        clock.append(time.perf_counter())

        committed_B = columns.num_known_B
        if window is not None and logits_RV is not None:
            verdict = self._verify(window, logits_RV, plan.step_id)
            emitted_S = self._clip(window, verdict)
            clock.append(time.perf_counter())
            self._log_emitted(window, verdict)
            committed_B = committed_B.index_add(0, window.columns_S, emitted_S - 1)
        else:
            clock.append(time.perf_counter())
        txn.commit(committed_B)
        clock.append(time.perf_counter())

        if rank.proposer is not None:
            rank.proposer.observe(
                Observation(batch=batch, slots=plan.slots, hidden_ND=hidden.for_draft, committed_B=committed_B),
                feed=plan.feed_drafter,
            )
            if window is not None and plan.gamma:
                rank.proposer.propose(
                    Proposal(
                        columns=window.columns,
                        columns_S=window.columns_S,
                        slots=window.slots,
                        modes=window.modes,
                        gamma=plan.gamma,
                        step_id=plan.step_id,
                        max_length=batch.max_length + 1,
                    )
                )
        if window is not None and logits_RV is not None:
            margins_SW = self._margins(window, logits_RV) if plan.report_margins else None
            result = self._read_back(plan, window, verdict, emitted_S, margins_SW, clock)
        else:
            result = self._nothing_emitted(plan, clock)
        if rank.proposer is not None:
            rank.proposer.accept(plan.num_drafts, result.num_accepted)
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

    def _lay_out(self, plan: StepPlan, columns: StepColumns, admitted_B: Tensor) -> Batch:
        most_counts = [known + drafts for known, drafts in zip(plan.num_known, plan.num_drafts, strict=True)]
        all_drafts = sum(plan.num_drafts)
        return build_batch(
            slots=plan.slots,
            max_counts=most_counts,
            exact=plan.verify_budget >= all_drafts,
            counts_B=columns.num_known_B + admitted_B,
            committed_B=self.rank.pools.committed_len.index_select(0, columns.slots_B),
            num_real=sum(plan.num_known) + min(all_drafts, plan.verify_budget),
            row_multiple=self.rank.ops.row_multiple,
            max_length=max(bound + count for bound, count in zip(plan.max_committed, most_counts, strict=True)),
        )

    def _window(self, plan: StepPlan, columns: StepColumns, batch: Batch, admitted_B: Tensor) -> Window | None:
        sampling = tuple(i for i, samples in enumerate(plan.samples) if samples)
        if not sampling:
            return None
        slots = tuple(plan.slots[i] for i in sampling)
        columns_S = torch.tensor(sampling, dtype=torch.int64).to(batch.slots_B.device)
        slots_S = columns.slots_B.index_select(0, columns_S)
        known_S = columns.num_known_B.index_select(0, columns_S)
        first_index_S = batch.committed_B.index_select(0, columns_S) + known_S
        width = 1 + max(plan.num_drafts[i] for i in sampling)
        log = self.rank.pools.token_log
        index_SG = (
            slots_S[:, None] * log.shape[1] + first_index_S[:, None] + torch.arange(width - 1, device=slots_S.device)
        )
        return Window(
            columns=sampling,
            slots=slots,
            columns_S=columns_S,
            slots_S=slots_S,
            width=width,
            drafts_SG=log.view(-1).index_select(0, index_SG.view(-1)).view(index_SG.shape).to(torch.int64),
            num_drafts_S=admitted_B.index_select(0, columns_S),
            first_row_S=batch.starts_B.index_select(0, columns_S) + known_S - 1,
            first_index_S=first_index_S,
            modes=self.rank.registers.modes(slots),
        )

    def _target_pass(self, batch: Batch, txn: StepTransaction):  # type: ignore[no-untyped-def]
        pools = self.rank.pools
        log = pools.token_log
        ids_N = log.view(-1).index_select(0, batch.slot_N * log.shape[1] + batch.position_N).to(torch.int64)
        ctx = PassContext(
            batch=batch,
            views={TARGET_GROUP: self.rank.ops.attention_view(batch, pools, TARGET_GROUP, None)},
            kv=pools.kv,
            angles=self.rank.model.rotary.angles(batch.position_N),
            txn=txn,
        )
        return self.rank.model.forward(ids_N, ctx)

    def _window_logits(self, window: Window, hidden_ND: Tensor) -> Tensor:
        """Logits of every cell of the window, [S · W (padded), V]; cells beyond the admitted drafts repeat the last."""
        cell_W = torch.arange(window.width, device=hidden_ND.device)
        rows_SW = window.first_row_S[:, None] + torch.minimum(cell_W, window.num_drafts_S[:, None])
        return self.rank.model.logits(pad_rows(hidden_ND.index_select(0, rows_SW.view(-1)), self.rank.ops.row_multiple))

    def _verify(self, window: Window, logits_RV: Tensor, step_id: int) -> Verdict:
        registers, pools, modes = self.rank.registers, self.rank.pools, window.modes
        count, width = len(window.slots), window.width
        if not modes.any_sampled:
            y_SW = logits_RV.argmax(-1)[: count * width].view(count, width)
            return verify_coupled(y_SW, window.drafts_SG, window.num_drafts_S)
        slots_R = pad_rows(window.slots_S.repeat_interleave(width), self.rank.ops.row_multiple)
        law_RV = target_law(logits_RV, registers.row_params(slots_R), any_sampled=True, any_sorted=modes.any_sorted)
        draws = DrawParams(
            greedy_N=registers.temperature.index_select(0, window.slots_S) == 0,
            coupled_N=registers.coupled.index_select(0, window.slots_S),
            seed_N=registers.seed.index_select(0, window.slots_S),
            position_N=window.first_index_S - pools.prompt_len.index_select(0, window.slots_S),
        )
        return verify(
            law_RV[: count * width].view(count, width, -1),
            pools.draft_law[:, : width - 1].index_select(0, window.slots_S) if modes.any_standard else None,
            window.drafts_SG,
            window.num_drafts_S,
            draws,
            step_id,
            any_standard=modes.any_standard,
            any_coupled=modes.any_coupled,
        )

    def _clip(self, window: Window, verdict: Verdict) -> Tensor:
        """Emitted tokens kept per sequence: EOS, stop ids and max_tokens end a run in its middle."""
        registers = self.rank.registers
        emitted_S = window.first_index_S - self.rank.pools.prompt_len.index_select(0, window.slots_S)
        room_S = registers.max_tokens.index_select(0, window.slots_S) - emitted_S
        return clip_emitted(
            verdict.tokens_BW, verdict.num_emitted_B, registers.stop_ids.index_select(0, window.slots_S), room_S
        )

    def _log_emitted(self, window: Window, verdict: Verdict) -> None:
        """Emitted tokens replace the drafts in the log. Cells beyond them stay unread; 0 keeps them valid ids."""
        log = self.rank.pools.token_log
        cell_W = torch.arange(window.width, device=log.device)
        index_SW = window.slots_S[:, None] * log.shape[1] + window.first_index_S[:, None] + cell_W
        log.view(-1).index_copy_(0, index_SW.view(-1), verdict.tokens_BW.clamp(min=0).view(-1).to(log.dtype))

    def _margins(self, window: Window, logits_RV: Tensor) -> Tensor:
        """By how much the largest logit of each cell leads the second, float32 [S, W]."""
        shape = (len(window.slots), window.width)
        top_R2 = logits_RV[: shape[0] * shape[1]].float().topk(2).values
        return (top_R2[:, 0] - top_R2[:, 1]).view(shape)

    def _read_back(
        self,
        plan: StepPlan,
        window: Window,
        verdict: Verdict,
        emitted_S: Tensor,
        margins_SW: Tensor | None,
        clock: list[float],
    ) -> StepResult:
        """The step's one read from the device."""
        parts = [
            emitted_S[:, None],
            verdict.num_accepted_B[:, None],
            window.num_drafts_S[:, None],
            verdict.tokens_BW,
            window.drafts_SG,
        ]
        if margins_SW is not None:
            # As bits of float64 they fit between the integers, and there is still but one read.
            parts.append(margins_SW.to(torch.float64).view(torch.int64))
        read = torch.cat(parts, 1).cpu()
        packed = read.tolist()
        clock.append(time.perf_counter())
        emitted: list[tuple[int, ...]] = [()] * len(plan.slots)
        drafted: list[tuple[int, ...]] = [()] * len(plan.slots)
        accepted, admitted = [0] * len(plan.slots), [0] * len(plan.slots)
        margins: list[tuple[float, ...]] = [()] * len(plan.slots) if plan.report_margins else []
        for column, row in zip(window.columns, packed, strict=True):
            emitted[column] = tuple(row[3 : 3 + row[0]])
            drafted[column] = tuple(row[3 + window.width : 3 + window.width + plan.num_drafts[column]])
            accepted[column], admitted[column] = row[1], row[2]
        if margins_SW is not None:
            leads = read[:, -window.width :].view(torch.float64).tolist()
            for column, row in zip(window.columns, leads, strict=True):
                margins[column] = tuple(row[: len(emitted[column])])
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            emitted=tuple(emitted),
            drafted=tuple(drafted),
            num_admitted=tuple(admitted),
            num_accepted=tuple(accepted),
            margins=tuple(margins),
            timings=_timings(clock),
        )

    def _nothing_emitted(self, plan: StepPlan, clock: list[float]) -> StepResult:
        clock.append(time.perf_counter())
        nothing: Sequence[tuple[int, ...]] = [()] * len(plan.slots)
        zeros = (0,) * len(plan.slots)
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            emitted=tuple(nothing),
            drafted=tuple(nothing),
            num_admitted=zeros,
            num_accepted=zeros,
            margins=tuple(nothing) if plan.report_margins else (),
            timings=_timings(clock),
        )


def _timings(clock: Sequence[float]) -> StepTimings:
    """On GPUs work is queued and these are times of launching, but for the last, which waits."""
    begin, target, verified, committed, end = clock
    return StepTimings(
        total_s=end - begin,
        target_s=target - begin,
        verify_s=verified - target,
        commit_s=committed - verified,
        draft_s=end - committed,
    )
