"""The way to all ranks of a group: one plan to each, one report from each, one result. Knows no launcher.

From a fault in a rank to the error of the step, the ranks that hang in a collective notwithstanding:

    the process died               under 1 s
    the rank raised                AFTERMATH_S more than the rank took to say so
    the rank stands still          step_timeout_s + AFTERMATH_S, or 15 s + AFTERMATH_S if that is less: the link's
                                   keepalive (workers/channel.py) asks in steps and between them
    ranks committed different      as soon as all have answered
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from parallel.mesh import Mesh
from runtime.cluster.agreement import check_ranks, merge_reports
from runtime.cluster.inquest import Inquest
from workers import wire
from workers.client import WorkerClient
from workers.deadline import running_alarm
from workers.demands import Constraint
from workers.plan import RankReport, RanksDisagree, StepPlan, StepResult, StepTimeout


class GroupLink:
    """A `runtime.link.StepLink` over the links of all ranks, in rank order.

    inquest: of the life the ranks are in; a failed step is bad news for it, and its verdict is the step's error.
    checks: whether what ranks committed and joined is compared before a result is handed on.
    """

    def __init__(
        self, mesh: Mesh, clients: Sequence[WorkerClient], inquest: Inquest, *, step_timeout_s: float, checks: bool
    ) -> None:
        self._mesh = mesh
        self._clients = tuple(clients)
        self._inquest = inquest
        self._step_timeout_s = step_timeout_s
        self._checks = checks
        self._answering = asyncio.Lock()  # fair: steps in flight are waited for in order

    async def execute(self, plan: StepPlan) -> StepResult:
        """One step of all ranks. Calls may overlap; results come in the order of the calls.

        The first failure ends the step, whatever the other ranks do; the error names the rank at fault. Raises
        StepTimeout when a report is missing after the step timeout (counted from the result before it, without the time
        in which this event loop stood still), RanksDisagree, StalePlan, CollectiveFailed or WorkerLost. All of them end
        the group, and so does a cancelled call.
        """
        assert len(plan.batches) == self._mesh.dp, "one batch per data-parallel rank"
        if self._inquest.verdict.done():
            await self._inquest.fail()
        encoded = wire.encode_plan(plan)
        calls = [asyncio.create_task(client.execute(plan, encoded)) for client in self._clients]
        try:
            async with self._answering:
                with running_alarm(self._step_timeout_s, lambda: self._be_late(plan, calls)):
                    reports = await self._inquest.together(calls)
        finally:
            for call in calls:
                call.cancel()
        if self._checks:
            try:
                check_ranks(self._mesh, plan, reports)
            except RanksDisagree as error:
                self._inquest.hear(None, error)
                raise
        return merge_reports(self._mesh, reports)

    async def check_integrity(self) -> list[list[str]]:
        """Violated invariants of every rank's pools, in rank order. Raises WorkerLost when a rank cannot say."""
        return await asyncio.gather(*(client.check_integrity() for client in self._clients))

    async def prepare(self, constraint: Constraint) -> str:
        """Has the ranks that decide, one per data-parallel rank, make a constraint ready, beside the steps. Returns why
        it cannot be followed, "" where it can. Raises WorkerError when a rank cannot say."""
        deciding = [client for rank, client in enumerate(self._clients) if self._mesh.leads(rank)]
        problems = await asyncio.gather(*(client.prepare(constraint) for client in deciding))
        return next(filter(None, problems), "")

    def _be_late(self, plan: StepPlan, calls: Sequence[asyncio.Task[RankReport]]) -> None:
        error = StepTimeout(f"step {plan.step_id} has no result after {self._step_timeout_s:g} s")
        for rank, call in enumerate(calls):
            if not call.done():
                self._inquest.hear(rank, error)
