"""Philox against its published vectors; keys, ranges and row independence of the variates built on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.sampling import randomness
from workers.sampling.randomness import (
    KeyUse,
    Purpose,
    audit_keys,
    exponential_noise,
    philox4x32,
    signed_seed,
    uniforms,
)

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert philox4x32((c0, c1, c2, c3), (k0, k1)) == tuple(words(expected))


def test_a_uniform_is_the_top_53_bits_of_two_words_under_its_documented_counter() -> None:
    seed = torch.tensor([signed_seed(0xFEDCBA9876543210)])
    value = uniforms(seed, Purpose.ACCEPT, torch.tensor([7]), 5)
    high, low, _, _ = philox4x32(
        (torch.tensor(7), torch.tensor(2), torch.tensor(5), torch.tensor(0)),
        (torch.tensor(0x76543210), torch.tensor(0xFEDCBA98)),
    )
    assert value.item() * 2**53 == (high.item() >> 5) * 2**26 + (low.item() >> 6)


def test_every_part_of_a_key_changes_the_variate() -> None:
    seeds = torch.tensor([1, 2, 1 + 2**32, -1])
    positions = torch.arange(4)
    steps = torch.arange(4)
    grid = uniforms(seeds.view(4, 1, 1), Purpose.DRAFT, positions.view(1, 4, 1), steps)
    other = uniforms(seeds.view(4, 1, 1), Purpose.DRAW, positions.view(1, 4, 1), steps)
    assert torch.cat([grid.flatten(), other.flatten()]).unique().numel() == 2 * 64


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    u = uniforms(torch.tensor(9), Purpose.DRAFT, torch.arange(40_000), 0)
    assert u.dtype == torch.float64
    assert 0 <= u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    counts = torch.histc(u, bins=20, min=0, max=1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 50  # chi-square, 19 degrees of freedom: p = 1.3e-4


def test_noise_is_exponential_and_finite() -> None:
    noise = exponential_noise(torch.tensor([3, 4]), torch.tensor([0, 9]), 40_000)
    assert noise.dtype == torch.float32
    assert (noise > 0).all()
    assert noise.isfinite().all()
    counts = torch.histc(torch.exp(-noise.double()), bins=20, min=0, max=1)
    assert ((counts - 4000) ** 2 / 4000).sum() < 50


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_noise_is_positive_and_finite_at_the_ends_of_the_words(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    words_RL = [torch.full((1, 8), word)] * 4
    monkeypatch.setattr(randomness, "philox4x32", lambda counter, key: words_RL)
    noise = exponential_noise(torch.tensor([1]), torch.tensor([1]), 32)
    assert noise.isfinite().all()
    assert (noise > 0).all()


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    seed, position = torch.tensor([5]), torch.tensor([2])
    wide = exponential_noise(seed, position, 1000)
    for vocab_size in (1, 2, 3, 31, 32, 33, 999):
        assert torch.equal(exponential_noise(seed, position, vocab_size), wide[:, :vocab_size])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 31, 32, 33, 64])
@pytest.mark.parametrize("vocab_size", [2, 37, 64])
def test_a_row_of_noise_does_not_depend_on_the_other_rows(num_rows: int, vocab_size: int) -> None:
    seed, position = torch.arange(96) * 7919, torch.arange(96) % 11
    whole = exponential_noise(seed, position, vocab_size)
    assert torch.equal(exponential_noise(seed[:num_rows], position[:num_rows], vocab_size), whole[:num_rows])
    assert torch.equal(exponential_noise(seed[-num_rows:], position[-num_rows:], vocab_size), whole[-num_rows:])
    u = uniforms(seed, Purpose.DRAW, position, 3)
    assert torch.equal(uniforms(seed[:num_rows], Purpose.DRAW, position[:num_rows], 3), u[:num_rows])


def test_the_audit_lists_the_keys_and_finds_a_repetition() -> None:
    seed, position = torch.tensor([1, 2]), torch.tensor([4, 5])
    with audit_keys() as audit:
        uniforms(seed, Purpose.DRAFT, position, 7)
        uniforms(seed, Purpose.ACCEPT, position, torch.tensor([7, 8]))
        exponential_noise(seed, position, 8)
        exponential_noise(seed, position, 8)
        assert audit.repeated() == []
        uniforms(seed[1:], Purpose.ACCEPT, position[1:], 8)
    uniforms(seed, Purpose.DRAFT, position, 7)
    assert audit.uses[:4] == [
        KeyUse(1, Purpose.DRAFT, 4, 7),
        KeyUse(2, Purpose.DRAFT, 5, 7),
        KeyUse(1, Purpose.ACCEPT, 4, 7),
        KeyUse(2, Purpose.ACCEPT, 5, 8),
    ]
    assert audit.repeated() == [KeyUse(2, Purpose.ACCEPT, 5, 8)]


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_an_unsigned_seed_keeps_its_bits(seed: int, expected: int) -> None:
    assert signed_seed(seed) == expected


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        signed_seed(seed)
