"""Groups of ranks of arithmetic, and where they come from. They keep the contract of StepPlan as real ones do, and note
in `violations` why they refused one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fakes.arithmetic import EOS, VOCAB_SIZE, FakeRank, Tenant, margin_of, true_token

from parallel.mesh import Mesh
from runtime.link import RankPlace, RankProgress
from runtime.request import Request
from workers.demands import Constraint
from workers.plan import (
    NUM_TEMPERATURE_CLASSES,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerDescription,
    WorkerError,
    WorkerLost,
)

__all__ = ["EOS", "FakeGroup", "FakeSource", "describe", "margin_of", "true_stream", "true_token"]


def true_stream(request: Request) -> tuple[int, ...]:
    """All tokens of a request, stop strings aside."""
    stops = {*request.stopping.eos_token_ids, *request.stopping.stop_token_ids}
    tokens: list[int] = []
    while len(tokens) < request.stopping.max_tokens and not (tokens and tokens[-1] in stops):
        tokens.append(true_token(request.prompt, len(tokens)))
    return tuple(tokens)


def describe(**changes: object) -> WorkerDescription:
    """A small rank: 4 slots, 12 pages of 4 tokens in each of two groups, γ_max 4, sequences of up to 40 tokens."""
    fields: dict[str, object] = {
        "model_type": "fake",
        "vocab_size": VOCAB_SIZE,
        "context_length": 40,
        "max_model_len": 40,
        "eos_token_ids": (EOS,),
        "dtype": "float32",
        "numerics": "reference",
        "device": "cpu",
        "num_parameters": 0,
        "parameter_bytes": 0,
        "gamma_max": 4,
        "page_size": 4,
        "cache_groups": ("target", "drafter"),
        "num_pages": (12, 12),
        "page_bytes": (64, 32),
        "num_slots": 4,
        "slot_bytes": 1000,
        "record_bytes": 5000,
        "accounting": (),
    }
    return WorkerDescription(**{**fields, **changes})  # type: ignore[arg-type]


class FakeGroup:
    """StepLink and LoadedGroup in one: `dp` data-parallel ranks. `accept` is the chance of a draft to be right.

    rank_violations: what each rank says when it is to check itself.
    gated: a step waits for `let_go` before it answers.
    corrupt_uids: sequences whose counts come back wrong.
    prepared: constraints that were made ready. problems, prepare_errors: why some cannot be followed, or could not be
    compiled, by text.
    """

    def __init__(
        self,
        description: WorkerDescription,
        *,
        dp: int = 1,
        epoch: int = 1,
        max_step_tokens: int = 32,
        accept: float = 0.6,
        gated: bool = False,
    ) -> None:
        self.mesh = Mesh(dp=dp, ep=dp)
        self.ranks = tuple(replace(description, rank=rank, num_ranks=dp) for rank in range(dp))
        self.places = tuple(RankPlace(name=f"fake-{rank}", address=f"127.0.0.1:{rank + 1}") for rank in range(dp))
        self.rank_violations: list[list[str]] = [[] for _ in range(dp)]
        self.epoch = epoch
        self.link = self
        self.gated = gated
        self.plans: list[StepPlan] = []
        self.violations: list[str] = []
        self.corrupt_uids: set[int] = set()
        self.prepared: list[Constraint] = []
        self.problems: dict[str, str] = {}
        self.prepare_errors: dict[str, WorkerError] = {}
        self.dp_ranks = [
            FakeRank(
                description,
                max_step_tokens=max_step_tokens,
                accept=accept,
                seed=dp * epoch + rank,
                corrupt_uids=self.corrupt_uids,
            )
            for rank in range(dp)
        ]
        self._last_step_id: int | None = None
        self._permit: asyncio.Future[None] | None = None
        self._lost: asyncio.Future[str] | None = None

    @property
    def description(self) -> WorkerDescription:
        return self.ranks[0]

    @property
    def tenants(self) -> list[Tenant]:
        """Those of all ranks."""
        return [tenant for rank in self.dp_ranks for tenant in rank.tenants.values()]

    @property
    def lost(self) -> asyncio.Future[str]:
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return self._lost

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits to be let go."""
        return self._permit is not None and not self._permit.done()

    def let_go(self) -> None:
        assert self._permit is not None
        self._permit.set_result(None)

    def fail_step(self, error: Exception) -> None:
        """The step in flight raises."""
        assert self._permit is not None
        self._permit.set_exception(error)

    def lose(self, error: WorkerError) -> None:
        """A process is gone: the step in flight fails, and so do all to come."""
        if self.is_waiting:
            self.fail_step(error)
        if not self.lost.done():
            self.lost.set_result(str(error))

    async def execute(self, plan: StepPlan) -> StepResult:
        if self.lost.done():
            raise WorkerLost(self.lost.result())
        result = self.run(plan)
        if self.gated:
            self._permit = asyncio.get_running_loop().create_future()
            await self._permit
        return result

    async def check_integrity(self) -> list[list[str]]:
        if self.lost.done():
            raise WorkerLost(self.lost.result())
        return self.rank_violations

    async def prepare(self, constraint: Constraint) -> str:
        if self.lost.done():
            raise WorkerLost(self.lost.result())
        if constraint.text in self.prepare_errors:
            raise self.prepare_errors[constraint.text]
        self.prepared.append(constraint)
        return self.problems.get(constraint.text, "")

    def run(self, plan: StepPlan) -> StepResult:
        """One step. Raises AssertionError, and notes it, when the plan breaks the contract.

        Rank r takes r + 1 seconds, half of them in the target pass, and computes 2 expert rows per token of its batch.
        """
        try:
            self._check(plan)
            batches = tuple(rank.run(plan, batch) for rank, batch in zip(self.dp_ranks, plan.batches, strict=True))
        except AssertionError as error:
            self.violations.append(f"step {plan.step_id}: {error}")
            raise
        self.plans.append(plan)
        timings = tuple(
            StepTimings(
                total_s=rank + 1.0,
                target_s=(rank + 1) / 2,
                verify_s=(rank + 1) / 4,
                commit_s=(rank + 1) / 8,
                draft_s=(rank + 1) / 8,
                collective_s=(rank + 1) / 16,
                dispatch_s=(rank + 1) / 32,
                combine_s=(rank + 1) / 64,
                expert_rows=2 * (sum(batch.num_known) + sum(result.num_admitted)),
            )
            for rank, (batch, result) in enumerate(zip(plan.batches, batches, strict=True))
        )
        return StepResult(step_id=plan.step_id, epoch=plan.epoch, batches=batches, timings=timings)

    def _check(self, plan: StepPlan) -> None:
        assert plan.epoch == self.epoch, f"a plan of epoch {plan.epoch} reached epoch {self.epoch}"
        assert self._last_step_id in (None, plan.step_id - 1), f"follows step {self._last_step_id}"
        self._last_step_id = plan.step_id
        assert len(plan.batches) == self.mesh.dp, f"{len(plan.batches)} batches for {self.mesh.dp} ranks"
        assert any(batch.slots or batch.released_slots for batch in plan.batches), "nothing to do"
        assert 0 <= plan.gamma <= self.description.gamma_max
        assert plan.feed_drafter or plan.gamma == 0, "drafts without a fed drafter"
        assert 0 <= plan.min_survival <= 1
        cells = NUM_TEMPERATURE_CLASSES * self.description.gamma_max
        coefficients = {len(plan.calibration.slopes), len(plan.calibration.offsets)}
        assert coefficients in ({0}, {cells}), f"{coefficients} coefficients for {cells} cells"


