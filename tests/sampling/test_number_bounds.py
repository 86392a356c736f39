"""Whatever numbers the front lets through, a row of logits becomes a law: finite, of mass 1, nothing banned in it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from runtime.front import sampling_fields as fields
from runtime.front.defaults import MAX_REPETITION, MIN_REPETITION
from workers.sampling.processors import RowParams, target_law
from workers.sampling.shaping import Counts, forbid, penalise

TINY = 1.2e-38
LOGITS = torch.tensor(
    [[30.0, -30.0, 0.0, 12.5], [1e4, -1e4, 9999.0, 1e-30], [0.0, 0.0, 0.0, 0.0], [-80.0, -90.0, -100.0, -1e-20]]
)
REPETITIONS = (MIN_REPETITION, 1.0, MAX_REPETITION)
PENALTIES = (-fields.MAX_PENALTY, fields.MAX_PENALTY)
TEMPERATURES = (0.0, fields.MIN_TEMPERATURE, 1.0, fields.MAX_TEMPERATURE)
SHARES = (TINY, 0.5, 1.0)


def shaped(repetition: float, penalty: float, times: int) -> Tensor:
    """Every token has been output so often; the second is biased as far as may be, the third banned."""
    rows = len(LOGITS)
    counts = Counts(stood=torch.ones(rows, 4, dtype=torch.bool), output=torch.full((rows, 4), times).int())
    penalties = [torch.full((rows,), value) for value in (repetition, penalty, penalty)]
    logits_RV = penalise(LOGITS, counts, *penalties) + torch.tensor([0.0, fields.MAX_BIAS, 0.0, -fields.MAX_BIAS])
    return forbid(logits_RV, torch.tensor([[False, False, True, False]]).expand(rows, 4), None, None)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("repetition", REPETITIONS)
def test_numbers_at_their_bounds_leave_a_law(temperature: float, repetition: float) -> None:
    for penalty, times, top_p, min_p, typical_p in itertools.product(
        PENALTIES, (0, 1, 100_000), SHARES, (0.0, TINY, 1.0), SHARES
    ):
        logits_RV = shaped(repetition, penalty, times)
        assert not logits_RV.isnan().any()
        rows = len(logits_RV)
        params = RowParams(
            temperature=torch.full((rows,), temperature),
            top_k=torch.tensor([0, 1, 2, 4]),
            top_p=torch.full((rows,), top_p),
            min_p=torch.full((rows,), min_p),
            typical_p=torch.full((rows,), typical_p),
        )
        law_RV = target_law(logits_RV, params, any_sampled=True, any_sorted=True, any_typical=True)
        assert torch.allclose(law_RV.sum(-1), torch.ones(rows)), (penalty, times, top_p, min_p, typical_p, law_RV)
        assert not law_RV[:, 2].any()
