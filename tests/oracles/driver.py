"""Drives a rank with plans, without a scheduler: sequences in slots, pages dealt at random, steps on demand.

Everything the rank could read by mistake is NaN: pages nobody owns, slots nobody holds. Every step's admission is held
against `admit` on the confidences that waited, and its scores and acceptance against what must be true of them
whatever the model. Test material only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from workers.draft.admit import admit
from workers.draft.confidence import SCORE_LIMIT
from workers.plan import (
    IDENTITY,
    VERIFY_EVERYTHING,
    BatchPlan,
    BatchResult,
    Calibration,
    NewSequence,
    RankEnd,
    StepPlan,
)
from workers.step import Worker

Admission = tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]
"""How many drafts of each sequence a plan admits, and the scores of those that it names."""


@dataclass(slots=True, kw_only=True)
class Live:
    """A sequence as the host sees it. `waiting`: drafts that wait in the rank. `unfed`: rows that its drafter
    has not seen, at most. `cap`: drafts that are verified of it, at most."""

    slot: int
    epoch: int
    prompt: list[int]
    tables: tuple[tuple[int, ...], ...]
    max_tokens: int
    fed: int = 0
    out: list[int] = field(default_factory=list)
    waiting: int = 0
    cap: int = 10**6
    unfed: int = 0
    finished: bool = False
    results: list[tuple[int, int]] = field(default_factory=list)
    """(drafts, accepted) of every round."""
    end: RankEnd = RankEnd.NONE
    num_forbidden: int = 0

    @property
    def decoding(self) -> bool:
        return self.fed == len(self.prompt)

    @property
    def committed(self) -> int:
        return len(self.prompt) + len(self.out) - 1 if self.decoding else self.fed


class Driver:
    """Takes over the whole rank: whoever held a slot before leaves in its first step.

    peers: ranks that share its sequences, which `GroupDriver` has."""

    def __init__(self, worker: Worker, *, seed: int = 0, poison: bool = True, peers: Sequence[Worker] = ()) -> None:
        self.worker = worker
        self.ranks = (worker, *peers)
        self.rng = random.Random(seed)
        self.step_id = max(worker._last_step, 0)
        self.next_epoch = 1 + max(worker._epochs)
        pools = worker.rank.pools
        self.free_slots = list(range(1, pools.sizes.num_slots + 1))
        self.free_pages = {
            group: list(range(1, n + 1)) for group, n in zip(pools.tables, pools.sizes.num_pages, strict=True)
        }
        self.new: list[NewSequence] = []
        self.left: list[int] = list(self.free_slots)
        self.live: list[Live] = []
        if poison:
            self.poison()

    def poison(self) -> None:
        """NaN wherever no sequence lives."""
        for rank in self.ranks:
            pools = rank.rank.pools
            size = pools.sizes.page_size
            for kv in pools.kv.values():
                kv[:, size:] = float("nan")
            for pool in (*pools.conv, *pools.delta):
                pool.committed[:, 1:] = float("nan")
            for register in (pools.hidden_window, pools.draft_law, pools.score, pools.confidence):
                register[1:] = float("nan")

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        coupled: bool = True,
        stop_token_ids: Sequence[int] = (),
        **demands: Any,
    ) -> Live:
        """demands: other fields of the sequence."""
        pools = self.worker.rank.pools
        need = -(-(len(prompt) + max_tokens + pools.sizes.gamma_max + 1) // pools.sizes.page_size)
        tables = []
        for pages in self.free_pages.values():
            self.rng.shuffle(pages)
            tables.append(tuple(pages.pop() for _ in range(need)))
        slot = self.free_slots.pop(self.rng.randrange(len(self.free_slots)))
        live = Live(slot=slot, epoch=self.next_epoch, prompt=list(prompt), tables=tuple(tables), max_tokens=max_tokens)
        self.next_epoch += 1
        self.new.append(
            NewSequence(
                slot=slot,
                epoch=live.epoch,
                uid=live.epoch,
                prompt=tuple(prompt),
                tables=live.tables,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                coupled=coupled,
                stop_token_ids=tuple(stop_token_ids),
                max_tokens=max_tokens,
                **demands,
            )
        )
        self.live.append(live)
        return live

    def remove(self, live: Live) -> None:
        """Frees slot and pages; what the pages hold becomes NaN."""
        self.live.remove(live)
        self.new = [new for new in self.new if new.epoch != live.epoch]  # it may not have entered yet
        self.left.append(live.slot)
        self.free_slots.append(live.slot)
        for rank in self.ranks:
            pools = rank.rank.pools
            for group, pages in zip(self.free_pages, live.tables, strict=True):
                size = pools.sizes.page_size
                rows = torch.cat([torch.arange(p * size, (p + 1) * size) for p in pages])
                for layer, specs in enumerate(pools.layout.layers):
                    if layer in pools.kv and specs[0].group == group:  # type: ignore[union-attr]
                        pools.kv[layer][:, rows] = float("nan")
        for free, pages in zip(self.free_pages.values(), live.tables, strict=True):
            free.extend(pages)

    def plan_batch(
        self,
        members: Sequence[Live],
        *,
        feeds: bool,
        chunks: dict[int, int] | None = None,
        budget: int = VERIFY_EVERYTHING,
        forced: int = 0,
        slack: int = 0,
    ) -> BatchPlan:
        """A step of `members`. chunks: prompt tokens by slot (default: all left); forced: drafts of each that are
        verified whatever their confidence; slack loosens max_committed."""
        known, drafts = [], []
        for live in members:
            left = len(live.prompt) - live.fed
            known.append(1 if live.decoding else min((chunks or {}).get(live.slot, left), left))
            drafts.append(min(live.waiting, live.cap) if live.decoding else 0)
        batch = BatchPlan(
            admitted=tuple(self.new),
            released_slots=tuple(self.left),
            slots=tuple(live.slot for live in members),
            epochs=tuple(live.epoch for live in members),
            num_known=tuple(known),
            num_drafts=tuple(drafts),
            num_forced=tuple(min(count, forced) for count in drafts) if forced else (),
            samples=tuple(
                live.decoding or live.fed + k == len(live.prompt) for live, k in zip(members, known, strict=True)
            ),
            max_committed=tuple(live.committed + (slack if live.decoding else 0) for live in members),
            num_unfed=tuple(live.unfed for live in members),
            verify_budget=budget,
        )
        for live, num_known, num_drafts in zip(members, known, batch.num_drafts, strict=True):
            live.unfed = 0 if feeds else live.unfed + num_known + num_drafts
        for constraint in {new.constraint for new in self.new if new.constraint is not None}:
            for rank in self.ranks:
                rank.prepare(constraint)
        self.new, self.left = [], []
        return batch

    def plan(
        self,
        members: Sequence[Live],
        *,
        gamma: int = 0,
        chunks: dict[int, int] | None = None,
        feed: bool | None = None,
        budget: int = VERIFY_EVERYTHING,
        forced: int = 0,
        floor: float = 0.0,
        slack: int = 0,
        margins: bool = False,
        calibration: Calibration = IDENTITY,
    ) -> StepPlan:
        """`plan_batch`, as the whole step of a rank alone."""
        feeds = gamma > 0 if feed is None else feed
        self.step_id += 1
        batch = self.plan_batch(members, feeds=feeds, chunks=chunks, budget=budget, forced=forced, slack=slack)
        return StepPlan(
            step_id=self.step_id,
            epoch=1,
            batches=(batch,),
            gamma=gamma,
            feed_drafter=feeds,
            report_margins=margins,
            calibration=calibration,
            min_survival=floor,
        )

    def step(self, members: Sequence[Live] | None = None, **how: object) -> BatchResult:
        """Plans and executes one step, and takes in its result."""
        members = self.unfinished if members is None else members
        plan = self.plan(members, **how)  # type: ignore[arg-type]
        (batch,) = plan.batches
        admission = self.admission(batch, plan.min_survival)
        result = self.worker.execute(plan).batch
        assert result is not None
        self.take(members, batch, result, gamma=plan.gamma, admission=admission)
        return result

    def take(
        self,
        members: Sequence[Live],
        batch: BatchPlan,
        result: BatchResult,
        *,
        gamma: int,
        admission: Admission,
    ) -> None:
        """Books a step. admission: what was said before it."""
        admitted, scores = admission
        assert result.num_admitted == admitted, f"{result.num_admitted} admitted, {admitted} expected"
        assert result.scores == scores, f"scores {result.scores}, {scores} expected"
        assert all(abs(score) <= SCORE_LIMIT for row in scores for score in row)
        for i, shares in enumerate(result.acceptance):
            self._check_acceptance(members[i], shares, result.num_admitted[i], result.num_accepted[i])
        for i, live in enumerate(members):
            if live.decoding:
                live.results.append((result.num_admitted[i], result.num_accepted[i]))
            else:
                live.fed += batch.num_known[i]
            live.out += result.emitted[i]
            if batch.samples[i]:
                live.waiting = gamma
            live.finished = len(live.out) >= live.max_tokens or bool(
                live.out and live.out[-1] in self.worker.rank.registers.stop_ids[live.slot].tolist()
            )
            if result.ends and result.ends[i]:
                live.end, live.finished = result.ends[i], True
            live.num_forbidden += result.num_forbidden[i] if result.num_forbidden else 0

    @property
    def unfinished(self) -> list[Live]:
        return [live for live in self.live if not live.finished]

    def admission(self, plan: BatchPlan, floor: float) -> Admission:
        """What a plan admits by the confidences that wait in the rank, and the scores that it is to report."""
        pools = self.worker.rank.pools
        num_drafts_B, uid_B = np.array(plan.num_drafts, np.int64), np.array(plan.epochs, np.int64)
        num_forced_B = np.array(plan.num_forced or [0] * len(plan.slots), np.int64)
        confidence_BG = pools.confidence[list(plan.slots)].numpy()
        admitted = admit(confidence_BG, num_drafts_B, uid_B, plan.verify_budget, num_forced_B, floor)
        scores = pools.score[list(plan.slots)].tolist()
        return tuple(admitted.tolist()), tuple(
            tuple(row[:count]) for row, count in zip(scores, plan.num_drafts, strict=True)
        )

    def _check_acceptance(self, live: Live, shares: Sequence[float], num_admitted: int, num_accepted: int) -> None:
        """A draft that stood could stand, one that is sure to stand did; both are certain unless tokens are drawn."""
        assert len(shares) == min(num_accepted + 1, num_admitted)
        if self.worker.rank.registers.modes([live.slot]).any_standard:
            assert all(0 < share <= 1 for share in shares[:num_accepted])
            assert all(0 <= share < 1 for share in shares[num_accepted:])
        else:
            assert list(shares) == [j < num_accepted for j in range(len(shares))]

    def run(self, gamma: int = 0, **how: object) -> None:
        """Steps until every sequence has finished."""
        while any(not live.finished for live in self.live):
            self.step(gamma=gamma, **how)
