"""How requests come: so many at a time, or so many a second; and in what order cells are measured. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from configs.load import SettingsError
from runtime.bench.extras import Variant

MAX_CONCURRENCY = 4096
MAX_RATE = 10_000.0
"""Past these a Python client measures itself."""
MIN_RATE = 1e-4
MAX_DIGITS = 9
MAX_SHARE = 100.0
OWN = "own"
"""Names the drafts of the checkpoint's own drafter among acceptances."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A fixed number of clients, each of which sends its next request when the last one has ended.

    acceptance: with which probability an oracle's drafts stand; None leaves drafting to the checkpoint's drafter.
    variant: what requests bring beside their prompts; None is all that those have, where nothing else is measured.
    """

    concurrency: int
    acceptance: float | None = None
    variant: Variant | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at a time{_kind(self.acceptance, self.variant)}"


@dataclass(frozen=True, slots=True)
class Open:
    """Requests arrive by themselves, `rate` a second on average, however long the earlier ones take. acceptance,
    variant: as in Closed."""

    rate: float
    acceptance: float | None = None
    variant: Variant | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s{_kind(self.acceptance, self.variant)}"


def _kind(acceptance: float | None, variant: Variant | None) -> str:
    oracle = "" if acceptance is None else f", α={acceptance:g}"
    return oracle if variant is None else f"{oracle}, {variant}"


@dataclass(frozen=True, slots=True)
class Share:
    """An open loop at a share of the rate that plain decoding reached when outputs were recorded."""

    share: float
    acceptance: float | None = None
    variant: Variant | None = None

    def __str__(self) -> str:
        return f"{self.share:g}x{_kind(self.acceptance, self.variant)}"

    def of(self, rate: float) -> Open:
        """The rate to three digits: more would say that it is known better than it is."""
        return Open(float(f"{self.share * rate:.3g}"), self.acceptance, self.variant)


Load = Closed | Open


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a dynamic policy keeps to: drafts per round, and the longest time between deliveries in milliseconds. None
    leaves it to the server."""

    gamma_min: int | None = None
    gamma_max: int | None = None
    itl_limit_ms: float | None = None

    def __str__(self) -> str:
        parts = (("min", self.gamma_min), ("max", self.gamma_max), ("itl", self.itl_limit_ms))
        return "".join(f":{name}={value:.12g}" for name, value in parts if value is not None)


