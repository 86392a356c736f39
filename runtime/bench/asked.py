"""What a benchmark was asked to do: values alone, checked by whoever reads them from a command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.bench.extras import Variant
from runtime.bench.load import Closed, Load, Policy, Share, Slot, schedule
from runtime.bench.workload import Workload

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
    records: outputs are recorded before all cells, decoded plainly, and those of the cells compared.
    edit_every: what was recorded is edited behind every so many tokens on average, 0 for nowhere, and sent as a
        prediction; None sends those that prompts have.
    fits_load: where `requests` is None, each load has its own concurrency's, at least 8, or 16 where it is an open one.
    warmup: requests before a cell, which do not count. Before a first repeat as many run as in the cell: they report
        their rounds, and warm up for it too.
    seed: of arrivals, random prompts, edits and sampling; request i samples with seed + i.
    """

    settings: ServeSettings | None
    workload: Workload
    prompts: Path | None
    tokenizer: Path | None
    prompt_tokens: int | None
    max_tokens: int
    ignore_eos: bool
    requests: int | None
    loads: tuple[Load | Share, ...]
    policies: tuple[Policy, ...]
    warmup: int
    repeats: int
    seed: int
    temperature: float
    limits: Limits
    records: bool = False
    edit_every: int | None = None
    fits_load: bool = False

    def at_rate(self, rate: float) -> Asked:
        """With shares of plain decoding's rate, requests per second, as rates."""
        loads = [load.of(rate) if isinstance(load, Share) else load for load in self.loads]
        return replace(self, loads=tuple(dict.fromkeys(loads)))

    def slots(self) -> list[Slot]:
        """Cells in the order in which they are measured. Shares must have been made rates."""
        loads = [load for load in self.loads if not isinstance(load, Share)]
        assert len(loads) == len(self.loads), "a share of a rate that is not known"
        return schedule(loads, self.policies, self.repeats)

    @property
    def variants(self) -> list[Variant]:
        """Those that are told apart, in order."""
        return list(dict.fromkeys(load.variant for load in self.loads if load.variant is not None))

    @property
    def num_cells(self) -> int:
        return len(self.loads) * len(self.policies) * self.repeats

    def requests_of(self, load: Load | Share) -> int:
        """Of a cell under a load."""
        if self.requests is not None or not self.fits_load:
            return self.requests_per_cell
        return max(LEAST_REQUESTS, load.concurrency) if isinstance(load, Closed) else OPEN_REQUESTS

    @property
    def requests_per_cell(self) -> int:
        """The most of any load; the same for all, so that all are measured over the same prompts, unless they are to
        fit the loads."""
        if self.requests is not None:
            return self.requests
        concurrencies = [load.concurrency for load in self.loads if isinstance(load, Closed)]
        return max(LEAST_REQUESTS, *concurrencies) if concurrencies else OPEN_REQUESTS

    @property
    def most_requests(self) -> int:
        """Of a cell or its warm-up: more prompts are never sent."""
        return max(self.warmup, self.requests_per_cell)

    @property
    def total_requests(self) -> int:
        """Of all cells, those before them included."""
        per_load = [
            self.requests_of(load) * (self.repeats + 1) + self.warmup * (self.repeats - 1) for load in self.loads
        ]
        return sum(per_load) * len(self.policies)

    @property
    def recording_concurrency(self) -> int:
        """At which outputs are recorded: that of the largest closed loop."""
        return max((load.concurrency for load in self.loads if isinstance(load, Closed)), default=LEAST_REQUESTS)
