"""Decides one step of all ranks: who enters where, and what the ranks must agree on. Knows no clock, no link, no text.

    queue, in strict order ──▶ the rank with room that suits the head best ──▶ its own slots, pages, running order

The sequences of one request go to one rank, since they share its prompt.

γ and whether the drafter runs are one answer for all; everything else is the business of each data-parallel rank. The
queue outlives this; the rest lasts as long as one life of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.routing import PrefixRouter
from runtime.scheduler.scheduler import Scheduler
from runtime.verification.speculation import StepPlanner
from state.ledger import RunningSequence
from workers.plan import NewSequence, StepPlan


class GroupScheduler:
    """Plans the steps of a group of ranks.

    queue: requests that wait; admission takes from its head.
    schedulers: one per data-parallel rank, in order.
    router: chooses among them.
    epoch: the life of the group that the plans are for.
    first_step_id: id of the first plan.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        schedulers: Sequence[Scheduler],
        router: PrefixRouter,
        *,
        epoch: int,
        first_step_id: int = 1,
    ) -> None:
        self.queue = queue
        self.schedulers = tuple(schedulers)
        self.epoch = epoch
        self.next_step_id = first_step_id
        self._router = router
        # The data-parallel rank of each running sequence, by uid.
        self._homes: dict[int, int] = {}

    @property
    def running(self) -> Iterator[RunningSequence]:
        """All running sequences, rank by rank."""
        return (sequence for scheduler in self.schedulers for sequence in scheduler.ledger)

    @property
    def has_work(self) -> bool:
        """Whether a plan made now would move anything on any rank."""
        return bool(self.queue) or any(scheduler.has_work for scheduler in self.schedulers)

    @property
    def num_openings(self) -> int:
        """Slots that the queue may fill in the next step; 0 while no rank has room for its head."""
        head = self.queue.head
        return sum(
            scheduler.ledger.slots.num_free for scheduler in self.schedulers if head is None or scheduler.has_room(head)
        )

    def find(self, dp_rank: int, slot: int, epoch: int) -> RunningSequence | None:
        """The tenant of a data-parallel rank's slot if it is still the one of `epoch`."""
        return self.schedulers[dp_rank].ledger.find(slot, epoch)

    def sequence(self, uid: int) -> RunningSequence | None:
        """The running sequence with this uid; None while it waits in the queue, and after its end."""
        dp_rank = self._homes.get(uid)
        return None if dp_rank is None else self.schedulers[dp_rank].ledger[uid]

    def plan(self, planner: StepPlanner) -> StepPlan:
        """The next step. Admits what fits."""
        admitted = self._enter()
        decision = planner.decide(self.next_step_id, [scheduler.load() for scheduler in self.schedulers])
        batches = tuple(
            scheduler.plan(new, share, gamma=decision.gamma, feed_drafter=decision.feed_drafter)
            for scheduler, new, share in zip(self.schedulers, admitted, decision.batches, strict=True)
        )
        plan = StepPlan(
            step_id=self.next_step_id,
            epoch=self.epoch,
            batches=batches,
            gamma=decision.gamma,
            feed_drafter=decision.feed_drafter,
            report_margins=any(
                scheduler.reports_margins(batch) for scheduler, batch in zip(self.schedulers, batches, strict=True)
            ),
            calibration=decision.calibration,
            min_survival=decision.min_survival,
        )
        self.next_step_id += 1
        return plan

    def home(self, uid: int) -> int | None:
        """The data-parallel rank that a sequence runs on; None for one that does not run."""
        return self._homes.get(uid)

    def followers(self, uid: int) -> list[int]:
        """Those that wait to take over what a running sequence has read of their prompt."""
        return self.schedulers[self._homes[uid]].followers(uid)

    def release(self, uid: int) -> None:
        """Lets go of a running sequence; see Scheduler.release."""
        self.schedulers[self._homes[uid]].release(uid)
        del self._homes[uid]

    def check_integrity(self) -> list[str]:
        """One line per violated invariant of the books; empty when all hold."""
        problems = [
            f"data-parallel rank {dp_rank}: {problem}"
            for dp_rank, scheduler in enumerate(self.schedulers)
            for problem in scheduler.ledger.check_integrity()
        ]
        homes = {
            sequence.uid: dp_rank for dp_rank, scheduler in enumerate(self.schedulers) for sequence in scheduler.ledger
        }
        if homes != self._homes:
            problems.append(f"sequences run on data-parallel ranks {homes}, the books say {self._homes}")
        return problems

    def _enter(self) -> list[list[NewSequence]]:
        """Who enters, per data-parallel rank: those that fork, and the queue from its head for as long as a rank has
        room."""
        entering = [scheduler.fork() for scheduler in self.schedulers]
        outstanding: list[int] = []
        while (head := self.queue.head) is not None:
            open_ranks = [dp_rank for dp_rank, scheduler in enumerate(self.schedulers) if scheduler.has_room(head)]
            if not open_ranks:
                break
            # Once for all that enter: it takes a look at every sequence.
            outstanding = outstanding or [scheduler.num_outstanding_tokens for scheduler in self.schedulers]
            family = self.queue.pop()
            dp_rank = self._router.route(family[0].prompt, {rank: outstanding[rank] for rank in open_ranks})
            scheduler = self.schedulers[dp_rank]
            entering[dp_rank] += scheduler.admit(family)
            self._homes |= {request.uid: dp_rank for request in family}
            outstanding[dp_rank] += sum(scheduler.ledger[request.uid].num_outstanding for request in family)
        return entering
