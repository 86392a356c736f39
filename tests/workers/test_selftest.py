"""The self-test of reference numerics fires on arithmetic that depends on the batch or on how columns are cut."""

from __future__ import annotations

import pytest
import torch
from oracles.group import GroupOfWorkers
from oracles.ranks import load_model
from torch import Tensor

from configs.load import demo_checkpoint
from parallel.collectives import solo
from parallel.mesh import Mesh
from workers import loading
from workers.ops.reference import ReferenceOps
from workers.plan import LoadError
from workers.selftest import check_columns, check_invariance

SHAPES = {"mixer.in_proj.weight": (776, 192), "experts": (3, 40, 64), "router": (9, 64), "gate": (1, 64), "norm": (64,)}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class NarrowOps(ReferenceOps):
    """Few columns take another order of summation than many, as in libraries that have a kernel for them."""

    def __init__(self, threshold: int) -> None:
        super().__init__(2, solo())
        self.threshold = threshold

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        if weight_OD.shape[0] >= self.threshold:
            return super().linear(x_ND, weight_OD)
        half = x_ND.shape[1] // 2
        first, second = (
            super(NarrowOps, self).linear(x.contiguous(), w.contiguous())
            for x, w in ((x_ND[:, :half], weight_OD[:, :half]), (x_ND[:, half:], weight_OD[:, half:]))
        )
        return first + second


class ShiftedOps(ReferenceOps):
    """The first columns of a product are computed otherwise than those that follow, wherever they belong."""

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        out_NO = super().linear(x_ND, weight_OD)
        out_NO[:, 0] = (x_ND.flip(1) * weight_OD[:1].flip(1)).cumsum(1)[:, -1]
        return out_NO


def test_columns_have_the_same_bits_in_every_part() -> None:
    check_columns(weights(), ReferenceOps(2, solo()))


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (776, r"column \d+ of mixer\.in_proj\.weight depends on how many are computed with it \(388 of 776\)"),
        (388, r"column \d+ of mixer\.in_proj\.weight depends on how many are computed with it \(194 of 776\)"),
        (40, r"column \d+ of experts depends on how many are computed with it \(20 of 40\)"),
        (5, r"column \d+ of router depends on how many are computed with it \(4 of 9\)"),
    ],
)
def test_products_of_few_columns_that_round_otherwise_are_refused(threshold: int, message: str) -> None:
    with pytest.raises(LoadError, match=f"model.numerics reference does not hold on this machine: {message}"):
        check_columns(weights(), NarrowOps(threshold))


def test_products_that_depend_on_where_a_part_begins_are_refused() -> None:
    with pytest.raises(LoadError, match=r"column \d+ of mixer\.in_proj\.weight"):
        check_columns(weights(), ShiftedOps(2, solo()))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2)], ids=str)
def test_a_rank_refuses_to_start_where_columns_depend_on_their_number(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "ReferenceOps", lambda k_slices, tp: NarrowOps(200))
    with pytest.raises(
        LoadError, match=r"reference does not hold on this machine: column \d+ of .* so ranks would not"
    ):
        GroupOfWorkers.load(mesh, numerics="reference")


class BatchOps(ReferenceOps):
    """Rows beside which there are many others come out a little different."""

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        out_NO = super().linear(x_ND, weight_OD)
        return out_NO * (1 + 1e-6) if x_ND.shape[0] > 32 else out_NO


def test_outputs_that_depend_on_the_batch_are_refused() -> None:
    model, ops = load_model(demo_checkpoint(), "reference")
    broken = BatchOps(2, solo())
    for layer in model.layers:
        layer._mixer._ops = broken
    try:
        with pytest.raises(LoadError, match=r"hidden of sequence 0 at position \d+ depends on its batch"):
            check_invariance(model, ops, lambda *_: None)
    finally:
        for layer in model.layers:
            layer._mixer._ops = ops
