"""Figures of one run over several prompts and their comparison across policies. Pure; knows no server and no terminal.

decode pass        a target pass after the prompt's last chunk; commits 1 .. γ + 1 tokens
tokens per pass    tokens committed by decode passes / decode passes
acceptance at k    rounds in which the k-th draft stood / rounds that drafted at least k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.request import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's greedy continuation. seconds: from sending the request to its last frame."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """All prompts under one policy, one after the other."""

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
    """Where two runs part: prompt and position count from 0; None for a token means the stream had ended."""

    prompt: int
    position: int
    expected: int | None
    found: int | None


def first_difference(baseline: PolicyRun, other: PolicyRun) -> Difference | None:
    """None where all token streams are equal. Both runs must be over the same prompts."""
    for prompt, (left, right) in enumerate(zip(baseline.completions, other.completions, strict=True)):
        if left.tokens != right.tokens:
            position = _parting(left.tokens, right.tokens)
            return Difference(
                prompt=prompt, position=position, expected=_at(left.tokens, position), found=_at(right.tokens, position)
            )
    return None


def _parting(left: Sequence[int], right: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
