"""How many tokens a pass of the target commits: counted, and by two formulas. Pure arithmetic on rounds.

decode pass   a pass after the prompt's last chunk: it verifies the waiting drafts and commits 1 .. γ + 1 tokens
full round    a decode pass that verified γ drafts and began at least γ + 1 tokens before its request's longest
examined      drafts that verification looked at: those accepted and, if any fell, the first that did

Rounds near the end of a request may be cut by its limit. They are counted apart whether or not they were: to leave out
only those that were would favour short runs. For the same reason a full round that an end of sequence or a stop cut is
counted whole, by the drafts that were accepted before the cut: long runs meet ends more often. The formulas speak of
full rounds alone.

The first formula is 1 + Σ_j P(the first j drafts are accepted), j from 1 to γ, with the shares counted over full
rounds. It is an identity: it equals accepted drafts and one more token per full round exactly. The second is that of
Leviathan et al. (arXiv 2211.17192, equation 1), (1 − α^(γ+1)) / (1 − α), which takes every draft to be accepted with
one probability α, whatever its position and its text; α is accepted / examined over full rounds, the likeliest value if
that were so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from runtime.bench.completion import Completion
from runtime.geometric import geometric_length

PARTING = 0.03
"""Relative difference of the two formulas past which one average rate misleads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCounts:
    """Decode passes of one policy.

    prefixes: entry j counts full rounds in which the first j drafts stood and no more, j from 0 to γ.
    near_limit: passes that began within γ + 1 tokens of their request's longest.
    other_length: others that verified more or fewer drafts than γ, such as the first after a change of policy.
    passes, tokens: all decode passes, full or not, and what they committed.
    """

    prefixes: tuple[int, ...]
    near_limit: int
    other_length: int
    passes: int
    tokens: int

    @property
    def gamma(self) -> int:
        return len(self.prefixes) - 1

    @property
    def full(self) -> int:
        return sum(self.prefixes)

    @property
    def tokens_per_pass(self) -> Fraction | None:
        """Over all decode passes; None where there was none."""
        return Fraction(self.tokens, self.passes) if self.passes else None

    @property
    def tokens_per_full_round(self) -> Fraction | None:
        """A full round brings the drafts that stood and one token of the target's own, cut by a stop or not."""
        tokens = sum((accepted + 1) * count for accepted, count in enumerate(self.prefixes))
        return Fraction(tokens, self.full) if self.full else None

    @property
    def survival(self) -> tuple[Fraction, ...]:
        """P(the first j drafts are accepted), j from 1 to γ; () without full rounds."""
        return tuple(Fraction(sum(self.prefixes[j:]), self.full) for j in range(1, len(self.prefixes)) if self.full)

    @property
    def acceptance_rate(self) -> Fraction | None:
        """α: accepted / examined over full rounds; None where nothing was examined."""
        accepted = sum(count * number for number, count in enumerate(self.prefixes))
        fallen = sum(self.prefixes[:-1])
        return Fraction(accepted, accepted + fallen) if accepted + fallen else None

    @property
    def expected_by_survival(self) -> Fraction | None:
        """The first formula; None without full rounds."""
        return 1 + sum(self.survival, Fraction(0)) if self.full else None

    @property
    def expected_by_rate(self) -> Fraction | None:
        """The second formula; None without full rounds."""
        if not self.full:
            return None
        return geometric_length(self.acceptance_rate or Fraction(0), self.gamma)

    @property
    def rate_misleads(self) -> bool:
        """Whether the formulas part by more than PARTING of the first."""
        exact, rough = self.expected_by_survival, self.expected_by_rate
        return exact is not None and rough is not None and abs(rough - exact) > Fraction(PARTING) * exact


def count_rounds(completions: Iterable[tuple[Completion, int]], gamma: int) -> RoundCounts:
    """Sorts the decode passes of requests. completions: each with the most tokens it might have."""
    prefixes = [0] * (gamma + 1)
    near_limit = other_length = passes = tokens = 0
    for completion, max_tokens in completions:
        # The context may end a request before its own limit does.
        limit = len(completion.tokens) if completion.at_length else max_tokens
        position = sum(len(round_.emitted) for round_ in completion.rounds[:1])
        for round_ in completion.rounds[1:]:
            left = limit - position
            position += len(round_.emitted)
            passes += 1
            tokens += len(round_.emitted)
            if left < gamma + 1:
                near_limit += 1
            elif len(round_.drafted) != gamma:
                other_length += 1
            else:
                prefixes[round_.accepted] += 1
    return RoundCounts(
        prefixes=tuple(prefixes),
        near_limit=near_limit,
        other_length=other_length,
        passes=passes,
        tokens=tokens,
    )
