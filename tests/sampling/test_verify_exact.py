"""verify_standard follows the target's law exactly: every integer uniform enumerated, and wrong cores rejected."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from sampling.exact_laws import (
    Core,
    Law,
    Masses,
    Model,
    completed,
    constant,
    emitted_laws,
    exact_scale,
    random_model,
    target_joint,
    total_variation,
)
from torch import Tensor

from workers.sampling.verify import Verdict, verify_standard


def bias(core: Core, model: Model) -> Fraction:
    """Total variation between what the core emits and the target's law, over num_drafts + 1 tokens."""
    (law,) = emitted_laws(core, [model])
    return total_variation(completed(law, model), target_joint(model))


def acceptance(law: Law, length: int) -> Fraction:
    return sum((weight for run, weight in law.items() if len(run) > length), Fraction(0))


WORKED = ((3, 2), (4, 1))  # p = (0.6, 0.4), q = (0.8, 0.2)


def test_the_worked_example_by_hand() -> None:
    model = constant(*WORKED, num_drafts=1)
    (law,) = emitted_laws(verify_standard, [model])
    fifths = Fraction(1, 25)
    # Draft 0 (4/5) stands with 3/4, then a bonus; else only token 1 has residual mass. Draft 1 (1/5) always stands.
    assert law == {
        (0, 0): 15 * Fraction(3, 5) * fifths,
        (0, 1): 15 * Fraction(2, 5) * fifths,
        (1,): 5 * fifths,
        (1, 0): 5 * Fraction(3, 5) * fifths,
        (1, 1): 5 * Fraction(2, 5) * fifths,
    }


CONSTANT_MODELS: dict[str, tuple[Masses, Masses, int]] = {
    "worked example": (*WORKED, 1),
    "worked example, two drafts": (*WORKED, 2),
    "no drafts": (*WORKED, 0),
    "three drafts": ((2, 2), (3, 1), 3),
    "perfect drafter": ((1, 2), (1, 2), 3),
    "perfect drafter, three tokens": ((1, 2, 3), (1, 2, 3), 2),
    "disjoint supports": ((2, 0), (0, 2), 3),
    "disjoint supports, three tokens": ((1, 0, 1), (0, 2, 0), 3),
    "target never emits a drafted token": ((0, 2, 2), (1, 2, 1), 2),
    "drafter never drafts a token": ((1, 1, 2), (2, 2, 0), 2),
    "point-mass draft": ((1, 1, 2), (0, 4, 0), 2),
    "point-mass target": ((0, 4, 0), (1, 1, 2), 2),
    "point masses agree": ((0, 2), (0, 2), 3),
}


@pytest.mark.parametrize(("p", "q", "num_drafts"), CONSTANT_MODELS.values(), ids=CONSTANT_MODELS.keys())
def test_the_law_is_exact_and_every_draft_stands_as_often_as_it_can(p: Masses, q: Masses, num_drafts: int) -> None:
    model = constant(p, q, num_drafts)
    (law,) = emitted_laws(verify_standard, [model])
    assert completed(law, model) == target_joint(model)
    overlap = Fraction(sum(map(min, p, q)), model.total)
    for length in range(num_drafts + 1):
        assert acceptance(law, length) == overlap**length


@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "total"), [(2, 1, 5), (2, 2, 4), (2, 3, 3), (3, 1, 5), (3, 2, 4), (3, 3, 2)]
)
@pytest.mark.parametrize("seed", range(8))
def test_the_law_is_exact_when_laws_depend_on_the_drafts(
    vocab_size: int, num_drafts: int, total: int, seed: int
) -> None:
    model = random_model(seed, vocab_size=vocab_size, num_drafts=num_drafts, total=total)
    (law,) = emitted_laws(verify_standard, [model])
    assert completed(law, model) == target_joint(model)


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_acceptance_is_the_share_of_drafts_that_stand_given_those_before(seed: int) -> None:
    """Over all drafts and uniforms, the mean of what is told of position j is how often a draft stands there."""
    gamma = 2
    model = random_model(seed, vocab_size=3, num_drafts=gamma, total=4)
    scale = exact_scale(model)
    stood, told = [Fraction(0)] * gamma, [Fraction(0)] * gamma
    grid = torch.cartesian_prod(*[torch.arange(scale)] * gamma).view(-1, gamma)
    for drafts in model.prefixes(gamma):
        weight = model.drafter(drafts) / len(grid)
        verdict = verify_standard(
            torch.tensor([model.p(drafts[:j]) for j in range(gamma + 1)]).expand(len(grid), -1, -1),
            torch.tensor([model.q(drafts[:j]) for j in range(gamma)]).expand(len(grid), -1, -1),
            torch.tensor(drafts).expand(len(grid), -1),
            torch.full((len(grid),), gamma),
            grid,
            torch.zeros(len(grid), dtype=torch.int64),
            scale=scale,
        )
        assert verdict.acceptance_BG.dtype == torch.int64
        for j in range(gamma):
            here = verdict.num_accepted_B >= j
            stood[j] += weight * int((verdict.num_accepted_B > j).sum())
            told[j] += weight * Fraction(int(verdict.acceptance_BG[here, j].sum()), model.total)
    assert told == stood
    assert any(0 < share < 1 for share in stood), "inconclusive: nothing was left to chance"


