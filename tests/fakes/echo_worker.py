"""Ranks without a model: they emit numbers that follow from the plan, and misbehave on request. Knows no torch.

The model path of their settings says how loading goes, the uid of an admitted sequence what the step does: see `load`
and the uid constants. All ranks of a group meet in every step, as in a collective.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from fakes.barrier import Barrier, NoBarrier

from configs.schema import (
    CacheSettings,
    GroupSeat,
    ModelSettings,
    ParallelSettings,
    SpeculationSettings,
    WorkerSettings,
)
from parallel.mesh import Mesh
from workers.channel import LOOPBACK, PLAIN, Security
from workers.demands import Constraint
from workers.draft.admit import admit
from workers.plan import (
    BatchPlan,
    BatchResult,
    CollectiveCount,
    LoadError,
    NewSequence,
    Progress,
    RankReport,
    StalePlan,
    StepPlan,
    StepTimings,
    WorkerDescription,
)
from workers.server import serve_worker
from workers.terms import LinkTerms

if TYPE_CHECKING:
    import grpc

FACTORY = "fakes.echo_worker:load"

TERMS = LinkTerms(secret="known-to-tests")

UID_RAISES = 901
UID_DIES = 902
UID_WAITS = 903
UID_ANSWERS_ANOTHER_STEP = 904
UID_LOSES_A_COLUMN = 905
UID_STOPS = 906
UID_COMMITS_OTHERWISE = 907
UID_JOINS_ONCE_MORE = 908
UID_TELLS_NOTHING = 909

_RANK_UNIT = 1000

WAITING, GATE = threading.Event(), threading.Event()
"""A step of UID_WAITS sets the first and goes on when the second is set."""
PREPARING = threading.Semaphore(0)
"""Released by every constraint that waits for the gate."""
READY: set[str] = set()
"""Texts of constraints that are ready."""

LOAD_ERROR = "model.layers.3.mlp.gate.weight: shape [4, 8], expected [8, 4]\nsecond line: ü " + "x" * 100_000


def at_rank(uid: int, rank: int) -> int:
    """A uid that makes one rank of a group misbehave; the plain ones are for rank 0."""
    return uid + _RANK_UNIT * rank


def settings(
    load: str = "well",
    *,
    numerics: str = "default",
    threads: int = 1,
    device: str = "cpu",
    rank: int = 0,
    size: int | None = None,
) -> WorkerSettings:
    """Of one rank of a tensor-parallel group, by default the last one's."""
    model = ModelSettings.model_validate({"path": load, "numerics": numerics, "device": device})
    return WorkerSettings(
        model=model,
        cache=CacheSettings(),
        speculation=SpeculationSettings(),
        parallel=ParallelSettings(tp=size or rank + 1),
        seat=GroupSeat(rank=rank),
        max_step_tokens=64,
        threads=threads,
    )


def plan(step_id: int, epoch: int, uid: int | None = None, *, dp: int = 1) -> StepPlan:
    """A step of two sequences in the first batch and none in others; `uid` admits one that makes a rank misbehave."""
    first = BatchPlan(
        admitted=() if uid is None else (_newcomer(uid),),
        slots=(2, 5),
        epochs=(1, 9),
        num_known=(1, 1),
        num_drafts=(3, 0),
        samples=(True, True),
        max_committed=(8, 8),
        num_unfed=(0, 0),
    )
    return StepPlan(step_id=step_id, epoch=epoch, batches=(first, *[BatchPlan()] * (dp - 1)))


def pid_of(description: WorkerDescription) -> int:
    """The rank's process by its own account."""
    return int(dict(description.accounting)["process"])


def load(settings: WorkerSettings, progress: Progress) -> EchoWorker:
    """Loads in three stages. Path `badly` raises LoadError in the second, `crash` an exception of no known kind,
    `death` kills the process, `hang` never returns; `few` has fewer slots and pages, `other` another vocabulary.
    `badly@1` does so at rank 1 alone. All ranks meet before the last stage."""
    what, _, where = str(settings.model.path).partition("@")
    manner = what if int(where or 0) == settings.seat.rank else "well"
    match manner:
        case "badly":
            progress("weights", 1, 2)
            raise LoadError(LOAD_ERROR)
        case "crash":
            raise RuntimeError("the library threw")
        case "death":
            progress("weights", 1, 2)
            os.write(2, b"last words of the worker\n")
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            progress("weights", 1, 2)
            threading.Event().wait()
    progress("config", 2, 2)
    progress("weights", 2, 2)
    barrier = Barrier(settings)
    progress("pools", 2, 2)
    worker = EchoWorker(settings, barrier)
    if manner == "few":
        worker.description = replace(worker.description, num_slots=3, num_pages=(9, 2))
    if manner == "other":
        worker.description = replace(worker.description, vocab_size=31)
    return worker


