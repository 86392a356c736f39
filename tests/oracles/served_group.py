"""Real ranks under the scheduler that serves, without engine and links: requests in, streams out. For tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from fakes.planners import Told, planner_of
from oracles.group import GroupOfWorkers
from oracles.group_driver import GroupDriver

from configs.schema import SchedulerSettings, ServeSettings
from parallel.mesh import Mesh
from runtime.life import Life, begin_life
from runtime.request import Request, sequences_of
from runtime.scheduler.queue import WaitingQueue
from runtime.settlement import outcomes
from runtime.verification.policy import Fixed, Policy
from workers.plan import StepPlan, WorkerDescription


@dataclass(frozen=True)
class _Loaded:
    """As much of a `LoadedGroup` as a life asks for."""

    mesh: Mesh
    description: WorkerDescription
    epoch: int = 1


@dataclass(slots=True)
class Stream:
    """What a sequence got: tokens, and (drafts, how many stood) of each round."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[tuple[int, ...], int]] = field(default_factory=list)


class ServedGroup:
    """One at a time per group. Where no sequence lives, pools are NaN.

    last: the life before on the same ranks, if any: ids of steps and epochs of slots go on from there.
    """

    def __init__(self, group: GroupOfWorkers, *, max_step_tokens: int = 64, last: Life | None = None) -> None:
        GroupDriver(group)  # poisons
        self.group = group
        self.queue = WaitingQueue()
        settings = ServeSettings(scheduler=SchedulerSettings(max_step_tokens=max_step_tokens))
        description = group.workers[0].description
        self.life = begin_life(_Loaded(group.mesh, description), self.queue, settings, last, now_s=0)  # type: ignore[arg-type]
        self.scheduler = self.life.scheduler
        self.plans: list[StepPlan] = []
        self.streams: dict[int, Stream] = {}
        self._max_tokens: dict[int, int] = {}
        self._told = Told(planner_of(gamma_max=description.gamma_max))

    def submit(self, request: Request) -> list[int]:
        """The uids of its sequences."""
        uids = []
        for sequence in sequences_of(request):
            self.streams[sequence.uid] = Stream()
            self._max_tokens[sequence.uid] = sequence.stopping.max_tokens
            uids.append(sequence.uid)
        self.queue.push(request)
        return uids

    def end(self, uid: int) -> None:
        """Wherever it is."""
        (self.queue.remove if uid in self.queue else self.scheduler.release)(uid)

    def step(self, policy: Policy) -> StepPlan:
        """Plans, executes, commits; lets go of what has all its tokens."""
        plan = self.scheduler.plan(self._told.under(policy))
        result = self.group.execute(plan)
        self.plans.append(plan)
        for outcome in outcomes(plan, result):
            sequence = self.scheduler.find(outcome.dp_rank, outcome.slot, outcome.epoch)
            assert sequence is not None
            sequence.commit(outcome.num_known, outcome.emitted)
            stream = self.streams[sequence.uid]
            stream.tokens += outcome.emitted
            if outcome.samples:
                stream.rounds.append((outcome.drafted, outcome.num_accepted))
            if len(stream.tokens) == self._max_tokens[sequence.uid]:
                self.scheduler.release(sequence.uid)
        assert self.scheduler.check_integrity() == []
        return plan

    def drain(self, policy: Policy = Fixed(0)) -> None:  # noqa: B008
        """Steps until nothing is left to do; pools are empty and whole then."""
        while self.scheduler.has_work:
            self.step(policy)
        uses = [scheduler.use() for scheduler in self.scheduler.schedulers]
        assert all(use.slots_used == 0 and all(pool.used == 0 for pool in use.pages) for use in uses)
        for worker in self.group.workers:
            assert worker.check_integrity() == []
