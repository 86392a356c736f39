"""Exact laws of what a verification core emits: models over integer masses, and enumeration of every integer uniform.

The core sees laws whose masses sum to one integer total and uniforms 0 .. scale − 1. With a scale that makes every
acceptance and every inverse-CDF boundary an integer, counting outcomes gives probabilities without any rounding.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from workers.sampling.verify import Verdict

Tokens = tuple[int, ...]
Masses = tuple[int, ...]
Law = dict[Tokens, Fraction]


class Core(Protocol):
    def __call__(
        self,
        p_BWV: Tensor,
        q_BGV: Tensor,
        drafts_BG: Tensor,
        num_drafts_B: Tensor,
        u_accept_BG: Tensor,
        u_draw_B: Tensor,
        *,
        scale: float,
    ) -> Verdict: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Target and drafter as conditional laws of the next token: masses that sum to `total`, for each prefix."""

    vocab_size: int
    num_drafts: int
    total: int
    p: Callable[[Tokens], Masses]
    q: Callable[[Tokens], Masses]

    def prefixes(self, length: int) -> list[Tokens]:
        return list(product(range(self.vocab_size), repeat=length))

    def target(self, tokens: Tokens) -> Fraction:
        """Probability that the target alone emits `tokens`."""
        return math.prod((Fraction(self.p(tokens[:k])[t], self.total) for k, t in enumerate(tokens)), start=Fraction(1))

    def drafter(self, tokens: Tokens) -> Fraction:
        return math.prod((Fraction(self.q(tokens[:k])[t], self.total) for k, t in enumerate(tokens)), start=Fraction(1))


def constant(p: Masses, q: Masses, num_drafts: int) -> Model:
    """A model without memory."""
    return Model(vocab_size=len(p), num_drafts=num_drafts, total=sum(p), p=lambda _: p, q=lambda _: q)


def random_model(seed: int, *, vocab_size: int, num_drafts: int, total: int) -> Model:
    """Independent random laws at every prefix, zero masses and point masses among them."""
    rng = random.Random(seed)
    laws = [masses for masses in product(range(total + 1), repeat=vocab_size) if sum(masses) == total]
    prefixes = [x for length in range(num_drafts + 1) for x in product(range(vocab_size), repeat=length)]
    p = {prefix: rng.choice(laws) for prefix in prefixes}
    q = {prefix: rng.choice(laws) for prefix in prefixes}
    return Model(vocab_size=vocab_size, num_drafts=num_drafts, total=total, p=p.__getitem__, q=q.__getitem__)


def exact_scale(model: Model) -> int:
    """The least number of uniform values at which every boundary of the decision is an integer."""
    scale = 1
    for length in range(model.num_drafts + 1):
        for prefix in model.prefixes(length):
            p, q = model.p(prefix), model.q(prefix)
            ratios = [Fraction(a, b) for a, b in zip(p, q, strict=True) if a < b]
            residual = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
            for masses in (p, residual):
                ratios += [Fraction(mass, sum(masses)) for mass in masses if sum(masses)]
            scale = math.lcm(scale, *(ratio.denominator for ratio in ratios))
    return scale


def emitted_laws(core: Core, models: list[Model]) -> list[Law]:
    """The law of the emitted run of each model, all enumerated in one call of the core.

    The models share a vocabulary; their numbers of drafts may differ. Window cells behind a model's last draft are
    filled with masses, drafts and uniforms that would show in the result if the core read them.
    """
    scale = math.lcm(*(exact_scale(model) for model in models))
    window = 1 + max(model.num_drafts for model in models)
    vocab_size = models[0].vocab_size
    poison = (10**6,) + (0,) * (vocab_size - 1)
    columns: list[tuple[Tensor, ...]] = []
    weights: list[tuple[int, Fraction]] = []
    for index, model in enumerate(models):
        gamma = model.num_drafts
        grid = torch.cartesian_prod(*[torch.arange(scale)] * (gamma + 1)).view(-1, gamma + 1)
        u_accept = torch.cat([grid[:, :gamma], torch.zeros(len(grid), window - 1 - gamma, dtype=torch.int64)], dim=1)
        for drafts in model.prefixes(gamma):
            weight = model.drafter(drafts)
            if weight == 0:
                continue
            p = [model.p(drafts[:j]) for j in range(gamma + 1)] + [poison] * (window - 1 - gamma)
            q = [model.q(drafts[:j]) for j in range(gamma)] + [poison] * (window - 1 - gamma)
            columns.append(
                (
                    torch.tensor(p).expand(len(grid), -1, -1),
                    torch.tensor(q, dtype=torch.int64).view(-1, vocab_size).expand(len(grid), -1, -1),
                    torch.tensor([*drafts, *[-7] * (window - 1 - gamma)], dtype=torch.int64).expand(len(grid), -1),
                    torch.full((len(grid),), gamma),
                    u_accept,
                    grid[:, gamma],
                    torch.full((len(grid),), len(weights)),
                )
            )
            weights.append((index, weight / len(grid)))
    *arguments, case_B = (torch.cat(parts) for parts in zip(*columns, strict=True))
    verdict = core(*arguments, scale=scale)
    outcomes, counts = torch.cat([case_B[:, None], verdict.num_accepted_B[:, None], verdict.tokens_BW], dim=1).unique(
        dim=0, return_counts=True
    )
    laws: list[Law] = [defaultdict(Fraction) for _ in models]
    for (case, num_accepted, *tokens), count in zip(outcomes.tolist(), counts.tolist(), strict=True):
        index, weight = weights[case]
        laws[index][tuple(tokens[: num_accepted + 1])] += weight * count
    return laws


def completed(law: Law, model: Model) -> Law:
    """The law of the first num_drafts + 1 tokens when the target alone continues each emitted run."""
    result: Law = defaultdict(Fraction)
    length = model.num_drafts + 1
    for run, weight in law.items():
        for tail in model.prefixes(length - len(run)):
            tokens = run + tail
            probability = weight
            for k in range(len(run), length):
                probability *= Fraction(model.p(tokens[:k])[tokens[k]], model.total)
            if probability:
                result[tokens] += probability
    return dict(result)


def target_joint(model: Model) -> Law:
    """The law the target alone gives to num_drafts + 1 tokens."""
    law = {tokens: model.target(tokens) for tokens in model.prefixes(model.num_drafts + 1)}
    return {tokens: probability for tokens, probability in law.items() if probability}


def total_variation(a: Mapping[Any, Fraction], b: Mapping[Any, Fraction]) -> Fraction:
    return sum((abs(a.get(x, Fraction(0)) - b.get(x, Fraction(0))) for x in a.keys() | b.keys()), Fraction(0)) / 2