@dataclass(frozen=True, slots=True)
class Policy:
    """gamma: drafts per round; None is off, or, with bounds, dynamic."""

    gamma: int | None
    dynamic: Bounds | None = None

    def __str__(self) -> str:
        if self.dynamic is not None:
            return f"dynamic{self.dynamic}"
        return "off" if self.gamma is None else f"fixed:{self.gamma}"

    @property
    def num_drafts(self) -> int | None:
        """Of every round; None where rounds differ."""
        return None if self.dynamic is not None else self.gamma or 0

    @property
    def least_gamma_max(self) -> int:
        """Drafts per round that a server must be able to make."""
        if self.dynamic is None:
            return self.gamma or 0
        return max(1, self.dynamic.gamma_min or 0, self.dynamic.gamma_max or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A cell to be measured: one policy under one load, once."""

    repeat: int
    load: Load
    policy: Policy


def schedule(loads: Sequence[Load], policies: Sequence[Policy], repeats: int) -> list[Slot]:
    """Repeats outside, policies inside, so that a noisy minute meets all policies. Each repeat begins with the next
    policy, so that none is always the first after a change of load. Loads of one acceptance come together, with all
    their repeats: a server that learns of drafts is not sent from one kind to another and back."""
    return [
        Slot(repeat=repeat, load=load, policy=policies[(turn + repeat) % len(policies)])
        for acceptance in dict.fromkeys(load.acceptance for load in loads)
        for repeat in range(repeats)
        for load in loads
        if load.acceptance == acceptance
        for turn in range(len(policies))
    ]


def poisson_arrivals(rate: float, number: int, seed: int) -> list[float]:
    """Seconds from the start at which requests are due, rising: gaps are exponential with mean 1/rate, the first one
    before the first request. The same for the same seed."""
    source = random.Random(seed)
    return list(itertools.accumulate(source.expovariate(rate) for _ in range(number)))


def parse_policies(texts: Sequence[str]) -> list[Policy]:
    """`off`, `fixed:N` and `dynamic` with any of its bounds, `dynamic:min=N:max=N:itl=MS`, apart or in lists with
    commas; a repeated one counts once. Raises SettingsError."""
    return list(dict.fromkeys(_policy(text) for text in _parts(texts)))


def _policy(text: str) -> Policy:
    kind, _, rest = text.partition(":")
    if text == "off":
        return Policy(None)
    if kind == "fixed" and _is_number(rest):
        return Policy(int(rest))
    if kind == "dynamic" and (text == kind or rest):
        return Policy(None, _bounds(text, rest))
    raise SettingsError(
        f"--policy {text!r}: not off, fixed:N or dynamic, as in fixed:4, dynamic or dynamic:min=1:max=4:itl=30"
    )


def _bounds(policy: str, text: str) -> Bounds:
    """text: of min=N, max=N and itl=MS those that are given, with colons between them."""
    found: dict[str, str] = {}
    for part in text.split(":") if text else ():
        name, _, value = part.partition("=")
        if name not in ("min", "max", "itl") or name in found:
            raise SettingsError(f"--policy {policy!r}: {part!r} is none of min=N, max=N and itl=MS, each once at most")
        found[name] = value
    lengths = {name: int(found[name]) for name in ("min", "max") if _is_number(found.get(name, ""))}
    for name in ("min", "max"):
        if name in found and name not in lengths:
            raise SettingsError(f"--policy {policy!r}: {name} is {found[name]!r}; give drafts per round, as {name}=2")
    if lengths.get("min", 0) > lengths.get("max", lengths.get("min", 0)):
        raise SettingsError(f"--policy {policy!r}: min is above max; lower the one or raise the other")
    return Bounds(
        gamma_min=lengths.get("min"),
        gamma_max=lengths.get("max"),
        itl_limit_ms=_milliseconds(policy, found["itl"]) if "itl" in found else None,
    )


def _milliseconds(policy: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise SettingsError(f"--policy {policy!r}: itl is {text!r}; give milliseconds above 0, as itl=30")
    return found


def parse_concurrencies(texts: Sequence[str]) -> list[Closed]:
    """Whole numbers from 1, apart or in lists with commas. Raises SettingsError."""
    found = []
    for text in _parts(texts):
        if not (_is_number(text) and 1 <= int(text) <= MAX_CONCURRENCY):
            raise SettingsError(f"--concurrency {text!r}: give whole numbers from 1 to {MAX_CONCURRENCY}, as in 1,4,16")
        found.append(Closed(int(text)))
    return list(dict.fromkeys(found))


def parse_rates(texts: Sequence[str], *, option: str = "--rate") -> list[Open]:
    """Requests per second, apart or in lists with commas. Raises SettingsError."""
    found = []
    for text in _parts(texts):
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not MIN_RATE <= rate <= MAX_RATE:
            raise SettingsError(
                f"{option} {text!r}: give requests per second, from {MIN_RATE:g} to {MAX_RATE:g}, as 0.5,2"
            )
        found.append(Open(rate))
    rates = list(dict.fromkeys(found))
    by_text: dict[str, Open] = {}
    for one in rates:
        other = by_text.setdefault(str(one), one)
        if other != one:
            raise SettingsError(
                f"{option}: {other.rate!r} and {one.rate!r} would both be reported as {one}; give rates that differ in "
                "their first six digits"
            )
    return rates


def parse_shares(texts: Sequence[str]) -> list[Open | Share]:
    """As `parse_rates`; those that end in x are shares of the rate of plain decoding. Raises SettingsError."""
    parts = _parts(texts)
    shares = [Share(_share(text)) for text in parts if text.endswith("x")]
    rates = [text for text in parts if not text.endswith("x")]
    return [*dict.fromkeys(shares), *(parse_rates(rates) if rates else ())]


def _share(text: str) -> float:
    try:
        found = float(text.removesuffix("x"))
    except ValueError:
        found = 0.0
    if not 0 < found <= MAX_SHARE:
        raise SettingsError(
            f"--rate {text!r}: give a share of plain decoding's rate, above 0 and up to {MAX_SHARE:g}, as 0.5x"
        )
    return found


def parse_acceptances(texts: Sequence[str]) -> list[float | None]:
    """Probabilities of an oracle's drafts to stand, and `own` for those of the checkpoint's drafter, None. Raises
    SettingsError."""
    found: list[float | None] = []
    for text in _parts(texts):
        try:
            value = None if text == OWN else float(text)
        except ValueError:
            value = -1.0
        if value is not None and not 0 <= value <= 1:
            raise SettingsError(f"--acceptance {text!r}: give probabilities from 0 to 1, or {OWN}, as in {OWN},0.3,0.9")
        found.append(value)
    return list(dict.fromkeys(found))


def _is_number(text: str) -> bool:
    """Whether it is a whole number of a length that makes sense."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _parts(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]
