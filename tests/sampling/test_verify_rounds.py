"""Verification on floats, over whole streams: its law by chi-square, its keys by audit, its modes side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling.decoding import Streams, decode
from scipy.stats import chisquare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.vocabulary import best_of
from workers.draft.admit_on_device import admit_on_device
from workers.draft.confidence import Calibrator, Measure, Scorer
from workers.plan import IDENTITY
from workers.sampling.processors import RowParams, target_law
from workers.sampling.randomness import Purpose, audit_keys
from workers.sampling.verify import DrawParams, TypicalParams, clip_emitted, draw_draft, verify

P_VV = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.7, 0.0, 0.3]])
Q_VV = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.3, 0.3], [0.3, 0.3, 0.4]])


def decode_standard(num_sequences: int, num_tokens: int, **options: Any) -> Streams:
    off_B = torch.zeros(num_sequences, dtype=torch.bool)
    seed_B = torch.arange(num_sequences) * 0x9E3779B97F4A7C15 % 2**62
    return decode(P_VV, Q_VV, greedy_B=off_B, coupled_B=off_B, seed_B=seed_B, num_tokens=num_tokens, **options)


def chi_square_p_value(tokens_BN: Tensor) -> float:
    """Of the joint counts of three tokens against the target's own law; cells of no mass must be empty."""
    expected_VVV = len(tokens_BN) * P_VV[0].double()[:, None, None] * P_VV[:, :, None] * P_VV[None]
    cells = (tokens_BN * torch.tensor([9, 3, 1])).sum(dim=1)
    counts = torch.bincount(cells, minlength=27)
    possible = expected_VVV.flatten() > 0
    assert counts[~possible].sum() == 0
    expected = expected_VVV.flatten()[possible]
    return float(chisquare(counts[possible], expected * counts.sum() / expected.sum()).pvalue)


def test_three_tokens_of_standard_decoding_follow_the_target() -> None:
    streams = decode_standard(8000, 3, gamma_of_round=lambda index: (2, 3, 1)[index % 3])
    assert 0.3 < streams.num_accepted / streams.num_verified < 0.9
    assert chi_square_p_value(streams.tokens_BN) > 1e-3


def test_the_statistic_rejects_drafts_from_another_law_than_claimed() -> None:
    streams = decode_standard(8000, 3, gamma_of_round=lambda _: 2, claimed_q_VV=torch.full((3, 3), 1 / 3))
    assert chi_square_p_value(streams.tokens_BN) < 1e-9


def test_no_key_is_used_twice_over_many_rounds() -> None:
    with audit_keys() as audit:
        decode_standard(4, 40, gamma_of_round=lambda index: (3, 0, 2)[index % 3])
    assert {use.purpose for use in audit.uses} == {Purpose.DRAFT, Purpose.ACCEPT, Purpose.DRAW}
    assert audit.repeated() == []


def test_the_audit_rejects_noise_that_forgets_the_step() -> None:
    with audit_keys() as audit:
        decode_standard(4, 40, gamma_of_round=lambda _: 3, step_of_round=lambda _: 0)
    assert {use.purpose for use in audit.repeated()} == {Purpose.DRAFT, Purpose.ACCEPT}


SCHEDULES: list[Callable[[int], int]] = [lambda _: 1, lambda _: 4, lambda index: (3, 0, 1)[index % 3]]


@pytest.mark.parametrize("gamma_of_round", SCHEDULES)
def test_a_coupled_stream_does_not_depend_on_the_schedule(gamma_of_round: Callable[[int], int]) -> None:
    coupled_B = torch.ones(50, dtype=torch.bool)
    modes = {"greedy_B": ~coupled_B, "coupled_B": coupled_B, "seed_B": torch.arange(50)}
    plain = decode(P_VV, Q_VV, **modes, num_tokens=30, gamma_of_round=lambda _: 0)
    drafted = decode(P_VV, Q_VV, **modes, num_tokens=30, gamma_of_round=gamma_of_round)
    assert torch.equal(drafted.tokens_BN, plain.tokens_BN)
    assert 0 < drafted.num_accepted < drafted.num_verified
    assert len(plain.tokens_BN.unique(dim=0)) == 50


def test_coupled_noise_draws_from_the_law() -> None:
    coupled_B = torch.ones(8000, dtype=torch.bool)
    streams = decode(
        P_VV,
        Q_VV,
        greedy_B=~coupled_B,
        coupled_B=coupled_B,
        seed_B=torch.arange(8000),
        num_tokens=3,
        gamma_of_round=lambda _: 2,
    )
    assert chi_square_p_value(streams.tokens_BN) > 1e-3