class FakeSource:
    """Starts FakeGroups. `failures`: errors of the restarts to come, None for one that succeeds.

    hold_restarts: restarts wait until `release_restarts` is set.
    """

    def __init__(self, description: WorkerDescription | None = None, **group_options: object) -> None:
        self.description = description or describe()
        self.groups: list[FakeGroup] = []
        self.failures: list[BaseException | None] = []
        self.reasons: list[str] = []
        self.is_stopped = False
        self.hold_restarts = False
        self.release_restarts = asyncio.Event()
        # Of all groups, before and after a restart.
        self.problems: dict[str, str] = {}
        self.prepare_errors: dict[str, WorkerError] = {}
        self._options = group_options

    @property
    def group(self) -> FakeGroup:
        return self.groups[-1]

    @property
    def violations(self) -> list[str]:
        return [line for group in self.groups for line in group.violations]

    @property
    def plans(self) -> list[StepPlan]:
        """Those of all lives."""
        return [plan for group in self.groups for plan in group.plans]

    async def start(self, progress: RankProgress) -> FakeGroup:
        group = self._next()
        for rank in range(group.mesh.size):
            progress(rank, "launch", 1, 1)
        return group

    async def restart(self, reason: str) -> FakeGroup:
        self.reasons.append(reason)
        await asyncio.sleep(0)  # as every real start does: an engine that restarts for ever leaves others their turn
        if self.hold_restarts:
            await self.release_restarts.wait()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return self._next()

    async def stop(self) -> None:
        self.is_stopped = True

    def _next(self) -> FakeGroup:
        group = FakeGroup(self.description, epoch=len(self.groups) + 1, **self._options)  # type: ignore[arg-type]
        group.problems, group.prepare_errors = self.problems, self.prepare_errors
        self.groups.append(group)
        return group
