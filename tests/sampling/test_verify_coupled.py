"""Coupled verification: over every table of noise, every round emits a piece of the one-at-a-time stream."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from workers.sampling import verify as verify_module
from workers.sampling.randomness import exponential_noise
from workers.sampling.verify import DrawParams, Verdict, draw_draft, verify, verify_coupled

START = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A target whose law depends on output position and previous token: integer masses [positions, V, V]."""

    masses: list[list[list[int]]]

    @property
    def vocab_size(self) -> int:
        return len(self.masses[0][0])


def random_chain(seed: int, num_positions: int, vocab_size: int) -> Chain:
    rng = random.Random(seed)
    laws = [masses for masses in product(range(4), repeat=vocab_size) if sum(masses) == 3]
    return Chain(masses=[[list(rng.choice(laws)) for _ in range(vocab_size)] for _ in range(num_positions)])


def one_at_a_time(chain: Chain, noise: tuple[tuple[int, ...], ...]) -> list[int]:
    """argmax p / e position by position, in fractions; the lowest id of equals."""
    stream, previous = [], START
    for masses, e in zip(chain.masses, noise, strict=True):
        scores = [Fraction(mass, rank) for mass, rank in zip(masses[previous], e, strict=True)]
        previous = scores.index(max(scores))
        stream.append(previous)
    return stream


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryRound:
    """All rounds there are: (noise table, first position, drafts, number of drafts), with the streams to follow."""

    tables_TNV: Tensor
    streams_TN: Tensor
    p_BWV: Tensor
    drafts_BG: Tensor
    num_drafts_B: Tensor
    params: DrawParams

    def wrong_rounds(self, verdict: Verdict) -> int:
        """Rounds whose emitted run is not the next piece of the stream, or stops before its first wrong draft."""
        start_B1 = self.params.position_N.unsqueeze(1)
        window = torch.arange(self.p_BWV.shape[1])
        expected_BW = self.streams_TN[self.params.seed_N].gather(1, start_B1 + window)
        right_BG = (self.drafts_BG == expected_BW[:, :-1]) & (window[:-1] < self.num_drafts_B.unsqueeze(1))
        num_right_B = right_BG.to(torch.int64).cumprod(1).sum(1)
        expected_BW = expected_BW.where(window <= num_right_B.unsqueeze(1), -1)
        wrong_B = (verdict.tokens_BW != expected_BW).any(1) | (verdict.num_accepted_B != num_right_B)
        return int(wrong_B.sum())


def every_round(chain: Chain, num_drafts: int) -> EveryRound:
    vocab_size, num_positions = chain.vocab_size, len(chain.masses)
    # Far enough apart for noise to overrule some laws, near enough for other laws to overrule noise.
    orders = list(permutations([4**rank for rank in range(vocab_size)]))
    tables = list(product(orders, repeat=num_positions))
    streams = [one_at_a_time(chain, table) for table in tables]
    rounds = [
        (table, start, count, drafts)
        for table in range(len(tables))
        for start in range(num_positions - num_drafts)
        for count in range(num_drafts + 1)
        for drafts in product(range(vocab_size), repeat=num_drafts)
    ]
    table_B, start_B, count_B = (torch.tensor([entry[i] for entry in rounds]) for i in range(3))
    drafts_BG = torch.tensor([entry[3] for entry in rounds])
    streams_TN = torch.tensor(streams)
    from_start_TN = torch.cat([torch.full((len(tables), 1), START), streams_TN], dim=1)
    previous_BW = torch.cat([from_start_TN[table_B, start_B].unsqueeze(1), drafts_BG], dim=1)
    position_BW = start_B.unsqueeze(1) + torch.arange(num_drafts + 1)
    p_BWV = torch.tensor(chain.masses, dtype=torch.float32)[position_BW, previous_BW]
    coupled_B = torch.ones(len(rounds), dtype=torch.bool)
    return EveryRound(
        tables_TNV=torch.tensor(tables, dtype=torch.float32),
        streams_TN=streams_TN,
        p_BWV=p_BWV,
        drafts_BG=drafts_BG,
        num_drafts_B=count_B,
        params=DrawParams(greedy_N=~coupled_B, coupled_N=coupled_B, seed_N=table_B, position_N=start_B),
    )


