"""Figures of one run over several prompts and their comparison across policies. Pure; knows no server and no terminal.

decode pass        a target pass after the prompt's last chunk; commits 1 .. γ + 1 tokens
tokens per pass    tokens committed by decode passes / decode passes
acceptance at k    rounds in which the k-th draft stood / rounds that drafted at least k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from runtime.bench.completion import Completion

_T = TypeVar("_T")

TIE_MARGINS = {"float32": 1e-3, "bfloat16": 1.0}
"""By dtype: a lead of one logit over the next that rounding can turn. Feeding the demo model in other chunks moves its
logits by up to 2e-5 in float32, and by up to 0.9 in bfloat16, where rounding also sends tokens to other experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """Prompts in order under one policy. tokens_per_s takes them for done one after the other."""

    policy: str
    completions: tuple[Completion, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(done.tokens) for done in self.completions) / sum(done.seconds for done in self.completions)

    @property
    def tokens_per_pass(self) -> float | None:
        """None where every prompt ended with its first token."""
        decodes = [round_ for done in self.completions for round_ in done.rounds[1:]]
        return sum(len(round_.emitted) for round_ in decodes) / len(decodes) if decodes else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Entry k − 1 belongs to the k-th draft. Empty where nothing was drafted."""
        rounds = [round_ for done in self.completions for round_ in done.rounds]
        longest = max((len(round_.drafted) for round_ in rounds), default=0)
        rates = []
        for k in range(1, longest + 1):
            drafted = [round_ for round_ in rounds if len(round_.drafted) >= k]
            rates.append(sum(round_.accepted >= k for round_ in drafted) / len(drafted))
        return tuple(rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two runs part: prompt and position count from 0; None for a token means the stream had ended.

    margin: lead of the baseline's token over the next, in logits; None where the baseline had ended or did not report.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    margin: float | None

    def is_tie(self, dtype: str) -> bool:
        """Whether rounding can explain it: both runs chose a token, and the baseline's choice was a near tie."""
        return self.found is not None and self.margin is not None and self.margin < TIE_MARGINS[dtype]

    def explain(self, dtype: str) -> str:
        """One line for readers: where, which tokens, by what logit gap, and whether it looks like a tie or a fault."""
        expected, found = ("the end" if token is None else f"token {token}" for token in (self.expected, self.found))
        gap = "no logit gap" if self.margin is None else f"logit gap {self.margin:.2g}"
        cause = "a tie that rounding decided" if self.is_tie(dtype) else "a fault, not rounding"
        return f"prompt {self.prompt}, position {self.position}: {expected} became {found}; {gap}: looks like {cause}"


def first_difference(baseline: PolicyRun, other: PolicyRun) -> Difference | None:
    """None where all token streams are equal. Both runs must be over the same prompts."""
    return next(iter(differences(baseline, other)), None)


def differences(baseline: PolicyRun, other: PolicyRun) -> tuple[Difference, ...]:
    """Where each prompt's streams part first, for those that differ. Both runs must be over the same prompts; what
    failed in either is not compared."""
    return tuple(
        _difference(prompt, left, right)
        for prompt, (left, right) in enumerate(zip(baseline.completions, other.completions, strict=True))
        if not (left.failure or right.failure) and left.tokens != right.tokens
    )


def num_compared(baseline: PolicyRun, other: PolicyRun) -> int:
    """Prompts that failed in neither run."""
    return sum(
        not (left.failure or right.failure) for left, right in zip(baseline.completions, other.completions, strict=True)
    )


def _difference(prompt: int, left: Completion, right: Completion) -> Difference:
    position = _parting(left.tokens, right.tokens)
    return Difference(
        prompt=prompt,
        position=position,
        expected=_at(left.tokens, position),
        found=_at(right.tokens, position),
        margin=_at([margin for round_ in left.rounds for margin in round_.margins], position),
    )


def _parting(left: Sequence[int], right: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))


def _at(entries: Sequence[_T], position: int) -> _T | None:
    return entries[position] if position < len(entries) else None
