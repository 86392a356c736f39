"""Typical verification: the law that comes out of the rule, exactly, and what it leaves alone in its batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from sampling.exact_laws import Law, Masses, Model, Tokens, constant, random_model, target_joint, total_variation
from torch import Tensor

from workers.sampling.randomness import Purpose, audit_keys, uniforms
from workers.sampling.verify import DrawParams, TypicalParams, Verdict, verify, verify_typical

Thresholds = tuple[float, float]
THRESHOLDS: list[Thresholds] = [(0.09, 0.3), (0.3, 0.7), (0.9, 0.9), (1e-6, 1.0), (1.0, 1e-6)]


def is_typical(masses: Masses, token: int, thresholds: Thresholds) -> bool:
    total = sum(masses)
    entropy = -sum(mass / total * math.log(mass / total) for mass in masses if mass)
    epsilon, delta = thresholds
    return masses[token] / total > min(epsilon, delta * math.exp(-entropy))


def by_the_rule(model: Model, thresholds: Thresholds) -> Law:
    """P(emitted run): typical drafts stand; the target draws in the place of the first other one, or behind all."""
    law: Law = defaultdict(Fraction)

    def go_on(run: Tokens, weight: Fraction) -> None:
        p = model.p(run)
        fallen = Fraction(1)
        if len(run) < model.num_drafts:
            shares = [Fraction(mass, model.total) for mass in model.q(run)]
            typical = [token for token in range(model.vocab_size) if is_typical(p, token, thresholds)]
            fallen -= sum(shares[token] for token in typical)
            for token in typical:
                if shares[token]:
                    go_on((*run, token), weight * shares[token])
        for token, mass in enumerate(p):
            if mass and fallen:
                law[*run, token] += weight * fallen * Fraction(mass, model.total)

    go_on((), Fraction(1))
    return dict(law)


def emitted(model: Model, thresholds: Thresholds) -> Law:
    """The same, of `verify_typical` on all drafts and all integer uniforms."""
    gamma, total = model.num_drafts, model.total
    cases = [(drafts, u) for drafts in model.prefixes(gamma) for u in range(total)]
    count = len(cases)
    verdict = verify_typical(
        torch.tensor([[model.p(drafts[:j]) for j in range(gamma + 1)] for drafts, _ in cases]),
        torch.tensor([drafts for drafts, _ in cases], dtype=torch.int64).view(count, gamma),
        torch.full((count,), gamma),
        *(torch.full((count,), threshold, dtype=torch.float64) for threshold in thresholds),
        torch.tensor([u for _, u in cases]),
        scale=total,
    )
    law: Law = defaultdict(Fraction)
    for (drafts, _), tokens, accepted in zip(
        cases, verdict.tokens_BW.tolist(), verdict.num_accepted_B.tolist(), strict=True
    ):
        law[tuple(tokens[: accepted + 1])] += model.drafter(drafts) / total
    return {run: weight for run, weight in law.items() if weight}


@pytest.mark.parametrize("thresholds", THRESHOLDS)
@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "total"), [(2, 0, 3), (2, 1, 5), (2, 3, 3), (3, 2, 4), (4, 1, 5), (4, 2, 3)]
)
def test_the_law_is_that_of_the_rule(vocab_size: int, num_drafts: int, total: int, thresholds: Thresholds) -> None:
    for seed in range(4):
        model = random_model(seed, vocab_size=vocab_size, num_drafts=num_drafts, total=total)
        assert emitted(model, thresholds) == by_the_rule(model, thresholds)


def test_the_example_by_hand() -> None:
    """p = (5, 2, 1) / 8 has 0.9 nats: exp(−H) is 0.406. With ε 0.3 and δ 0.5 the bar is 0.203: tokens 0 and 1 are
    typical. Drafts are 0, 1, 2 with 1/8, 3/8, 4/8."""
    law = emitted(constant((5, 2, 1), (1, 3, 4), 1), (0.3, 0.5))
    first: Law = defaultdict(Fraction)
    for run, weight in law.items():
        first[run[:1]] += weight
    half, eighth = Fraction(1, 2), Fraction(1, 8)
    assert first == {
        (0,): eighth + half * 5 * eighth,
        (1,): 3 * eighth + half * 2 * eighth,
        (2,): half * eighth,
    }


def test_it_is_lossy_but_where_nothing_stands_or_nothing_can_differ() -> None:
    bar = (0.09, 0.3)
    skewed = constant((3, 1), (1, 3), 1)
    joint: Law = defaultdict(Fraction)
    for run, weight in emitted(skewed, bar).items():
        for token, mass in enumerate(skewed.p(run)):
            if len(run) == 1:
                joint[*run, token] += weight * Fraction(mass, skewed.total)
        if len(run) == 2:
            joint[run] += weight
    assert total_variation(joint, target_joint(skewed)) == Fraction(1, 2)
    never = constant((1, 1, 2), (2, 2, 0), 1)  # 1.04 nats, a bar of 0.3 and drafts of 1/4
    assert emitted(never, (0.3, 0.9)) == {(0,): Fraction(1, 4), (1,): Fraction(1, 4), (2,): Fraction(1, 2)}
    exact = constant((0, 4, 0), (1, 1, 2), 1)
    runs = emitted(exact, bar)
    assert {run[0] for run in runs} == {1}, "of a point mass the stream is exact"


def test_the_bar_itself_is_too_low_and_what_the_target_cannot_give_never_stands() -> None:
    p = torch.tensor([[[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]]])

    def stands(draft: int, epsilon: float, delta: float = 1.0) -> bool:
        verdict = verify_typical(
            p,
            torch.tensor([[draft]]),
            torch.tensor([1]),
            torch.tensor([epsilon]),
            torch.tensor([delta]),
            torch.tensor([0.5], dtype=torch.float64),
            scale=1.0,
        )
        assert verdict.acceptance_BG.dtype == torch.float64
        assert verdict.acceptance_BG.tolist() == [[float(verdict.num_accepted_B)]]
        return bool(verdict.num_accepted_B)

    assert not stands(0, 0.25)
    assert stands(0, 0.2499)
    assert not stands(2, 1e-30, 1e-30)
    assert not stands(2, 0.0), "0 is not above 0"


P_VV = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.7, 0.0, 0.3]])
Q_VV = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.3, 0.3], [0.3, 0.3, 0.4]])
COUNT = 120
GREEDY, COUPLED, STANDARD, LOSSY = range(4)
KIND_B = torch.arange(COUNT) % 4
WINDOW_BW = torch.tensor([[0, 2, 1], [0, 1, 2], [0, 0, 2]])[torch.arange(COUNT) // 4 % 3]


def run(rows: Sequence[int] | Tensor, *, q_of_lossy: float = 0.0, with_lossy: bool = True) -> Verdict:
    """A round of these rows of the mixed batch."""
    index = torch.as_tensor(rows)
    kind_B, window_BW = KIND_B[index], WINDOW_BW[index]
    greedy_B, lossy_B = kind_B == GREEDY, kind_B == LOSSY
    point_VV = torch.eye(3)[P_VV.argmax(-1)]
    q_BGV = torch.where(lossy_B.view(-1, 1, 1), Q_VV[window_BW[:, :-1]] + q_of_lossy, Q_VV[window_BW[:, :-1]])
    return verify(
        torch.where(greedy_B.view(-1, 1, 1), point_VV[window_BW], P_VV[window_BW]),
        q_BGV,
        window_BW[:, 1:],
        index // 12 % 3,
        DrawParams(greedy_N=greedy_B, coupled_N=kind_B == COUPLED, seed_N=index, position_N=torch.zeros_like(index)),
        5,
        any_standard=bool((kind_B == STANDARD).any()),
        any_coupled=bool((kind_B == COUPLED).any()),
        typical=TypicalParams(
            lossy_B=lossy_B, epsilon_B=torch.full((len(index),), 0.25), delta_B=torch.full((len(index),), 0.9)
        )
        if with_lossy
        else None,
    )


def same(one: Verdict, other: Verdict, rows: Tensor | None = None) -> bool:
    """Whether `other` says of all its rows what `one` says of `rows`."""
    part = slice(None) if rows is None else rows
    return all(
        torch.equal(getattr(one, name)[part], getattr(other, name))
        for name in ("tokens_BW", "num_accepted_B", "acceptance_BG")
    )


def test_no_mode_touches_another_in_its_batch() -> None:
    together = run(range(COUNT))
    for kind in (GREEDY, COUPLED, STANDARD, LOSSY):
        rows = (kind == KIND_B).nonzero().flatten()
        assert same(together, run(rows), rows)
    exact = (KIND_B != LOSSY).nonzero().flatten()
    assert same(together, run(exact, with_lossy=False), exact), "as before there was such a mode"
    accepted_B = together.num_accepted_B[LOSSY == KIND_B]
    assert set(accepted_B.tolist()) == {0, 1, 2}


def test_the_drafters_law_means_nothing() -> None:
    assert same(run(range(COUNT)), run(range(COUNT), q_of_lossy=float("nan")))


def test_a_replacement_is_drawn_from_the_targets_law_with_the_key_of_the_round() -> None:
    rows = (KIND_B == LOSSY).nonzero().flatten()
    verdict = run(rows)
    u_B = uniforms(rows, Purpose.DRAW, torch.zeros_like(rows), 5)
    last_B1 = verdict.num_accepted_B[:, None]
    before_B = WINDOW_BW[rows].gather(1, last_B1)[:, 0]
    cumulative_BV = P_VV[before_B].double().cumsum(-1)
    expected_B = (cumulative_BV > u_B[:, None] * cumulative_BV[:, -1:]).to(torch.uint8).argmax(-1)
    assert torch.equal(verdict.tokens_BW.gather(1, last_B1)[:, 0], expected_B)


def test_it_consumes_one_key_a_round() -> None:
    rows = (KIND_B == LOSSY).nonzero().flatten()
    with audit_keys() as audit:
        run(rows)
    assert sorted(use.seed for use in audit.uses) == rows.tolist()
    assert {use.purpose for use in audit.uses} == {Purpose.DRAW}
