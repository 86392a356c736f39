"""What a simulated policy brought, summed step by step. Knows no request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.simulate.ranks import Composition
from workers.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One policy under one load. Steps of the warm-up count nowhere.

    seconds: of virtual time; busy_s of it in steps. tokens: emitted. tokens_per_s: of the deployment.
    sequences: that decode in a step, per data-parallel rank. tokens_per_step: of one sequence in one of its decodes.
    gamma: drafts drawn per sequence in a step, on average; budget: of the drafts that waited, the share verified.
    steps_by_gamma: from 0. rows: of the busiest rank's pass. token_ms: a sequence's time from token to token.
    gap_p50_ms, gap_p99_ms: from one delivery of a sequence to the next.
    """

    steps: int
    seconds: float
    busy_s: float
    tokens: int
    tokens_per_s: float
    tokens_per_s_per_rank: float
    step_ms: float
    sequences: float
    tokens_per_step: float
    gamma: float
    budget: float
    accepted: float
    steps_by_gamma: tuple[int, ...]
    rows: float
    token_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    explored_steps: int = 0


@dataclass(slots=True)
class Sums:
    """Running sums of a measurement that begins at `began_s`."""

    began_s: float
    dp: int
    _busy_s: list[float] = field(default_factory=list)
    _decodes: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _gammas: Counter[int] = field(default_factory=Counter)
    _tokens: int = 0
    _decoded: int = 0
    _waiting: int = 0
    _admitted: int = 0
    _accepted: int = 0

    def add(self, plan: StepPlan, result: StepResult, compositions: Sequence[Composition], step_s: float) -> None:
        """One step with sequences in it."""
        self._busy_s.append(step_s)
        self._decodes.append(sum(one.num_sequences for one in compositions))
        self._rows.append(max(one.rows for one in compositions))
        self._gammas[plan.gamma] += 1
        for batch, found in zip(plan.batches, result.batches, strict=True):
            emitted = [len(tokens) for tokens in found.emitted]
            self._tokens += sum(emitted)
            self._waiting += sum(batch.num_drafts)
            self._admitted += sum(found.num_admitted)
            self._accepted += sum(found.num_accepted)
        # A prompt's pass emits one token.
        prompts = sum(sum(batch.samples) for batch in plan.batches) - self._decodes[-1]
        self._decoded += sum(len(tokens) for found in result.batches for tokens in found.emitted) - prompts

    def view(self, now_s: float, *, explored_steps: int) -> Figures:
        """At least one step was added."""
        seconds, busy_s = now_s - self.began_s, np.array(self._busy_s)
        decodes = np.array(self._decodes)
        steps, passes = len(busy_s), max(1, int(decodes.sum()))
        order = np.argsort(busy_s)
        reached = np.cumsum(decodes[order]) / passes
        p50, p99 = (float(busy_s[order][np.searchsorted(reached, share).clip(max=steps - 1)]) for share in (0.5, 0.99))
        return Figures(
            steps=steps,
            seconds=seconds,
            busy_s=float(busy_s.sum()),
            tokens=self._tokens,
            tokens_per_s=self._tokens / seconds,
            tokens_per_s_per_rank=self._tokens / seconds / self.dp,
            step_ms=float(busy_s.mean()) * 1000,
            sequences=passes / steps / self.dp,
            tokens_per_step=self._decoded / passes,
            gamma=sum(gamma * number for gamma, number in self._gammas.items()) / steps,
            budget=self._admitted / self._waiting if self._waiting else 0.0,
            accepted=self._accepted / self._admitted if self._admitted else 0.0,
            steps_by_gamma=tuple(self._gammas[gamma] for gamma in range(max(self._gammas) + 1)),
            rows=float(np.mean(self._rows)),
            token_ms=float((busy_s * decodes).sum()) / max(1, self._decoded) * 1000,
            gap_p50_ms=p50 * 1000,
            gap_p99_ms=p99 * 1000,
            explored_steps=explored_steps,
        )
