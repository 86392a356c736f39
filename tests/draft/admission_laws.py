"""Exact joint output laws of requests whose drafts are admitted by a rule, over all drafts there are.

A rule sees what admission sees, and for the wrong rules more: every draft and every confidence. It answers with a law
over lengths, so that rules with randomness of their own are enumerated too.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from sampling.exact_laws import total_variation

Tokens = tuple[int, ...]
Masses = tuple[Fraction, ...]
Lengths = tuple[int, ...]
JointLaw = dict[tuple[Tokens, ...], Fraction]
ZERO, ONE = Fraction(0), Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestModel:
    """Laws of the next token of one request, and the confidence of the next draft, for each prefix of its drafts."""

    p: Callable[[Tokens], Masses]
    q: Callable[[Tokens], Masses]
    confidence: Callable[[Tokens], float]

    def draft_probability(self, drafts: Tokens) -> Fraction:
        probability = ONE
        for k, token in enumerate(drafts):
            probability *= self.q(drafts[:k])[token]
        return probability

    def confidences(self, drafts: Tokens) -> list[float]:
        return [self.confidence(drafts[:k]) for k in range(len(drafts))]


Rule = Callable[[tuple[Tokens, ...], list[list[float]]], list[tuple[Fraction, Lengths]]]


def coin(share: Fraction | str) -> Masses:
    """The law over tokens 0 and 1 that gives 0 this share."""
    return Fraction(share), 1 - Fraction(share)


def continued(prefix: Tokens, length: int, p: Callable[[Tokens], Masses]) -> dict[Tokens, Fraction]:
    """The target's law of the tokens up to `length` after `prefix`."""
    if len(prefix) == length:
        return {prefix: ONE}
    law: dict[Tokens, Fraction] = {}
    for token, mass in enumerate(p(prefix)):
        if mass:
            for tokens, probability in continued((*prefix, token), length, p).items():
                law[tokens] = mass * probability
    return law


def verified(model: RequestModel, drafts: Tokens, num_admitted: int, length: int) -> dict[Tokens, Fraction]:
    """The law of the first `length` tokens given the drafts, the first num_admitted of which are verified."""
    law: dict[Tokens, Fraction] = defaultdict(lambda: ZERO)
    reached = ONE
    for k in range(num_admitted):
        p, q, token = model.p(drafts[:k]), model.q(drafts[:k]), drafts[k]
        stands = min(ONE, p[token] / q[token])
        residual = [max(a - b, ZERO) for a, b in zip(p, q, strict=True)]
        for replacement, mass in enumerate(residual):
            if mass and stands < 1:
                weight = reached * (1 - stands) * mass / sum(residual)
                for tokens, probability in continued((*drafts[:k], replacement), length, model.p).items():
                    law[tokens] += weight * probability
        reached *= stands
        if not reached:
            return law
    for tokens, probability in continued(drafts[:num_admitted], length, model.p).items():
        law[tokens] += reached * probability
    return law


def joint_law(rule: Rule, models: list[RequestModel], gamma: int, vocab_size: int = 2) -> JointLaw:
    """The joint law of the first gamma + 1 tokens of all requests when `rule` says how many drafts are verified."""
    law: JointLaw = defaultdict(lambda: ZERO)
    blocks = list(product(range(vocab_size), repeat=gamma))
    for drafts in product(blocks, repeat=len(models)):
        weight = ONE
        for model, block in zip(models, drafts, strict=True):
            weight *= model.draft_probability(block)
        if not weight:
            continue
        confidences = [model.confidences(block) for model, block in zip(models, drafts, strict=True)]
        for chance, lengths in rule(drafts, confidences):
            outputs = [verified(m, x, n, gamma + 1).items() for m, x, n in zip(models, drafts, lengths, strict=True)]
            for combination in product(*outputs):
                probability = weight * chance
                for _, factor in combination:
                    probability *= factor
                law[tuple(tokens for tokens, _ in combination)] += probability
    return dict(law)


def target_law(models: list[RequestModel], gamma: int) -> JointLaw:
    return {
        tuple(tokens for tokens, _ in combination): probability
        for combination in product(*[continued((), gamma + 1, model.p).items() for model in models])
        if (probability := math.prod((factor for _, factor in combination), start=ONE))
    }


def bias(rule: Rule, models: list[RequestModel], gamma: int) -> Fraction:
    """Total variation between the joint output law and the target's."""
    return total_variation(joint_law(rule, models, gamma), target_law(models, gamma))


def first_token(law: JointLaw, request: int, token: int) -> Fraction:
    return sum((mass for outputs, mass in law.items() if outputs[request][0] == token), ZERO)


def random_request(rng: random.Random, gamma: int, confidences: list[float]) -> RequestModel:
    """Random rational laws over two tokens, point masses among them; confidences are free inputs, full of ties."""
    prefixes = [x for length in range(gamma + 1) for x in product(range(2), repeat=length)]
    shares = [Fraction(n, 6) for n in (0, 1, 2, 3, 4, 5, 6)]
    p = {x: coin(rng.choice(shares)) for x in prefixes}
    q = {x: coin(rng.choice(shares)) for x in prefixes}
    c = {x: rng.choice(confidences) for x in prefixes}
    return RequestModel(p=p.__getitem__, q=q.__getitem__, confidence=c.__getitem__)
