"""target_law against a plain one-row computation, at its edges, and row by row."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.sampling.processors import RowParams, target_law

NEVER = -math.inf


def rows(*params: tuple[float, int, float, float], typical_p: float = 1.0) -> RowParams:
    temperature, top_k, top_p, min_p = zip(*params, strict=True)
    return RowParams(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        typical_p=torch.full((len(params),), typical_p),
    )


def law(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    params = rows((temperature, top_k, top_p, min_p), typical_p=typical_p)
    return target_law(
        torch.tensor([logits]),
        params,
        any_sampled=temperature > 0,
        any_sorted=top_k > 0 or top_p < 1,
        any_typical=typical_p < 1,
    )[0]


def logs(*masses: float) -> list[float]:
    return [math.log(mass) if mass > 0 else NEVER for mass in masses]


def plain_law(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """One row in float64 and python, by the documented order."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    if temperature == 0:
        return [float(v == order[0]) for v in range(len(logits))]
    weight = {v: math.exp((logits[v] - logits[order[0]]) / temperature) for v in order}
    kept = order[: top_k or None]
    if top_p < 1:
        total, mass, prefix = sum(weight[v] for v in kept), 0.0, []
        for v in kept:
            if prefix and mass >= top_p * total:
                break
            prefix.append(v)
            mass += weight[v]
        kept = prefix
    kept = [v for v in kept if weight[v] >= min_p * weight[kept[0]]]
    total = sum(weight[v] for v in kept)
    return [weight[v] / total if v in kept else 0.0 for v in range(len(logits))]


def test_a_greedy_row_is_a_point_mass_on_the_lowest_id_of_the_largest_logits() -> None:
    expected = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert torch.equal(law([1.0, 3.0, 3.0, NEVER], temperature=0.0), expected)
    mixed = target_law(
        torch.tensor([[1.0, 3.0, 3.0, NEVER]] * 2),
        rows((0.0, 1, 0.5, 0.5), (1.0, 2, 1.0, 0.0)),
        any_sampled=True,
        any_sorted=True,
    )
    assert torch.equal(mixed, torch.stack([expected, torch.tensor([0.0, 0.5, 0.5, 0.0])]))


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(law(logs(0.1, 0.3, 0.6), temperature=0.5), torch.tensor([1.0, 9.0, 36.0]) / 46)


def test_a_tiny_temperature_is_greedy_rather_than_nan() -> None:
    assert torch.equal(law([5.0, 4.0, NEVER], temperature=1e-38), torch.tensor([1.0, 0.0, 0.0]))


def test_top_k_keeps_exactly_k_and_prefers_lower_ids_among_equals() -> None:
    assert torch.equal(law(logs(0.2, 0.2, 0.2, 0.4), top_k=2).nonzero().flatten(), torch.tensor([0, 3]))
    torch.testing.assert_close(law(logs(0.2, 0.2, 0.2, 0.4), top_k=9), torch.tensor([0.2, 0.2, 0.2, 0.4]))


def test_equal_logits_are_kept_by_id_however_many_there_are() -> None:
    kept = law([0.0, 1.0] * 3000, top_k=7)
    assert kept.nonzero().flatten().tolist() == [1, 3, 5, 7, 9, 11, 13]


