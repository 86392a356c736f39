"""The arithmetic a model is made of, as one interface with two implementations. Knows no model and no weights' names.

`default` is fast and may round differently from one batch shape to the next. `reference` is bitwise independent of the
batch (reference numerics). Layers are written against this interface and hold no `if` on the mode.

Shape letters: N flat rows, D width in, O width out, Q query heads, G key/value heads, E experts, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from parallel.experts import ExpertOwners
from state.fold import DeltaInputs
from workers.batch import Batch


class AttentionView(Protocol):
    """Where one pass reads and writes the KV of one cache group; made once per pass, shared by its layers."""

    @property
    def write_N(self) -> Tensor:
        """KV row of each of the pass's first num_real rows."""
        ...

    def attend(self, q_NQD: Tensor, kv: Tensor) -> Tensor:
        """Causal softmax attention of each row over its sequence's KV, scale 1/√D. kv [2, rows, G, D] → [N, Q, D]."""
        ...


class KVReader(Protocol):
    """What a view needs of the pools."""

    def kv_rows(self, group: str, slot_N: Tensor, position_N: Tensor) -> Tensor: ...
    def kv_rows_of(self, group: str, slots_B: Tensor, length: int) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts as a rank holds them: gate_up [E, 2 F, D], gate above up, and down [E, D, F].

    owners: where ranks hold whole experts; None where each holds a part of the inner width of all.
    """

    gate_up_EOD: Tensor
    down_EDF: Tensor
    owners: ExpertOwners | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """The expert that every row takes, up to its last product: inner activations [N, F] and down [D, F], F the part of
    this rank; gate [N, 1]."""

    inner_NF: Tensor
    down_DF: Tensor
    gate_N1: Tensor


class Ops(Protocol):
    """One numerics mode, on one of the ranks that cut a model between them."""

    @property
    def row_multiple(self) -> int:
        """Flat rows of every pass are padded to a multiple of this."""
        ...

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        """x Wᵀ, column parallel: a rank holds output rows of W."""
        ...

    def row_linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        """x Wᵀ, row parallel: a rank holds input columns of W and x; the sum over ranks, complete on each of them."""
        ...

    def attention_view(
        self, batch: Batch, pool: KVReader, group: str, gap: tuple[Tensor, Tensor] | None
    ) -> AttentionView:
        """Index tensors for one cache group. gap: (start, end) by slot; positions in [start, end) are masked."""
        ...

    def delta_outputs(
        self, state_BHKV: Tensor, q_BWJK: Tensor, inputs: DeltaInputs, counts_B: Tensor, *, advance: bool
    ) -> tuple[Tensor, Tensor]:
        """Gated delta rule over a bucket: outputs [B, W, H, V] and, where `advance` asks for it, the state after
        counts_B rows; otherwise the second value means nothing. float32."""
        ...

    def delta_fold(self, state_BHKV: Tensor, records: DeltaInputs, counts_B: Tensor) -> Tensor:
        """The state after counts_B records; a state.txn.DeltaFold."""
        ...

    def dense(self, x: Tensor) -> Tensor:
        """`x`, laid out so that element-wise functions give the same bits on any number of ranks, if the mode is to."""
        ...

    def mixture(
        self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, experts: Experts, shared: SharedExpert
    ) -> Tensor:
        """Σ over the row's experts of weight · down(silu(gate x) · up x), plus gate · down(inner) of the shared one.

        x, experts and weights are those of all rows, the same on every rank that shares them. → [N, D], complete."""
        ...
