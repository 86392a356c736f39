"""Looked-up drafts leave the law of the output alone: rounds on end, in fractions, drafts of the head behind them and
admission by what was known before among them."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from sampling.exact_laws import Core, Law, Masses, Model, Tokens, emitted_laws, total_variation
from torch import Tensor

from workers.draft.lookup import Guess, Lookup
from workers.plan import Origin
from workers.sampling.verify import Verdict, verify_standard

TOTAL = 3
LENGTH = 5


@dataclass(frozen=True)
class Story:
    """A request: what it has and predicts, and what the target and the head make of each prefix. origins: what made its
    rounds, as they were asked for."""

    seed: int
    vocab_size: int = 2
    gamma: int = 2
    origins: set[Origin] = field(default_factory=set)

    @functools.cached_property
    def known(self) -> tuple[list[int], list[int]]:
        rng = random.Random(self.seed)
        return [rng.randrange(self.vocab_size) for _ in range(8)], [rng.randrange(self.vocab_size) for _ in range(6)]

    def masses(self, name: str, prefix: Tokens) -> Masses:
        rng = random.Random(f"{self.seed} {name} {prefix}")
        cuts = sorted(rng.randrange(TOTAL + 1) for _ in range(self.vocab_size - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, TOTAL], strict=True))

    def guess(self, prefix: Tokens) -> Guess:
        prompt, prediction = self.known
        lookup = Lookup(prompt, prediction, looks_back=True)
        lookup.extend(prefix)
        return lookup.guess(self.gamma - self.seed % 2)

    def admits(self, prefix: Tokens, guess: Guess) -> int:
        """How many drafts go to verification. Any rule of what was known before them will do; this one differs from
        prefix to prefix."""
        by_chance = sum(chance > 0.6 for chance in guess.chances)
        return min(self.gamma, by_chance + (sum(prefix) + len(prefix)) % 3)

    def round_of(self, prefix: Tokens) -> Model:
        guess = self.guess(prefix)
        self.origins.add(guess.origin)

        def draft_law(drafts: Tokens) -> Masses:
            if len(drafts) < len(guess.tokens):
                token = guess.tokens[len(drafts)]
                return tuple(TOTAL * (v == token) for v in range(self.vocab_size))
            return self.masses("head", prefix + drafts)

        return Model(
            vocab_size=self.vocab_size,
            num_drafts=self.admits(prefix, guess),
            total=TOTAL,
            p=lambda drafts: self.masses("target", prefix + drafts),
            q=draft_law,
        )


def output_law(story: Story, core: Core) -> Law:
    """Of the first tokens, over all rounds."""

    @functools.cache
    def run_law(prefix: Tokens) -> Law:
        return emitted_laws(core, [story.round_of(prefix)])[0]

    waiting: dict[int, Law] = {0: {(): Fraction(1)}}
    result: Law = defaultdict(Fraction)
    for length in range(LENGTH):
        for prefix, weight in waiting.get(length, {}).items():
            for run, share in run_law(prefix).items():
                tokens = (prefix + run)[:LENGTH]
                law = result if len(tokens) == LENGTH else waiting.setdefault(len(tokens), defaultdict(Fraction))
                law[tokens] += weight * share
    return dict(result)


def target_law(story: Story) -> Law:
    model = Model(
        vocab_size=story.vocab_size,
        num_drafts=LENGTH - 1,
        total=TOTAL,
        p=lambda x: story.masses("target", x),
        q=lambda x: (),
    )
    law = {tokens: model.target(tokens) for tokens in model.prefixes(LENGTH)}
    return {tokens: share for tokens, share in law.items() if share}


@pytest.mark.parametrize("vocab_size", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_output_follows_the_targets_law(seed: int, vocab_size: int) -> None:
    story = Story(seed, vocab_size)
    assert output_law(story, verify_standard) == target_law(story)
    assert len(story.origins) > 1, "inconclusive: all rounds were of one kind"


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a law that is not the draft's": lambda q_BGV: q_BGV.roll(1, -1),
    "a law that does not add up": lambda q_BGV: q_BGV // 2,
    "the law of a drawn draft": lambda q_BGV: (q_BGV > 0).to(q_BGV.dtype) * 2 + (q_BGV == 0).to(q_BGV.dtype),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_another_law_than_the_point_mass_is_found_out(wrong: Callable[[Tensor], Tensor]) -> None:
    def core(p_BWV: Tensor, q_BGV: Tensor, *rest: Tensor, scale: float) -> Verdict:
        return verify_standard(p_BWV, wrong(q_BGV), *rest, scale=scale)

    stories = [Story(seed) for seed in range(3)]
    assert max(total_variation(output_law(story, core), target_law(story)) for story in stories) > 0
