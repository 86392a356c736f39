"""What one forward pass hands to every layer besides activations. Knows no layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from state.txn import StepTransaction
from workers.batch import Batch
from workers.ops.base import AttentionView


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """views: by cache group. kv: by layer, [2, rows, G, D]. angles: cos and sin of every row's position.
    txn: None in passes of the drafter, which own no recurrent state."""

    batch: Batch
    views: Mapping[str, AttentionView]
    kv: Mapping[int, Tensor]
    angles: tuple[Tensor, Tensor]
    txn: StepTransaction | None