@pytest.mark.parametrize("seed", range(4))
def test_sequences_of_different_draft_counts_share_a_batch(seed: int) -> None:
    models = [random_model(10 * seed + n, vocab_size=2, num_drafts=n, total=3) for n in (3, 0, 2, 1)]
    assert max(map(exact_scale, models)) <= 6
    laws = emitted_laws(verify_standard, models)
    for model, law in zip(models, laws, strict=True):
        assert completed(law, model) == target_joint(model)
        assert max(map(len, law)) <= model.num_drafts + 1


Accept = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Residual = Callable[[Tensor, Tensor], Tensor]


def plain_core(accept: Accept, residual: Residual) -> Core:
    """A core of the plainest make, with its two rules open to be got wrong."""

    def core(
        p_BWV: Tensor,
        q_BGV: Tensor,
        drafts_BG: Tensor,
        num_drafts_B: Tensor,
        u_accept_BG: Tensor,
        u_draw_B: Tensor,
        *,
        scale: float,
    ) -> Verdict:
        tokens = torch.full(p_BWV.shape[:2], -1)
        accepted = torch.zeros_like(num_drafts_B)
        for b in range(len(p_BWV)):
            drafts = drafts_BG[b, : num_drafts_B[b]]
            masses = p_BWV[b, len(drafts)]
            for j, x in enumerate(drafts):
                if not accept(p_BWV[b, j, x], q_BGV[b, j, x], u_accept_BG[b, j], scale):
                    masses = residual(p_BWV[b, j], q_BGV[b, j])
                    break
                tokens[b, j] = x
                accepted[b] += 1
            above = scale * masses.cumsum(0) > u_draw_B[b] * masses.sum()
            tokens[b, accepted[b]] = above.to(torch.uint8).argmax()
        return Verdict(tokens_BW=tokens, num_accepted_B=accepted, acceptance_BG=torch.zeros_like(drafts_BG))

    return core


def right_accept(p: Tensor, q: Tensor, u: Tensor, scale: float) -> Tensor:
    return u * q < p * scale


def right_residual(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0)


CONTROL_MODELS = [constant((1, 2), (2, 1), 1), constant((1, 1, 2), (2, 2, 0), 1)]

WRONG_CORES: dict[str, tuple[Accept, Residual]] = {
    "residual without max": (right_accept, lambda p, q: p - q),
    "absolute residual": (right_accept, lambda p, q: (p - q).abs()),
    "replacement from p": (right_accept, lambda p, q: p),
    "ratio upside down": (lambda p, q, u, scale: u * p < q * scale, right_residual),
    "every draft stands": (lambda p, q, u, scale: u >= 0, right_residual),
    "accept on equality": (lambda p, q, u, scale: u * q <= p * scale, right_residual),
}


@pytest.mark.parametrize("model", CONTROL_MODELS)
def test_the_plain_core_with_both_rules_right_is_exact(model: Model) -> None:
    assert bias(plain_core(right_accept, right_residual), model) == 0


@pytest.mark.parametrize(("accept", "residual"), WRONG_CORES.values(), ids=WRONG_CORES.keys())
def test_a_wrong_core_is_rejected(accept: Accept, residual: Residual) -> None:
    assert max(bias(plain_core(accept, residual), model) for model in CONTROL_MODELS) > 0


def test_laws_that_lost_their_residual_to_rounding_fall_back_to_the_target() -> None:
    # q exceeds p at the draft and nowhere falls short of it: no exact laws do that, rounded ones can.
    p = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    q = torch.tensor([[[0.5, 0.75]]])
    verdict = verify_standard(
        p,
        q,
        torch.tensor([[0]]),
        torch.tensor([1]),
        torch.tensor([[0.5]], dtype=torch.float64),
        torch.tensor([0.5], dtype=torch.float64),
        scale=1.0,
    )
    assert verdict.tokens_BW.tolist() == [[1, -1]]
    assert verdict.num_accepted_B.tolist() == [0]
