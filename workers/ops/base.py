"""The arithmetic a model is made of, as one interface with two implementations. Knows no model and no weights' names.

`default` is fast and may round differently from one batch shape to the next. `reference` is bitwise independent of the
batch (reference numerics). Layers are written against this interface and hold no `if` on the mode.

Shape letters: N flat rows, D width in, O width out, Q query heads, G key/value heads, E experts, F expert width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

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


class Ops(Protocol):
    """One numerics mode."""

    @property
    def row_multiple(self) -> int:
        """Flat rows of every pass are padded to a multiple of this."""
        ...

    def linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        """x Wᵀ, column parallel: a rank holds output rows of W."""
        ...

    def row_linear(self, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        """x Wᵀ, row parallel: a rank holds input columns of W, partial sums are added in rank order."""
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

    def experts(
        self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, gate_up_EOD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        """Σ over the row's experts, in router order, of weight · down(silu(gate x) · up x). → [N, D]."""
        ...