def test_a_greedy_stream_does_not_depend_on_the_schedule() -> None:
    # The cycle 0 → 1 → 2 → 0 against a drafter that is wrong after token 2.
    greedy_B = torch.ones(2, dtype=torch.bool)
    p_VV, q_VV = torch.eye(3)[[1, 2, 0]], torch.eye(3)[[1, 2, 1]]
    streams = decode(
        p_VV,
        q_VV,
        greedy_B=greedy_B,
        coupled_B=~greedy_B,
        seed_B=torch.zeros(2, dtype=torch.int64),
        num_tokens=9,
        gamma_of_round=lambda _: 3,
    )
    assert streams.tokens_BN.tolist() == [[1, 2, 0] * 3] * 2
    assert 0 < streams.num_accepted < streams.num_verified


def test_modes_share_a_batch_without_touching_each_other() -> None:
    num_sequences = 90
    kind_B = torch.arange(num_sequences) % 3
    greedy_B, coupled_B = kind_B == 0, kind_B == 1
    seed_B = torch.arange(num_sequences)
    point_VV = torch.eye(3)[P_VV.argmax(-1)]
    position_B = torch.zeros_like(seed_B)
    window_BW = torch.tensor([0, 2, 1]).expand(num_sequences, 3)
    p_BWV = torch.where(greedy_B.view(-1, 1, 1), point_VV[window_BW], P_VV[window_BW])
    q_BGV = Q_VV[window_BW[:, :-1]]
    num_drafts_B = torch.arange(num_sequences) % 4 % 3

    def run(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        params = DrawParams(
            greedy_N=greedy_B[rows], coupled_N=coupled_B[rows], seed_N=seed_B[rows], position_N=position_B[rows]
        )
        verdict = verify(
            p_BWV[rows],
            q_BGV[rows],
            window_BW[rows, 1:],
            num_drafts_B[rows],
            params,
            5,
            any_standard=bool(params.standard_N.any()),
            any_coupled=bool(params.coupled_N.any()),
        )
        return verdict.tokens_BW, verdict.num_emitted_B, verdict.acceptance_BG

    tokens_BW, num_emitted_B, acceptance_BG = run(torch.arange(num_sequences))
    for kind in range(3):
        rows = (kind_B == kind).nonzero().flatten()
        tokens, num_emitted, acceptance = run(rows)
        assert torch.equal(acceptance_BG[rows], acceptance)
        assert torch.equal(tokens_BW[rows], tokens)
        assert torch.equal(num_emitted_B[rows], num_emitted)


def test_acceptance_is_the_overlap_where_drafts_are_drawn_and_the_outcome_elsewhere() -> None:
    mode_B3 = torch.eye(3, dtype=torch.bool)  # greedy, coupled, standard
    p_BWV = torch.stack([torch.eye(3)[[1, 2, 0]], P_VV, P_VV])
    drafts_BG = torch.tensor([[1, 0], [0, 2], [0, 2]])
    params = DrawParams(
        greedy_N=mode_B3[:, 0], coupled_N=mode_B3[:, 1], seed_N=torch.arange(3), position_N=torch.zeros(3).long()
    )
    q_BGV = Q_VV[:2].expand(3, -1, -1).clone()
    q_BGV[:2] = float("nan")  # laws are kept of standard drafts only
    verdict = verify(p_BWV, q_BGV, drafts_BG, torch.full((3,), 2), params, 7, any_standard=True, any_coupled=True)
    assert verdict.acceptance_BG.dtype == torch.float64
    assert verdict.acceptance_BG[0].tolist() == [1, 0]
    own = verdict.num_accepted_B[1]
    assert verdict.acceptance_BG[1, : own + 1].tolist() == ([1.0] * own + [0.0])[:2]
    torch.testing.assert_close(
        verdict.acceptance_BG[2], torch.tensor([0.7, 0.7], dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_standard_drafts_without_their_laws_are_refused() -> None:
    off = torch.zeros(1, dtype=torch.bool)
    zero = torch.zeros(1, dtype=torch.int64)
    params = DrawParams(greedy_N=off, coupled_N=off, seed_N=zero, position_N=zero)
    with pytest.raises(ValueError, match="laws"):
        verify(P_VV[None, :2], None, zero[None], zero + 1, params, 0, any_standard=True, any_coupled=False)
    verdict = verify(P_VV[None, 2:], None, zero[None, :0], zero, params, 0, any_standard=True, any_coupled=False)
    assert verdict.tokens_BW.item() in (0, 2)


@pytest.mark.parametrize(
    ("tokens", "num_emitted", "stop_ids", "room", "kept"),
    [
        ([5, 6, 7, 8], 4, [-1, -1], 9, 4),
        ([5, 6, 7, 8], 4, [7, -1], 9, 3),
        ([5, 6, 7, 8], 4, [8, 6], 9, 2),
        ([5, 5, 7, 8], 4, [5, -1], 9, 1),
        ([5, 6, 7, 8], 4, [7, -1], 2, 2),
        ([5, 6, 7, 8], 4, [], 3, 3),
        ([5, 6, -1, -1], 2, [-1, -1], 9, 2),
        ([5, 6, -1, -1], 2, [9, -1], 9, 2),
        ([5, -1, -1, -1], 1, [5], 1, 1),
    ],
)
def test_clipping_keeps_the_first_stop_token_and_the_room(
    tokens: list[int], num_emitted: int, stop_ids: list[int], room: int, kept: int
) -> None:
    clipped = clip_emitted(
        torch.tensor([tokens]),
        torch.tensor([num_emitted]),
        torch.tensor([stop_ids], dtype=torch.int64),
        torch.tensor([room]),
    )
    assert clipped.tolist() == [kept]


class CallLog(TorchDispatchMode):
    """Names of the torch calls made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        if self.names[-1] == "index":
            assert all(index is None or index.dtype != torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))


def round_of_calls(num_sequences: int, measure: Measure) -> list[str]:
    """One round of every mode, greedy, coupled, standard and lossy rows mixed; the torch calls it makes."""
    window, vocab_size = 4, 40
    scorer, calibrator = Scorer(measure=measure), Calibrator(window - 1, torch.device("cpu"))
    kind_B = torch.arange(num_sequences) % 4
    params = RowParams(
        temperature=torch.where(kind_B == 0, 0.0, 0.8),
        top_k=torch.full((num_sequences,), 20),
        top_p=torch.full((num_sequences,), 0.9),
        min_p=torch.full((num_sequences,), 0.01),
        typical_p=torch.full((num_sequences,), 0.95),
    )
    thresholds_B = torch.full((num_sequences,), 0.3)
    typical = TypicalParams(lossy_B=kind_B == 3, epsilon_B=thresholds_B, delta_B=thresholds_B)
    draws = DrawParams(
        greedy_N=params.greedy,
        coupled_N=kind_B == 1,
        seed_N=torch.arange(num_sequences),
        position_N=torch.arange(num_sequences) + 3,
    )
    logits_BV = torch.randn(num_sequences, vocab_size)
    stop_ids_BS = torch.full((num_sequences, 2), 7)
    room_B = torch.full((num_sequences,), 3)
    with CallLog() as log:
        law_BV = target_law(logits_BV, params, any_sampled=True, any_sorted=True, any_typical=True)
        drafts_B = draw_draft(law_BV, draws, 4, any_standard=True, any_coupled=True)
        score_B = scorer.score(best_of(logits_BV, **scorer.needs), logits_BV)
        confidence_B = calibrator.confidence(score_B, draws.seed_N * 0, 1, IDENTITY)
        confidence_BG, num_forced_B = confidence_B.unsqueeze(1).expand(-1, window - 1), torch.ones_like(drafts_B)
        num_drafts_B = admit_on_device(
            confidence_BG, torch.full_like(drafts_B, window - 1), draws.seed_N, num_sequences, num_forced_B, 0.25
        )
        law_BWV = law_BV.unsqueeze(1).expand(-1, window, -1)
        drafts_BG = drafts_B.unsqueeze(1).expand(-1, window - 1)
        modes = {"any_standard": True, "any_coupled": True, "typical": typical}
        verdict = verify(law_BWV, law_BWV[:, 1:], drafts_BG, num_drafts_B, draws, 5, **modes)
        clip_emitted(verdict.tokens_BW, verdict.num_emitted_B, stop_ids_BS, room_B)
    return log.names


@pytest.mark.parametrize("measure", ["margin", "max_probability", "entropy"])
def test_a_round_makes_the_same_torch_calls_for_any_number_of_sequences_and_reads_nothing_back(
    measure: Measure,
) -> None:
    one, many = round_of_calls(1, measure), round_of_calls(16, measure)
    assert one == many
    assert not {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal"} & set(many)