class EchoWorker:
    """Step t of sequence (slot, epoch) emits (slot, epoch, t, OMP_NUM_THREADS). Its drafts are t, t+1, ..., the surer
    the smaller the slot, and all that are admitted stand."""

    description = WorkerDescription(
        model_type="echo",
        vocab_size=32,
        context_length=64,
        max_model_len=64,
        eos_token_ids=(1, 2),
        dtype="float32",
        numerics="default",
        device="cpu",
        num_parameters=3,
        parameter_bytes=12,
        gamma_max=8,
        page_size=16,
        cache_groups=("target", "drafter"),
        num_pages=(7, 8),
        page_bytes=(64, 32),
        num_slots=4,
        slot_bytes=1000,
        record_bytes=5000,
        accounting=(("process", str(os.getpid())), ("MKL_CBWR", os.environ.get("MKL_CBWR", ""))),
        load_s=0.25,
    )

    def __init__(self, settings: WorkerSettings, barrier: Barrier | NoBarrier) -> None:
        parallel = settings.parallel
        self._mesh = Mesh(dp=parallel.dp, tp=parallel.tp, ep=parallel.ep)
        self._rank = settings.seat.rank
        self._barrier = barrier
        self._last_step = 0
        self._threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
        self.description = replace(self.description, rank=self._rank, num_ranks=self._mesh.size)

    def execute(self, plan: StepPlan) -> RankReport:
        if plan.step_id <= self._last_step:
            raise StalePlan(f"step {plan.step_id} after step {self._last_step}")
        self._last_step = t = plan.step_id
        asked = {sequence.uid for batch in plan.batches for sequence in batch.admitted}
        mine = {uid % _RANK_UNIT for uid in asked if uid // _RANK_UNIT == self._rank}
        self._act(mine)
        self._barrier.join()
        batch = plan.batches[self._mesh.dp_rank(self._rank)]
        num_admitted = _admitted(plan, batch)
        emitted = tuple((slot, epoch, t, self._threads) for slot, epoch in zip(batch.slots, batch.epochs, strict=True))
        result = BatchResult(
            emitted=emitted[1:] if UID_LOSES_A_COLUMN in mine else emitted,
            drafted=tuple(tuple(range(t, t + n)) for n in batch.num_drafts),
            num_admitted=num_admitted,
            num_accepted=num_admitted,
            scores=tuple((-float(slot),) * n for slot, n in zip(batch.slots, batch.num_drafts, strict=True)),
            acceptance=tuple((1.0,) * n for n in num_admitted),
        )
        digests = [hash(tokens) % 2**32 for tokens in emitted]
        if UID_COMMITS_OTHERWISE in mine:
            digests[1] ^= 1
        return RankReport(
            step_id=t + 1 if UID_ANSWERS_ANOTHER_STEP in mine else t,
            epoch=plan.epoch,
            batch=result if self._mesh.leads(self._rank) else None,
            digests=() if UID_TELLS_NOTHING in mine else tuple(digests),
            collectives=(
                CollectiveCount(group=f"tp.{self._mesh.dp_rank(self._rank)}", count=4, digest=t),
                CollectiveCount(group="world", count=2 if UID_JOINS_ONCE_MORE in mine else 1, digest=7),
            ),
            timings=StepTimings(
                total_s=1.5 + self._rank, target_s=0.5, verify_s=0.25, commit_s=0.125, draft_s=0.0625, expert_rows=12
            ),
        )

    def _act(self, uids: set[int]) -> None:
        if UID_RAISES in uids:
            raise ArithmeticError("the matrix said no")
        if UID_DIES in uids:
            os.kill(os.getpid(), signal.SIGKILL)
        if UID_STOPS in uids:
            os.kill(os.getpid(), signal.SIGSTOP)  # takes hold of this thread some time later
        if uids & {UID_WAITS, UID_STOPS}:
            WAITING.set()
            GATE.wait()

    def check_integrity(self) -> list[str]:
        return [f"{self._last_step} steps"]

    def is_ready(self, constraint: Constraint) -> bool:
        return constraint.text in READY

    def prepare(self, constraint: Constraint) -> str:
        """Text `crash` raises, `wait` is ready when the gate opens, of any other each rank has a word to say, or none
        where it is empty."""
        if constraint.text == "crash":
            raise ArithmeticError("the grammar said no")
        if constraint.text == "wait":
            PREPARING.release()
            GATE.wait()
            return ""
        return f"{constraint.text} at rank {self._rank}" if constraint.text else ""


def _admitted(plan: StepPlan, batch: BatchPlan) -> tuple[int, ...]:
    confidence_BG = np.ones((len(batch.slots), EchoWorker.description.gamma_max), np.float32)
    confidence_BG /= 1 + np.array(batch.slots, np.float32)[:, None]
    num_admitted_B = admit(
        confidence_BG,
        np.array(batch.num_drafts, np.int64),
        np.array(batch.epochs, np.int64),
        batch.verify_budget,
        np.array(batch.num_forced, np.int64) if batch.num_forced else None,
        plan.min_survival,
    )
    return tuple(num_admitted_B.tolist())


def _newcomer(uid: int) -> NewSequence:
    return NewSequence(
        slot=2,
        epoch=1,
        uid=uid,
        prompt=(1,),
        tables=((1,),),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        coupled=False,
        stop_token_ids=(),
        max_tokens=4,
    )


def serve(epoch: int, security: Security = PLAIN) -> tuple[grpc.Server, str]:
    """A rank's server around this worker, on a free port of loopback, and its address; it answers to TERMS."""
    return serve_worker(
        load,
        epoch=epoch,
        secret=TERMS.secret,
        bind_host=LOOPBACK,
        advertise_host=None,
        ports=range(1),
        security=security,
    )
