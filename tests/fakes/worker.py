"""Ranks of arithmetic: tokens follow from prompt and position, drafts are right by chance, every plan is checked.

They keep the contract of StepPlan as the real ones do, and refuse, with the reason in `violations`, what those would
silently compute wrongly.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import dataclass, field, replace

from parallel.mesh import Mesh
from runtime.link import RankPlace, RankProgress
from runtime.request import Request
from workers.plan import (
    BatchPlan,
    BatchResult,
    NewSequence,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerDescription,
    WorkerError,
    WorkerLost,
)

VOCAB_SIZE = 61
EOS = 0


def true_token(prompt: tuple[int, ...], position: int) -> int:
    """The token at output position `position`, whatever the schedule."""
    return zlib.crc32(repr((prompt, position)).encode()) % VOCAB_SIZE


def margin_of(token: int) -> float:
    """The logit gap of a token, told to plans that ask for it."""
    return token / 8


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


@dataclass
class Tenant:
    """What a rank knows of a sequence. num_unfed: committed rows that its drafter has not seen."""

    new: NewSequence
    num_fed: int = 0
    emitted: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    num_unfed: int = 0

    @property
    def committed_len(self) -> int:
        return len(self.new.prompt) + len(self.emitted) - 1 if self.emitted else self.num_fed


class FakeRank:
    """One data-parallel rank: tenants of its own. `corrupt_uids`: sequences whose counts come back wrong."""

    def __init__(
        self,
        description: WorkerDescription,
        *,
        max_step_tokens: int,
        accept: float,
        seed: int,
        corrupt_uids: set[int],
    ) -> None:
        self.description = description
        self.tenants: dict[int, Tenant] = {}
        self.corrupt_uids = corrupt_uids
        self._max_step_tokens = max_step_tokens
        self._accept = accept
        self._chance = random.Random(seed)
        self._last_epoch = 0

    def run(self, plan: StepPlan, batch: BatchPlan) -> BatchResult:
        self._check_and_enter(batch)
        outcomes = [self._advance(plan, batch, column) for column in range(len(batch.slots))]
        drafted, admitted, accepted, emitted = zip(*outcomes, strict=True) if outcomes else ((), (), (), ())
        return BatchResult(
            emitted=tuple(emitted),
            drafted=tuple(drafted),
            num_admitted=tuple(admitted),
            num_accepted=tuple(accepted),
            margins=tuple(tuple(map(margin_of, tokens)) for tokens in emitted) if plan.report_margins else (),
        )

    def _check_and_enter(self, batch: BatchPlan) -> None:
        for slot in batch.released_slots:
            assert slot in self.tenants, f"released slot {slot} has no tenant"
            del self.tenants[slot]
        for new in batch.admitted:
            self._enter(new)
        columns = (
            batch.epochs,
            batch.num_known,
            batch.num_drafts,
            batch.samples,
            batch.max_committed,
            batch.num_unfed,
        )
        assert all(len(column) == len(batch.slots) for column in columns), "columns of unequal length"
        assert len(set(batch.slots)) == len(batch.slots), "a slot is scheduled twice"
        num_rows = sum(batch.num_known) + sum(batch.num_drafts)
        assert num_rows <= self._max_step_tokens, f"{num_rows} rows"
        assert batch.verify_budget >= 0

    def _enter(self, new: NewSequence) -> None:
        assert 1 <= new.slot <= self.description.num_slots
        assert new.slot not in self.tenants, f"slot {new.slot} is taken"
        assert new.epoch > self._last_epoch, f"epoch {new.epoch} is not fresh"
        self._last_epoch = new.epoch
        need = len(new.prompt) + new.max_tokens + self.description.gamma_max + 1
        assert len(new.tables) == len(self.description.cache_groups)
        for group, (table, num_pages) in enumerate(zip(new.tables, self.description.num_pages, strict=True)):
            assert all(1 <= page <= num_pages for page in table)
            assert len(table) * self.description.page_size >= need, f"{len(table)} pages for {need} tokens"
            held = [page for tenant in self.tenants.values() for page in tenant.new.tables[group]]
            assert len({*held, *table}) == len(held) + len(table), "a page has two tenants"
        self.tenants[new.slot] = Tenant(new)

    def _advance(
        self, plan: StepPlan, batch: BatchPlan, column: int
    ) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
        tenant = self.tenants[batch.slots[column]]
        before, num_unfed = tenant.committed_len, batch.num_unfed[column]
        assert num_unfed >= tenant.num_unfed, f"the drafter lacks {tenant.num_unfed} rows, the plan says {num_unfed}"
        assert bool(num_unfed) == bool(tenant.num_unfed), "a catch-up pass over nothing"
        outcome = self._commit(plan, batch, column, tenant)
        tenant.num_unfed = 0 if plan.feed_drafter else tenant.num_unfed + tenant.committed_len - before
        return outcome

    def _commit(
        self, plan: StepPlan, batch: BatchPlan, column: int, tenant: Tenant
    ) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
        new, known = tenant.new, batch.num_known[column]
        assert batch.epochs[column] == new.epoch, f"slot {new.slot} is in epoch {new.epoch}"
        assert batch.num_drafts[column] == len(tenant.drafts), f"{len(tenant.drafts)} drafts wait"
        assert batch.max_committed[column] == tenant.committed_len, f"{tenant.committed_len} tokens are committed"
        if tenant.emitted:
            assert known == 1
            assert batch.samples[column]
        else:
            tenant.num_fed += known
            assert known >= 1
            assert tenant.num_fed <= len(new.prompt)
            assert batch.samples[column] == (tenant.num_fed == len(new.prompt))
            if not batch.samples[column]:
                return (), 0, 0, ()
        drafted, position = tenant.drafts, len(tenant.emitted)
        num_accepted = 0
        while num_accepted < len(drafted) and drafted[num_accepted] == true_token(new.prompt, position + num_accepted):
            num_accepted += 1
        emitted = self._clip(new, position, [true_token(new.prompt, position + i) for i in range(num_accepted + 1)])
        tenant.emitted += emitted
        tenant.drafts = self._draft(new.prompt, len(tenant.emitted), plan.gamma)
        if new.uid in self.corrupt_uids:
            num_accepted += 1
        return drafted, len(drafted), num_accepted, tuple(emitted)

    def _clip(self, new: NewSequence, position: int, tokens: list[int]) -> list[int]:
        clipped = tokens[: new.max_tokens - position]
        stop = next((i for i, token in enumerate(clipped) if token in new.stop_token_ids), len(clipped))
        return clipped[: stop + 1]

    def _draft(self, prompt: tuple[int, ...], position: int, gamma: int) -> tuple[int, ...]:
        right = [true_token(prompt, position + i) for i in range(gamma)]
        return tuple(t if self._chance.random() < self._accept else (t + 1) % VOCAB_SIZE for t in right)


class FakeGroup:
    """StepLink and LoadedGroup in one: `dp` data-parallel ranks. `accept` is the chance of a draft to be right.

    rank_violations: what each rank says when it is to check itself.
    gated: a step waits for `let_go` before it answers.
    corrupt_uids: sequences whose counts come back wrong.
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
                expert_rows=2 * (sum(batch.num_known) + sum(batch.num_drafts)),
            )
            for rank, batch in enumerate(plan.batches)
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
        self.groups.append(group)
        return group