CASES = [(2, 4, 1), (2, 4, 3), (2, 5, 2), (3, 3, 1), (3, 3, 2)]


@pytest.mark.parametrize(("vocab_size", "num_positions", "num_drafts"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_every_round_emits_the_next_tokens_of_the_stream(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, num_positions: int, num_drafts: int, seed: int
) -> None:
    rounds = every_round(random_chain(seed, num_positions, vocab_size), num_drafts)
    monkeypatch.setattr(
        verify_module, "exponential_noise", lambda seeds, position, _: rounds.tables_TNV[seeds, position]
    )
    verdict = verify(
        rounds.p_BWV,
        None,
        rounds.drafts_BG,
        rounds.num_drafts_B,
        rounds.params,
        step=3,
        any_standard=False,
        any_coupled=True,
    )
    assert rounds.wrong_rounds(verdict) == 0
    assert set(verdict.num_accepted_B.tolist()) == set(range(num_drafts + 1))
    assert len(rounds.streams_TN.unique(dim=0)) > 1


@pytest.mark.parametrize("fault", ["noise of the row, not of the position", "drafts unchecked", "stops a token early"])
def test_a_wrong_coupling_is_rejected(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    rounds = every_round(random_chain(0, 4, 2), 2)
    if fault == "noise of the row, not of the position":
        monkeypatch.setattr(
            verify_module,
            "exponential_noise",
            lambda seeds, position, _: rounds.tables_TNV[seeds, position - position[:, :1]],
        )
        arguments = (rounds.p_BWV, None, rounds.drafts_BG, rounds.num_drafts_B, rounds.params, 3)
        verdict = verify(*arguments, any_standard=False, any_coupled=True)
    else:
        window = torch.arange(3)
        noise_BWV = rounds.tables_TNV[rounds.params.seed_N[:, None], rounds.params.position_N[:, None] + window]
        y_BW = (rounds.p_BWV / noise_BWV).argmax(-1)
        assert rounds.wrong_rounds(verify_coupled(y_BW, rounds.drafts_BG, rounds.num_drafts_B)) == 0
        if fault == "drafts unchecked":
            verdict = verify_coupled(
                torch.cat([rounds.drafts_BG, y_BW[:, -1:]], 1), rounds.drafts_BG, rounds.num_drafts_B
            )
        else:
            verdict = verify_coupled(y_BW, rounds.drafts_BG, (rounds.num_drafts_B - 1).clamp(min=0))
    assert rounds.wrong_rounds(verdict) > 0


def test_a_drafter_that_knows_the_law_drafts_the_target_s_own_tokens() -> None:
    num_rows, vocab_size = 500, 17
    law = torch.softmax(torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)), dim=-1)
    seed_N, position_N = torch.arange(num_rows), torch.arange(num_rows) % 13
    coupled_N = torch.ones(num_rows, dtype=torch.bool)
    params = DrawParams(greedy_N=~coupled_N, coupled_N=coupled_N, seed_N=seed_N, position_N=position_N)
    drafts = draw_draft(law, params, step=1, any_standard=False, any_coupled=True)
    assert torch.equal(drafts, (law / exponential_noise(seed_N, position_N, vocab_size)).argmax(-1))
    bonus_B1V = law.roll(1, dims=0).unsqueeze(1)
    verdict = verify(
        torch.cat([law.unsqueeze(1), bonus_B1V], dim=1),
        None,
        drafts.unsqueeze(1),
        torch.ones(num_rows, dtype=torch.int64),
        params,
        step=2,
        any_standard=False,
        any_coupled=True,
    )
    assert (verdict.num_accepted_B == 1).all()
    assert torch.equal(verdict.tokens_BW[:, 0], drafts)
