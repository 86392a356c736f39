"""Which requests come to a simulated deployment, and when. Knows no policy and no ranks.

Request n is the same for one seed whatever else is simulated: its lengths depend on the seed and on n alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from runtime.request import Request, SamplingParams, StopParams
from runtime.simulate.ranks import TOKEN


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from `low` to `high`, each as likely. Raises ValueError where there is none."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths from {self.low} to {self.high}: give one from 1, or two that rise, as in 64-256")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """sequences: on each data-parallel rank, at most. rate: requests per second of the deployment, Poisson; None keeps
    that many sequences running, a new one for each that ends.
    prompt, output: tokens that ranks compute, and that they emit.
    temperature: of all requests; 0 is greedy.
    requests: that come in all; None: they never end.
    staggered: the first sequences of a closed loop are met midway, as if they had run before; else all begin at once.

    Raises ValueError, which names the field.
    """

    sequences: int
    rate: float | None = None
    prompt: Lengths = Lengths(1, 1)
    output: Lengths = Lengths(256, 256)
    temperature: float = 1.0
    requests: int | None = None
    staggered: bool = True

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences is {self.sequences}: give 1 or more per data-parallel rank")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"requests is {self.requests}: give 1 or more")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"rate is {self.rate:g}: give requests per second, above 0")

        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature:g}: give a number from 0")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt.high + self.output.high


class Arrivals:
    """The requests of one simulation, in order. dp: data-parallel ranks."""

    def __init__(self, traffic: Traffic, *, dp: int, seed: int) -> None:
        self._traffic, self._seed = traffic, seed
        self._num_closed = traffic.sequences * dp
        self._num_left = math.inf if traffic.requests is None else traffic.requests
        self._gaps = np.random.default_rng((seed, 1))
        self._due_s = 0.0
        self._draw_gap()

    def due(self, now_s: float, num_live: int) -> int:
        """Requests that have come by now and were not due before; num_live: of those before, what has not ended."""
        number = self._num_closed - num_live if self._traffic.rate is None else 0
        while self._traffic.rate is not None and self._due_s <= now_s:
            number += 1
            self._draw_gap()
        number = int(min(number, self._num_left))
        self._num_left -= number
        return number

    @property
    def next_s(self) -> float | None:
        """When the next one of an open loop comes; None where none is to come any more."""
        return self._due_s if self._num_left and self._traffic.rate is not None else None

    def request(self, uid: int) -> Request:
        """uid: its number, from 1."""
        traffic, generator = self._traffic, np.random.default_rng((self._seed, 2, uid))
        prompt, output = traffic.prompt.draw(generator), traffic.output.draw(generator)
        if traffic.rate is None and traffic.staggered and uid <= self._num_closed:
            output = max(1, math.ceil(output * generator.random()))
        return Request(
            uid=uid,
            request_id=str(uid),
            prompt=(TOKEN,) * prompt,
            sampling=SamplingParams(temperature=traffic.temperature, seed=uid),
            stopping=StopParams(max_tokens=output),
        )

    def _draw_gap(self) -> None:
        if self._traffic.rate is not None:
            self._due_s += float(self._gaps.exponential(1 / self._traffic.rate))
