"""Groups of ranks as threads of one process: real workers with real gloo groups between them. Test material only.

Fast enough for many layouts, and every rank can be looked into. Processes, links and launchers have tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed

from configs.load import demo_checkpoint
from configs.schema import CacheSettings, ModelSettings, ParallelSettings, SpeculationSettings, WorkerSettings
from parallel.mesh import Mesh
from parallel.rendezvous import Carrier, RankGroups, alone, join_groups
from workers import loading
from workers.plan import RankReport, StepPlan, StepResult
from workers.step import Worker

T = TypeVar("T")
c10d: Any = torch.distributed

TIMEOUT_S = 60.0


def on_ranks(mesh: Mesh, work: Callable[[int, RankGroups], T], *, carrier: Carrier = "gloo") -> list[T]:
    """Runs `work(rank, groups)` for every rank at once, each in a thread; results in rank order. With NCCL a rank is
    on the GPU of its number."""
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=TIMEOUT_S))

    def run(rank: int) -> T:
        if mesh.size == 1:
            return work(0, alone())
        if carrier == "nccl":
            torch.cuda.set_device(rank)
        groups = join_groups(mesh, rank, store, carrier=carrier, bind_host="127.0.0.1", timeout_s=TIMEOUT_S)
        return work(rank, groups)

    with ThreadPoolExecutor(mesh.size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(mesh.size)]]


class GroupOfWorkers:
    """A loaded group. `execute` runs a plan on all ranks and puts their reports together.

    reports: of the last step, in rank order.
    """

    def __init__(self, mesh: Mesh, workers: Sequence[Worker]) -> None:
        self.mesh, self.workers = mesh, list(workers)
        self.reports: list[RankReport] = []
        self._pool = ThreadPoolExecutor(mesh.size)

    @classmethod
    def load(
        cls,
        mesh: Mesh,
        path: Path | None = None,
        *,
        numerics: str = "default",
        max_running: int = 8,
        max_model_len: int = 256,
        page_size: int = 16,
        hidden_window: int = 16,
        k_slices: int = 2,
        confidence: str = "auto",
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> GroupOfWorkers:
        settings = WorkerSettings(
            model=ModelSettings(path=path or demo_checkpoint(), numerics=numerics, device=device, k_slices=k_slices),  # type: ignore[arg-type]
            cache=CacheSettings(
                memory_mib=256, page_size=page_size, max_running=max_running, max_model_len=max_model_len
            ),
            speculation=SpeculationSettings(hidden_window=hidden_window, confidence=confidence),  # type: ignore[arg-type]
            parallel=ParallelSettings(dp=mesh.dp, tp=mesh.tp, ep=mesh.ep),
            max_step_tokens=512,
            threads=1,
        )
        carrier: Carrier = "nccl" if device == "cuda" else "gloo"
        workers = on_ranks(mesh, lambda rank, groups: load_in_thread(settings, rank, groups), carrier=carrier)
        return cls(mesh, workers)

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises what the first failing rank raises."""
        futures = [self._pool.submit(worker.execute, plan) for worker in self.workers]
        self.reports = [future.result() for future in futures]
        batches = [self.reports[rank].batch for rank in self.mesh.leaders()]
        assert all((report.batch is not None) == self.mesh.leads(r) for r, report in enumerate(self.reports))
        for rank, report in enumerate(self.reports):
            peers = self.mesh.tp_ranks(rank)
            assert report.digests == self.reports[peers[0]].digests, f"ranks {peers} hold different tokens"
        counts: dict[str, set[tuple[int, int]]] = {}
        for report in self.reports:
            for tally in report.collectives:
                counts.setdefault(tally.group, set()).add((tally.count, tally.digest))
        assert all(len(seen) == 1 for seen in counts.values()), f"collectives differ: {counts}"
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            batches=tuple(batch for batch in batches if batch is not None),
            timings=tuple(report.timings for report in self.reports),
        )

    def close(self) -> None:
        self._pool.shutdown()


def load_in_thread(settings: WorkerSettings, rank: int, groups: RankGroups) -> Worker:
    """Loads a rank whose groups exist already."""
    seat = settings.seat.model_copy(update={"rank": rank})
    return Worker(
        loading.load_rank(settings.model_copy(update={"seat": seat}), lambda *_: None, meet=lambda *_: groups)
    )
