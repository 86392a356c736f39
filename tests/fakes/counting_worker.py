"""A rank without a model whose text is known beforehand, with drafts that are partly right. Knows no torch.

The token at output position p is TEXT_TOKENS[p % len(TEXT_TOKENS)], whatever the prompt. A draft is wrong where its
output position is divisible by WRONG_EVERY.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from configs.schema import WorkerSettings
from parallel.mesh import Mesh
from workers.demands import Constraint
from workers.plan import BatchPlan, BatchResult, LoadError, Progress, RankReport, StepPlan, WorkerDescription

FACTORY = "fakes.counting_worker:load"
TEXT_TOKENS = tuple(range(300, 340))
WRONG_TOKEN = 299
WRONG_EVERY = 3


def truth(position: int) -> int:
    return TEXT_TOKENS[position % len(TEXT_TOKENS)]


def draft(position: int) -> int:
    return WRONG_TOKEN if position % WRONG_EVERY == 0 else truth(position)


@dataclass(slots=True)
class _Sequence:
    max_tokens: int
    num_emitted: int = 0
    waiting: list[int] = field(default_factory=list)

    @property
    def has_begun_long(self) -> bool:
        """It is in the middle of an output that only a client asks for."""
        return self.num_emitted > 0 and self.max_tokens > 16


def load(settings: WorkerSettings, progress: Progress) -> CountingWorker:
    """Served name `badly` raises LoadError, `hang` never returns, `stick` never ends a step after the first of an
    output of more than 16 tokens."""
    progress("weights", 1, 2)
    if settings.model.served_name == "badly":
        raise LoadError("model.norm.weight: missing from the checkpoint")
    if settings.model.served_name == "hang":
        threading.Event().wait()
    progress("weights", 2, 2)
    return CountingWorker(settings)


class CountingWorker:
    """Keeps a count and the waiting drafts per slot of its data-parallel rank."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.description = WorkerDescription(
            model_type="counting",
            vocab_size=4096,
            context_length=4096,
            max_model_len=4096,
            eos_token_ids=(),
            dtype="float32",
            numerics=settings.model.numerics,
            device="cpu",
            num_parameters=1,
            parameter_bytes=4,
            gamma_max=settings.speculation.gamma_max,
            page_size=16,
            cache_groups=("target", "drafter"),
            num_pages=(1024, 1024),
            page_bytes=(64, 32),
            num_slots=8,
            slot_bytes=1000,
            record_bytes=5000,
            accounting=(("KV per token", "64 B"), ("sequences that fit", "8")),
            load_s=0.5,
            rank=settings.seat.rank,
            num_ranks=settings.parallel.dp * settings.parallel.tp,
        )
        parallel, rank = settings.parallel, settings.seat.rank
        mesh = Mesh(dp=parallel.dp, tp=parallel.tp, ep=parallel.ep)
        self._dp_rank, self._leads = mesh.dp_rank(rank), mesh.leads(rank)
        self._sticks = settings.model.served_name == "stick"
        self._sequences: dict[int, _Sequence] = {}

    def execute(self, plan: StepPlan) -> RankReport:
        batch = plan.batches[self._dp_rank]
        for slot in batch.released_slots:
            self._sequences.pop(slot, None)
        for new in batch.admitted:
            self._sequences[new.slot] = _Sequence(new.max_tokens)
        if self._sticks and any(self._sequences[slot].has_begun_long for slot in batch.slots):
            threading.Event().wait()
        rows = [self._advance(plan, batch, row) for row in range(len(batch.slots))]
        result = BatchResult(
            emitted=tuple(emitted for emitted, _, _ in rows),
            drafted=tuple(drafted for _, drafted, _ in rows),
            num_admitted=batch.num_drafts,
            num_accepted=tuple(accepted for _, _, accepted in rows),
            margins=tuple((1.0,) * len(emitted) for emitted, _, _ in rows) if plan.report_margins else (),
            scores=tuple((0.0,) * len(drafted) for _, drafted, _ in rows),
            acceptance=tuple(((1.0,) * accepted + (0.0,))[: len(drafted)] for _, drafted, accepted in rows),
        )
        return RankReport(
            step_id=plan.step_id,
            epoch=plan.epoch,
            batch=result if self._leads else None,
            digests=tuple(hash(tokens) % 2**32 for tokens in result.emitted),
        )

    def _advance(self, plan: StepPlan, batch: BatchPlan, row: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        sequence = self._sequences[batch.slots[row]]
        if not batch.samples[row]:
            return (), (), 0
        drafted = tuple(sequence.waiting[: batch.num_drafts[row]])
        start, accepted = sequence.num_emitted, 0
        while accepted < len(drafted) and drafted[accepted] == truth(start + accepted):
            accepted += 1
        count = min(accepted + 1, sequence.max_tokens - start)
        sequence.num_emitted += count
        num_next = plan.gamma if plan.feed_drafter else 0
        sequence.waiting = [draft(sequence.num_emitted + k) for k in range(num_next)]
        return tuple(truth(start + k) for k in range(count)), drafted, accepted

    def check_integrity(self) -> list[str]:
        return []

    def is_ready(self, constraint: Constraint) -> bool:
        return True

    def prepare(self, constraint: Constraint) -> str:
        return ""
