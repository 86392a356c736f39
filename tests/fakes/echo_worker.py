"""A rank without a model: emits numbers that follow from the plan, and misbehaves on request. Knows no torch.

The model path of its settings says how loading goes, the uid of an admitted sequence what the step does:
see `load` and the uid constants.
"""

from __future__ import annotations

import os
import signal
import threading

from configs.schema import CacheSettings, ModelSettings, SpeculationSettings, WorkerSettings
from workers.plan import (
    LoadError,
    NewSequence,
    Progress,
    StalePlan,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerDescription,
)

FACTORY = "fakes.echo_worker:load"

UID_RAISES = 901
UID_DIES = 902
UID_STOPS = 906
UID_WAITS = 903
UID_ANSWERS_ANOTHER_STEP = 904
UID_LOSES_A_COLUMN = 905

WAITING, GATE = threading.Event(), threading.Event()
"""A step of UID_WAITS sets the first and goes on when the second is set."""

LOAD_ERROR = "model.layers.3.mlp.gate.weight: shape [4, 8], expected [8, 4]\nsecond line: ü " + "x" * 100_000


def settings(load: str = "well", *, numerics: str = "default", threads: int = 1) -> WorkerSettings:
    model = ModelSettings.model_validate({"path": load, "numerics": numerics})
    return WorkerSettings(
        model=model, cache=CacheSettings(), speculation=SpeculationSettings(), max_step_tokens=64, threads=threads
    )


def plan(step_id: int, epoch: int, uid: int | None = None) -> StepPlan:
    """A step of two sequences; `uid` admits one that makes the step misbehave."""
    return StepPlan(
        step_id=step_id,
        epoch=epoch,
        admitted=() if uid is None else (_newcomer(uid),),
        slots=(2, 5),
        epochs=(1, 9),
        num_known=(1, 1),
        num_drafts=(3, 0),
        samples=(True, True),
        max_committed=(8, 8),
    )


def pid_of(description: WorkerDescription) -> int:
    """The worker's process by its own account."""
    return int(dict(description.accounting)["process"])


def load(settings: WorkerSettings, progress: Progress) -> EchoWorker:
    """Loads in three stages. Path `badly` raises LoadError in the second, `crash` an exception of no known kind,
    `death` kills the process, `hang` never returns."""
    match str(settings.model.path):
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
    for stage in ("config", "weights", "pools"):
        progress(stage, 2, 2)
    return EchoWorker()


class EchoWorker:
    """Step t of sequence (slot, epoch) emits (slot, epoch, t, OMP_NUM_THREADS) and drafts t, t+1, ..."""

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
        num_slots=4,
        accounting=(("process", str(os.getpid())), ("MKL_CBWR", os.environ.get("MKL_CBWR", ""))),
        load_s=0.25,
    )

    def __init__(self) -> None:
        self._last_step = 0
        self._threads = int(os.environ.get("OMP_NUM_THREADS", "0"))

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step_id <= self._last_step:
            raise StalePlan(f"step {plan.step_id} after step {self._last_step}")
        self._last_step = plan.step_id
        uids = {sequence.uid for sequence in plan.admitted}
        if UID_RAISES in uids:
            raise ArithmeticError("the matrix said no")
        if UID_DIES in uids:
            os.kill(os.getpid(), signal.SIGKILL)
        if UID_STOPS in uids:
            os.kill(os.getpid(), signal.SIGSTOP)  # takes hold of this thread some time later
        if uids & {UID_WAITS, UID_STOPS}:
            WAITING.set()
            GATE.wait()
        t = plan.step_id
        emitted = tuple((slot, epoch, t, self._threads) for slot, epoch in zip(plan.slots, plan.epochs, strict=True))
        return StepResult(
            step_id=t + 1 if UID_ANSWERS_ANOTHER_STEP in uids else t,
            epoch=plan.epoch,
            emitted=emitted[1:] if UID_LOSES_A_COLUMN in uids else emitted,
            drafted=tuple(tuple(range(t, t + n)) for n in plan.num_drafts),
            num_admitted=plan.num_drafts,
            num_accepted=plan.num_drafts,
            timings=StepTimings(total_s=1.5, target_s=0.5, verify_s=0.25, commit_s=0.125, draft_s=0.0625),
        )

    def check_integrity(self) -> list[str]:
        return [f"{self._last_step} steps"]


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
