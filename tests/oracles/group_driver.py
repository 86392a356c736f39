"""Drives a group of ranks with plans: the bookkeeping of one `Driver` per data-parallel rank. Test material only."""

from __future__ import annotations

from collections.abc import Sequence

from oracles.driver import Driver, Live
from oracles.group import GroupOfWorkers

from workers.plan import IDENTITY, VERIFY_EVERYTHING, Calibration, StepPlan, StepResult


class GroupDriver:
    """drivers: one per data-parallel rank; sequences are added to and removed from these."""

    def __init__(self, group: GroupOfWorkers, *, seed: int = 0, poison: bool = True) -> None:
        self.group = group
        self.drivers = []
        for leader in group.mesh.leaders():
            first, *peers = (group.workers[rank] for rank in group.mesh.tp_ranks(leader))
            self.drivers.append(Driver(first, seed=seed, poison=poison, peers=peers))
        self.step_id = max(driver.step_id for driver in self.drivers)

    def step(
        self,
        members: Sequence[Sequence[Live]] | None = None,
        *,
        gamma: int = 0,
        feed: bool | None = None,
        chunks: dict[int, int] | None = None,
        budgets: Sequence[int] | None = None,
        forced: int = 0,
        floor: float = 0.0,
        slack: int = 0,
        margins: bool = False,
        calibration: Calibration = IDENTITY,
    ) -> StepResult:
        """One step of `members[dp_rank]`, by default of all who have not finished."""
        members = [driver.unfinished for driver in self.drivers] if members is None else members
        feeds = gamma > 0 if feed is None else feed
        self.step_id += 1
        batches = tuple(
            driver.plan_batch(part, feeds=feeds, chunks=chunks, slack=slack, budget=budget, forced=forced)
            for driver, part, budget in zip(
                self.drivers, members, budgets or [VERIFY_EVERYTHING] * len(self.drivers), strict=True
            )
        )
        admissions = [driver.admission(batch, floor) for driver, batch in zip(self.drivers, batches, strict=True)]
        result = self.group.execute(
            StepPlan(
                step_id=self.step_id,
                epoch=1,
                batches=batches,
                gamma=gamma,
                feed_drafter=feeds,
                report_margins=margins,
                calibration=calibration,
                min_survival=floor,
            )
        )
        for driver, part, batch, said, admission in zip(
            self.drivers, members, batches, result.batches, admissions, strict=True
        ):
            driver.take(part, batch, said, gamma=gamma, admission=admission)
        return result

    @property
    def live(self) -> list[Live]:
        return [live for driver in self.drivers for live in driver.live]

    def run(self, gamma: int = 0) -> None:
        """Steps until every sequence has finished."""
        while any(not live.finished for live in self.live):
            self.step(gamma=gamma)
