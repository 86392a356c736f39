"""How requests come: so many at a time, or so many a second; and in what order cells are measured. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from configs.load import SettingsError

MAX_CONCURRENCY = 4096
MAX_RATE = 10_000.0
"""Past these a Python client measures itself."""
MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Closed:
    """A fixed number of clients, each of which sends its next request when the last one has ended."""

    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} at a time"


@dataclass(frozen=True, slots=True)
class Open:
    """Requests arrive by themselves, `rate` a second on average, however long the earlier ones take."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g}/s"


Load = Closed | Open


@dataclass(frozen=True, slots=True)
class Policy:
    """gamma: drafts per round; None is off."""

    gamma: int | None

    def __str__(self) -> str:
        return "off" if self.gamma is None else f"fixed:{self.gamma}"

    @property
    def num_drafts(self) -> int:
        return self.gamma or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A cell to be measured: one policy under one load, once."""

    repeat: int
    load: Load
    policy: Policy


def schedule(loads: Sequence[Load], policies: Sequence[Policy], repeats: int) -> list[Slot]:
    """Repeats outside, policies inside, so that a noisy minute meets all policies. Each repeat begins with the next
    policy, so that none is always the first after a change of load."""
    return [
        Slot(repeat=repeat, load=load, policy=policies[(turn + repeat) % len(policies)])
        for repeat, load, turn in itertools.product(range(repeats), loads, range(len(policies)))
    ]


def poisson_arrivals(rate: float, number: int, seed: int) -> list[float]:
    """Seconds from the start at which requests are due, rising: gaps are exponential with mean 1/rate, the first one
    before the first request. The same for the same seed."""
    source = random.Random(seed)
    return list(itertools.accumulate(source.expovariate(rate) for _ in range(number)))


def parse_policies(texts: Sequence[str]) -> list[Policy]:
    """`off` and `fixed:N`, apart or in lists with commas; a repeated one counts once. Raises SettingsError."""
    return list(dict.fromkeys(_policy(text) for text in _parts(texts)))


def _policy(text: str) -> Policy:
    kind, _, gamma = text.partition(":")
    if text == "off":
        return Policy(None)
    if kind == "fixed" and _is_number(gamma):
        return Policy(int(gamma))
    raise SettingsError(f"--policy {text!r}: not off or fixed:N, as in fixed:4")


def parse_concurrencies(texts: Sequence[str]) -> list[Closed]:
    """Whole numbers from 1, apart or in lists with commas. Raises SettingsError."""
    found = []
    for text in _parts(texts):
        if not (_is_number(text) and 1 <= int(text) <= MAX_CONCURRENCY):
            raise SettingsError(f"--concurrency {text!r}: give whole numbers from 1 to {MAX_CONCURRENCY}, as in 1,4,16")
        found.append(Closed(int(text)))
    return list(dict.fromkeys(found))


def parse_rates(texts: Sequence[str]) -> list[Open]:
    """Requests per second, apart or in lists with commas. Raises SettingsError."""
    found = []
    for text in _parts(texts):
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not 0 < rate <= MAX_RATE:
            raise SettingsError(f"--rate {text!r}: give requests per second, above 0 and up to {MAX_RATE:g}, as 0.5,2")
        found.append(Open(rate))
    rates = list(dict.fromkeys(found))
    by_text: dict[str, Open] = {}
    for one in rates:
        other = by_text.setdefault(str(one), one)
        if other != one:
            raise SettingsError(
                f"--rate: {other.rate!r} and {one.rate!r} would both be reported as {one}; give rates that differ in "
                "their first six digits"
            )
    return rates


def _is_number(text: str) -> bool:
    """Whether it is a whole number of a length that makes sense."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _parts(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]