def test_top_p_keeps_the_smallest_prefix_that_reaches_it() -> None:
    masses = logs(0.125, 0.5, 0.125, 0.25)
    torch.testing.assert_close(law(masses, top_p=0.49), torch.tensor([0.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(law(masses, top_p=0.51), torch.tensor([0.0, 2 / 3, 0.0, 1 / 3]))
    torch.testing.assert_close(law(masses, top_p=0.80), torch.tensor([1 / 7, 4 / 7, 0.0, 2 / 7]))
    torch.testing.assert_close(law(masses, top_p=0.0), torch.tensor([0.0, 1.0, 0.0, 0.0]))


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    # Of (0.4, 0.3) the first is 57 %: top_p 0.5 keeps one token, though 0.4 of the whole law is less than half.
    torch.testing.assert_close(law(logs(0.4, 0.3, 0.3), top_k=2, top_p=0.5), torch.tensor([1.0, 0.0, 0.0]))


def test_top_p_of_one_keeps_a_tail_that_rounding_would_lose() -> None:
    assert (law([0.0] + [-60.0] * 50, top_k=51, top_p=1.0) > 0).all()


def test_min_p_is_a_ratio_to_the_most_probable_token() -> None:
    torch.testing.assert_close(law(logs(0.5, 0.25, 0.15, 0.1), min_p=0.25), torch.tensor([5.0, 2.5, 1.5, 0.0]) / 9)


def test_typical_p_keeps_the_tokens_whose_surprise_is_nearest_to_the_entropy() -> None:
    masses = (0.5, 0.25, 0.125, 0.125)  # surprises 1, 2, 3, 3 bits around an entropy of 1.75
    torch.testing.assert_close(law(logs(*masses), typical_p=0.2), torch.tensor([0.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(law(logs(*masses), typical_p=0.3), torch.tensor([2 / 3, 1 / 3, 0.0, 0.0]))
    torch.testing.assert_close(law(logs(*masses), typical_p=0.8), torch.tensor([4 / 7, 2 / 7, 1 / 7, 0.0]))
    torch.testing.assert_close(law(logs(*masses), typical_p=0.9), torch.tensor(masses))


def test_typical_p_takes_what_the_other_cuts_left() -> None:
    # Of all four the likeliest is the farthest from the entropy; of the first two the second is.
    masses = logs(0.4, 0.2, 0.2, 0.2)
    assert law(masses, typical_p=0.1).tolist() == [0.0, 1.0, 0.0, 0.0]
    torch.testing.assert_close(law(logs(0.6, 0.3, 0.1), top_k=2, typical_p=0.1), torch.tensor([1.0, 0.0, 0.0]))


def test_a_law_of_one_token_is_typical() -> None:
    assert law([NEVER, 3.0, NEVER], typical_p=0.2).tolist() == [0.0, 1.0, 0.0]
    assert law([5.0, 90.0, 3.0], temperature=1e-30, typical_p=0.01).tolist() == [0.0, 1.0, 0.0]


def test_rows_that_are_not_cut_to_the_typical_ones_keep_their_bits() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(2)) * 3
    params = rows(*[(0.8, 0, 1.0, 0.02)] * 64)
    cut = dataclasses.replace(params, typical_p=torch.tensor([1.0, 0.4] * 32))
    without = target_law(logits, params, any_sampled=True, any_sorted=False)
    mixed = target_law(logits, cut, any_sampled=True, any_sorted=False, any_typical=True)
    assert torch.equal(mixed[::2], without[::2])
    assert ((mixed[1::2] > 0).sum(-1) < (without[1::2] > 0).sum(-1)).sum() > 20


CUTS = {
    "temperature": (0.7, 0, 1.0, 0.0, 1.0),
    "top_k": (1.0, 5, 1.0, 0.0, 1.0),
    "top_p": (1.0, 0, 0.8, 0.0, 1.0),
    "min_p": (1.0, 0, 1.0, 0.1, 1.0),
    "typical_p": (1.0, 0, 1.0, 0.0, 0.7),
    "top_k and top_p": (1.3, 9, 0.7, 0.0, 1.0),
    "min_p and temperature": (0.4, 0, 1.0, 0.2, 1.0),
    "typical_p and top_k": (1.1, 7, 1.0, 0.0, 0.6),
    "all": (0.9, 20, 0.9, 0.03, 0.8),
}


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p", "typical_p"), CUTS.values(), ids=CUTS)
def test_laws_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    )

    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(4)) * 2.5
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    theirs += [TopKLogitsWarper(top_k)] if top_k > 0 else []
    theirs += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    theirs += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    theirs += [TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
    expected = theirs(torch.zeros(40, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    ours = target_law(
        logits,
        rows(*[(temperature, top_k, top_p, min_p)] * 40, typical_p=typical_p),
        any_sampled=True,
        any_sorted=True,
        any_typical=True,
    )
    assert torch.equal(ours > 0, expected > 0)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


params_strategy = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0, 1.7]),
    st.integers(0, 7),
    st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)


@given(
    st.lists(st.tuples(st.lists(st.integers(-40, 40), min_size=6, max_size=6), params_strategy), min_size=1, max_size=8)
)
def test_a_mixed_batch_gives_each_row_the_law_of_the_plain_computation(
    batch: list[tuple[list[int], tuple[float, int, float, float]]],
) -> None:
    # Odd sevenths keep every cut away from the floats' rounding.
    logits = [[value / 7 for value in row] for row, _ in batch]
    params = rows(*[row_params for _, row_params in batch])
    laws = target_law(torch.tensor(logits), params, any_sampled=True, any_sorted=True)
    for row_logits, (_, row_params), row_law in zip(logits, batch, laws, strict=True):
        torch.testing.assert_close(row_law, torch.tensor(plain_law(row_logits, *row_params)), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("num_rows", [1, 32, 64])
def test_a_row_does_not_depend_on_the_other_rows(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(96, 517, generator=generator) * 4
    choices = [(0.0, 0, 1.0, 0.0), (1.0, 40, 0.9, 0.0), (0.7, 0, 1.0, 0.05), (1.3, 0, 0.5, 0.0)]
    whole = target_law(logits, rows(*choices * 24), any_sampled=True, any_sorted=True)
    part = target_law(logits[:num_rows], rows(*(choices * 24)[:num_rows]), any_sampled=True, any_sorted=True)
    assert torch.equal(part, whole[:num_rows])


def test_skipping_the_sort_does_not_change_rows_without_cuts() -> None:
    logits = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    params = rows(*[(1.0, 0, 1.0, 0.1)] * 32)
    assert torch.equal(
        target_law(logits, params, any_sampled=True, any_sorted=True),
        target_law(logits, params, any_sampled=True, any_sorted=False),
    )
