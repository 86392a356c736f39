"""What deciding costs the host and admitting costs a rank, per step: medians over steps of a busy server.

A server's own planner under the dynamic policy, with a history as full as it gets, and `admit` on as many confidences,
in numpy and in torch. No model runs. Times of deciding are told apart by whether the step asks for a draft length anew.

    python docs/benchmarks/plan_cost.py [--requests 256] [--gamma 8] [--ranks 1] [--steps 400]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from configs.schema import SpeculationSettings
from runtime.request import Request, SamplingParams, StopParams
from runtime.settlement import Outcome
from runtime.verification.costs import CostCurve
from runtime.verification.policy import Dynamic, PolicyState, PolicyStore
from runtime.verification.policy_planner import PolicyPlanner
from runtime.verification.speculation import Load, Speculation, Traits
from runtime.verification.view import ProfileState, ProfileStatus
from workers.draft.admit import admit
from workers.draft.admit_on_device import admit_on_device
from workers.plan import BatchPlan, StepPlan, temperature_class

STATUS = ProfileStatus(state=ProfileState.OK, detail="costs by formula")


class FormulaCosts:
    """Rows that get dearer bit by bit: part of the drafts pays and part does not, which takes longest to decide."""

    def __init__(self, gamma_max: int) -> None:
        self.gamma_max = gamma_max
        self.tiers = ()

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        return self

    def step_ms(self, rows: NDArray[np.int64], *, waiting: int, gamma: int) -> NDArray[np.float64]:
        return 10 + 0.02 * rows + 2e-5 * rows.astype(np.float64) ** 2 + 0.2 * gamma


class Server:
    """Sequences that decode for ever; results are made up by lot."""

    def __init__(self, num_requests: int, gamma_max: int, num_ranks: int) -> None:
        store = PolicyStore(
            PolicyState(policy=Dynamic(), revision=1, effective_step=1), gamma_max=gamma_max, profile=lambda: STATUS
        )
        self.planner = PolicyPlanner(store, SpeculationSettings(), capacity=num_requests * num_ranks)
        self.planner.use_profile(FormulaCosts(gamma_max), STATUS)
        self.rng = np.random.default_rng(0)
        self.step_id = 0
        self.ranks = [
            [
                Request(
                    uid=rank * num_requests + i,
                    request_id=str(i),
                    prompt=(1,),
                    sampling=SamplingParams(temperature=float(self.rng.choice([0.0, 1.0]))),
                    stopping=StopParams(max_tokens=10**6),
                )
                for i in range(num_requests)
            ]
            for rank in range(num_ranks)
        ]
        self.waiting = 0

    def loads(self) -> list[Load]:
        return [
            Load(
                uids=tuple(request.uid for request in requests),
                traits=tuple(Traits(0, temperature_class(r.sampling.temperature), None) for r in requests),
                waiting=(self.waiting,) * len(requests),
                committed=(500,) * len(requests),
                left=(10**5,) * len(requests),
                max_rows=10**5,
            )
            for requests in self.ranks
        ]

    def step(self) -> tuple[float, float]:
        """Seconds of deciding and of learning."""
        self.step_id += 1
        loads = self.loads()
        began = time.perf_counter()
        decided = self.planner.decide(self.step_id, loads)
        decided_s = time.perf_counter() - began
        plan, rounds = self.result(decided)
        began = time.perf_counter()
        self.planner.learn(plan, rounds, measured_s=float(self.rng.uniform(0.03, 0.05)))
        self.planner.catch_up()
        learnt_s = time.perf_counter() - began
        self.waiting = decided.gamma
        return decided_s, learnt_s

    def result(self, decided: Speculation) -> tuple[StepPlan, list[tuple[Request, Outcome]]]:
        plan = StepPlan(
            step_id=self.step_id,
            epoch=1,
            batches=tuple(
                BatchPlan(
                    slots=tuple(range(len(requests))),
                    num_known=(1,) * len(requests),
                    num_drafts=(self.waiting,) * len(requests),
                    verify_budget=share.verify_budget,
                )
                for requests, share in zip(self.ranks, decided.batches, strict=True)
            ),
            gamma=decided.gamma,
        )
        return plan, [
            (request, self.outcome(rank, i))
            for rank, requests in enumerate(self.ranks)
            for i, request in enumerate(requests)
        ]

    def outcome(self, rank: int, i: int) -> Outcome:
        shares = self.rng.uniform(0.3, 1.0, self.waiting)
        accepted = int((self.rng.random(self.waiting) < shares).cumprod().sum())
        return Outcome(
            dp_rank=rank,
            slot=i,
            epoch=1,
            num_known=1,
            num_drafts=self.waiting,
            samples=True,
            drafted=(7,) * self.waiting,
            num_admitted=self.waiting,
            num_accepted=accepted,
            emitted=(7,) * (accepted + 1),
            scores=tuple(np.log(shares / (1.001 - shares)).tolist()),
            acceptance=tuple(shares[: accepted + 1].tolist()),
        )


def median_ms(act: Callable[[], object], count: int) -> float:
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        act()
        spent.append(time.perf_counter() - began)
    return median(spent) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="per data-parallel rank")
    parser.add_argument("--gamma", type=int, default=8, help="longest draft")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    server = Server(args.requests, args.gamma, args.ranks)
    for _ in range(40):  # fills the book of survivals
        server.step()
    times = np.array([server.step() for _ in range(args.steps)]) * 1000
    rng = np.random.default_rng(0)
    confidence_BG = rng.uniform(0.3, 1.0, (args.requests, args.gamma)).astype(np.float32)
    num_drafts_B, uid_B = np.full(args.requests, args.gamma), np.arange(args.requests)
    budget = args.requests * args.gamma // 2
    on_host = median_ms(lambda: admit(confidence_BG, num_drafts_B, uid_B, budget), args.steps)
    tensors = [torch.from_numpy(array) for array in (confidence_BG, num_drafts_B, uid_B)]
    on_rank = median_ms(lambda: admit_on_device(*tensors, budget), args.steps)
    decide_ms = float(np.median(times[:, 0]))
    table = Table(title=f"{args.ranks} x {args.requests} requests, drafts up to {args.gamma}: milliseconds")
    for column in ("what", "median", "p99"):
        table.add_column(column)
    table.add_row("decide", f"{decide_ms:.3f}", f"{np.percentile(times[:, 0], 99):.3f}")
    table.add_row("admit (torch, CPU)", f"{on_rank:.3f}", "")
    table.add_row("admit (numpy)", f"{on_host:.3f}", "")
    table.add_row("decide and admit", f"{decide_ms + on_rank:.3f}", "")
    table.add_row("learn, after the step", f"{np.median(times[:, 1]):.3f}", f"{np.percentile(times[:, 1], 99):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
