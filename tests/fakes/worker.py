"""A rank of arithmetic: tokens follow from prompt and position, drafts are right by chance, every plan is checked.

It keeps the contract of StepPlan as the real one does, and refuses, with the reason in `violations`, what the real one
would silently compute wrongly.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import dataclass, field

from runtime.request import Request
from workers.plan import NewSequence, StepPlan, StepResult, StepTimings, WorkerDescription, WorkerError, WorkerLost

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
    """A small worker: 4 slots, 12 pages of 4 tokens in each of two groups, γ_max 4, sequences of up to 40 tokens."""
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
        "num_slots": 4,
        "accounting": (),
    }
    return WorkerDescription(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class Tenant:
    """What the worker knows of a sequence."""

    new: NewSequence
    num_fed: int = 0
    emitted: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()

    @property
    def committed_len(self) -> int:
        return len(self.new.prompt) + len(self.emitted) - 1 if self.emitted else self.num_fed


class FakeWorker:
    """StepLink and LoadedWorker in one. `accept` is the chance of a draft to be right.

    gated: a step waits for `let_go` before it answers.
    corrupt_uids: sequences whose counts come back wrong.
    """

    def __init__(
        self,
        description: WorkerDescription,
        *,
        epoch: int = 1,
        max_step_tokens: int = 32,
        accept: float = 0.6,
        gated: bool = False,
    ) -> None:
        self.description = description
        self.epoch = epoch
        self.link = self
        self.max_step_tokens = max_step_tokens
        self.gated = gated
        self.plans: list[StepPlan] = []
        self.violations: list[str] = []
        self.admitted_uids: list[int] = []
        self.tenants: dict[int, Tenant] = {}
        self.corrupt_uids: set[int] = set()
        self._accept = accept
        self._chance = random.Random(epoch)
        self._last_step_id: int | None = None
        self._last_epoch = 0
        self._permit: asyncio.Future[None] | None = None
        self._lost: asyncio.Future[str] | None = None

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
        """The process is gone: the step in flight fails, and so do all to come."""
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

    def run(self, plan: StepPlan) -> StepResult:
        """One step. Raises AssertionError, and notes it, when the plan breaks the contract."""
        try:
            self._check_and_enter(plan)
            outcomes = [self._advance(plan, column) for column in range(len(plan.slots))]
        except AssertionError as error:
            self.violations.append(f"step {plan.step_id}: {error}")
            raise
        self.plans.append(plan)
        drafted, admitted, accepted, emitted = zip(*outcomes, strict=True) if outcomes else ((), (), (), ())
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            emitted=tuple(emitted),
            drafted=tuple(drafted),
            num_admitted=tuple(admitted),
            num_accepted=tuple(accepted),
            margins=tuple(tuple(map(margin_of, tokens)) for tokens in emitted) if plan.report_margins else (),
            timings=StepTimings(total_s=1.0, target_s=0.5, verify_s=0.25, commit_s=0.125, draft_s=0.125),
        )

    def _check_and_enter(self, plan: StepPlan) -> None:
        assert plan.epoch == self.epoch, f"a plan of epoch {plan.epoch} reached epoch {self.epoch}"
        assert self._last_step_id in (None, plan.step_id - 1), f"follows step {self._last_step_id}"
        self._last_step_id = plan.step_id
        for slot in plan.released_slots:
            assert slot in self.tenants, f"released slot {slot} has no tenant"
            del self.tenants[slot]
        for new in plan.admitted:
            self._enter(new)
        columns = (plan.epochs, plan.num_known, plan.num_drafts, plan.samples, plan.max_committed)
        assert all(len(column) == len(plan.slots) for column in columns), "columns of unequal length"
        assert len(set(plan.slots)) == len(plan.slots), "a slot is scheduled twice"
        num_rows = sum(plan.num_known) + sum(plan.num_drafts)
        assert num_rows <= self.max_step_tokens, f"{num_rows} rows"
        assert plan.slots or plan.released_slots, "nothing to do"
        assert 0 <= plan.gamma <= self.description.gamma_max
        assert plan.feed_drafter or plan.gamma == 0, "drafts without a fed drafter"

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
        self.admitted_uids.append(new.uid)

    def _advance(self, plan: StepPlan, column: int) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
        tenant = self.tenants[plan.slots[column]]
        new, known = tenant.new, plan.num_known[column]
        assert plan.epochs[column] == new.epoch, f"slot {new.slot} is in epoch {new.epoch}"
        assert plan.num_drafts[column] == len(tenant.drafts), f"{len(tenant.drafts)} drafts wait"
        assert plan.max_committed[column] == tenant.committed_len, f"{tenant.committed_len} tokens are committed"
        if tenant.emitted:
            assert known == 1
            assert plan.samples[column]
        else:
            tenant.num_fed += known
            assert known >= 1
            assert tenant.num_fed <= len(new.prompt)
            assert plan.samples[column] == (tenant.num_fed == len(new.prompt))
            if not plan.samples[column]:
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


class FakeSource:
    """Starts FakeWorkers. `failures`: errors of the restarts to come, None for one that succeeds.

    hold_restarts: restarts wait until `release_restarts` is set.
    """

    def __init__(self, description: WorkerDescription | None = None, **worker_options: object) -> None:
        self.description = description or describe()
        self.workers: list[FakeWorker] = []
        self.failures: list[BaseException | None] = []
        self.reasons: list[str] = []
        self.is_stopped = False
        self.hold_restarts = False
        self.release_restarts = asyncio.Event()
        self._options = worker_options

    @property
    def worker(self) -> FakeWorker:
        return self.workers[-1]

    @property
    def violations(self) -> list[str]:
        return [line for worker in self.workers for line in worker.violations]

    @property
    def admitted_uids(self) -> list[int]:
        return [uid for worker in self.workers for uid in worker.admitted_uids]

    async def start(self, progress: object) -> FakeWorker:
        return self._next()

    async def restart(self, reason: str) -> FakeWorker:
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

    def _next(self) -> FakeWorker:
        worker = FakeWorker(self.description, epoch=len(self.workers) + 1, **self._options)  # type: ignore[arg-type]
        self.workers.append(worker)
        return worker
