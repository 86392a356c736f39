"""One pass of the target and one of the drafter over a batch: tokens from the log, views, forward. Knows no plan.

Steps, draft chains and the probe all go through here, so they read and write the same places.
"""

from __future__ import annotations

from torch import Tensor

from state.layout import DRAFTER_GROUP, TARGET_GROUP
from state.pools import DevicePools
from state.txn import StepTransaction
from workers.batch import Batch
from workers.layers.context import PassContext
from workers.models.qwen3_next import Hidden, Qwen3Next
from workers.ops.base import Ops


def target_pass(model: Qwen3Next, ops: Ops, pools: DevicePools, batch: Batch, txn: StepTransaction) -> Hidden:
    """The target over the tokens at each row's position. Writes KV at or beyond committed_len and records in `txn`."""
    ctx = PassContext(
        batch=batch,
        views={TARGET_GROUP: ops.attention_view(batch, pools, TARGET_GROUP, None)},
        kv=pools.kv,
        angles=model.rotary.angles(batch.position_N),
        txn=txn,
    )
    return model.forward(pools.tokens_at(batch.slot_N, batch.position_N), ctx)


def drafter_pass(model: Qwen3Next, ops: Ops, pools: DevicePools, batch: Batch, hidden_ND: Tensor) -> Hidden:
    """The drafter over the token after each row's position, beside the hidden state at it. Writes its KV; looks around
    the gaps that pauses have left."""
    assert model.drafter is not None
    view = ops.attention_view(batch, pools, DRAFTER_GROUP, (pools.gap_start, pools.gap_end))
    ctx = PassContext(
        batch=batch,
        views={DRAFTER_GROUP: view},
        kv=pools.kv,
        angles=model.rotary.angles(batch.position_N),
        txn=None,
    )
    embedding_ND = model.embed(pools.tokens_at(batch.slot_N, batch.position_N + 1))
    return model.drafter.forward(embedding_ND, hidden_ND, ctx)
