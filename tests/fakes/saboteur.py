"""A real rank that fails when told to: at load, in a step, or inside a collective of a group.

Orders lie in a file, named by an environment variable that ranks inherit; whoever executes one takes it out, so that a
restarted rank is well again, unless several orders were given.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.schema import WorkerSettings
from workers.demands import Constraint
from workers.plan import Progress, RankReport, StepPlan
from workers.step import Worker

FACTORY = "fakes.saboteur:load"
ORDERS = "OUTRIDER_TEST_ORDERS"

DEATH_CRY = "the saboteur was here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """where: load, step or collective. how: kill, stop, raise, tokens (another token than the leader's goes to the
    log), order (one more collective is counted than was joined). after: how many steps or collectives are spared."""

    rank: int
    where: str
    how: str
    after: int = 0


def give(path: Path, *orders: Order) -> None:
    """Replaces the orders; they are executed one by one, in order."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps([asdict(order) for order in orders]))
    new.rename(path)


def struck_at(path: Path) -> float:
    """When the last order was executed, on the clock that all processes of a machine share."""
    return float(path.with_suffix(".struck").read_text())


def pending(path: Path) -> list[Order]:
    return [Order(**fields) for fields in json.loads(path.read_text())] if path.exists() else []


class Saboteur:
    """Looks for an order that is due at one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._path = Path(os.environ[ORDERS])
        self._seen = 0

    def due(self, where: str, *kinds: str) -> Order | None:
        """The next order, taken out, if it is for this rank, this place and one of these kinds, and due."""
        orders = pending(self._path)
        if not orders:
            return None
        first = orders[0]
        if (first.rank, first.where) != (self._rank, where) or first.how not in kinds:
            return None
        self._seen += 1
        if self._seen <= first.after:
            return None
        self._seen = 0
        self._path.with_suffix(".struck").write_text(repr(time.monotonic()))
        give(self._path, *orders[1:])
        return first

    def strike(self, where: str) -> None:
        """Ends this rank, or its step, if that is due."""
        order = self.due(where, "kill", "stop", "raise")
        if order is None:
            return
        if order.how == "raise":
            raise RuntimeError(DEATH_CRY)
        os.write(2, f"{DEATH_CRY}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL if order.how == "kill" else signal.SIGSTOP)


class SabotagedWorker:
    """A `workers.server.WorkerLike` around a real rank."""

    def __init__(self, worker: Worker, saboteur: Saboteur) -> None:
        self.description = worker.description
        self._worker, self._saboteur = worker, saboteur
        groups = worker.rank.groups
        for group in (groups.tp, groups.world):
            group._run = self._sabotaged(group._run)  # type: ignore[method-assign]
        self._broadcast = groups.tp.broadcast
        groups.tp.broadcast = self._misheard  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> RankReport:
        if plan.num_sequences:
            self._saboteur.strike("step")
        report = self._worker.execute(plan)
        if plan.num_sequences and self._saboteur.due("step", "order"):
            first, *others = report.collectives
            return RankReport(
                step_id=report.step_id,
                epoch=report.epoch,
                batch=report.batch,
                digests=report.digests,
                collectives=(type(first)(group=first.group, count=first.count + 1, digest=first.digest), *others),
                timings=report.timings,
            )
        return report

    def check_integrity(self) -> list[str]:
        return self._worker.check_integrity()

    def is_ready(self, constraint: Constraint) -> bool:
        return self._worker.is_ready(constraint)

    def prepare(self, constraint: Constraint) -> str:
        return self._worker.prepare(constraint)

    def _sabotaged(self, run: Callable[[str, Callable[[], Any]], None]) -> Callable[[str, Callable[[], Any]], None]:
        def sabotaged(kind: str, launch: Callable[[], Any]) -> None:
            self._saboteur.strike("collective")
            run(kind, launch)

        return sabotaged

    def _misheard(self, x: Tensor) -> Tensor:
        x = self._broadcast(x)
        if self._saboteur.due("step", "tokens"):
            x[0, 0] = (x[0, 0] + 1) % 7
        return x


def load(settings: WorkerSettings, progress: Progress) -> SabotagedWorker:
    saboteur = Saboteur(settings.seat.rank)

    def watched(stage: str, done: int, total: int) -> None:
        progress(stage, done, total)
        saboteur.strike("load")

    return SabotagedWorker(Worker.load(settings, watched), saboteur)
