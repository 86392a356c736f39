"""What a benchmark was asked to do: values alone, checked by whoever reads them from a command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from runtime.bench.load import Closed, Load, Policy, Slot, schedule

if TYPE_CHECKING:
    from configs.schema import ServeSettings
    from runtime.bench.document import Limits

LEAST_REQUESTS = 8
OPEN_REQUESTS = 16
"""Where all loads are open ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One benchmark.

    settings: of a server of its own; None measures a running one.
    prompts: a file in place of the workload. tokenizer: directory of a running server's, for random prompts.
    prompt_tokens: prompts are cut to it; random ones have it as their length.
    requests: per cell; None takes the largest concurrency, at least 8, or 16 where all loads are open ones.
    warmup: requests before a cell, which do not count. Before a first repeat as many run as in the cell: they report
        their rounds, and warm up for it too.
    seed: of arrivals, random prompts and sampling; request i samples with seed + i.
    """

    settings: ServeSettings | None
    workload: Literal["code", "random"]
    prompts: Path | None
    tokenizer: Path | None
    prompt_tokens: int | None
    max_tokens: int
    ignore_eos: bool
    requests: int | None
    loads: tuple[Load, ...]
    policies: tuple[Policy, ...]
    warmup: int
    repeats: int
    seed: int
    temperature: float
    limits: Limits

    def slots(self) -> list[Slot]:
        """Cells in the order in which they are measured."""
        return schedule(self.loads, self.policies, self.repeats)

    @property
    def requests_per_cell(self) -> int:
        """The same for all loads, so that all are measured over the same prompts."""
        if self.requests is not None:
            return self.requests
        concurrencies = [load.concurrency for load in self.loads if isinstance(load, Closed)]
        return max(LEAST_REQUESTS, *concurrencies) if concurrencies else OPEN_REQUESTS

    @property
    def most_requests(self) -> int:
        """Of a cell or its warm-up: more prompts are never sent."""
        return max(self.warmup, self.requests_per_cell)

    def before_of(self, slot: Slot) -> int:
        """Requests that run before a cell."""
        return self.warmup if slot.repeat else self.requests_per_cell

    @property
    def total_requests(self) -> int:
        """Of all cells, those before them included."""
        return sum(self.requests_per_cell + self.before_of(slot) for slot in self.slots())
