"""Does reference numerics hold on this machine, at this model's shapes? Run at start; refuses to go on if it does not.

A few made-up sequences go through the target and the drafter alone, token by token, and again packed into passes with
changing neighbours, chunk sizes and row offsets. Every hidden state must come out with the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema import CacheSettings
from state.accounting import plan_memory
from state.layout import DRAFTER_GROUP, TARGET_GROUP
from state.pools import DevicePools
from state.txn import StepTransaction
from workers.batch import Batch, build_batch
from workers.layers.context import PassContext
from workers.models.qwen3_next import Qwen3Next
from workers.ops.base import Ops
from workers.plan import LoadError
from workers.rows import pad_rows

NUM_SEQUENCES, LENGTH, PAGE_SIZE = 6, 45, 16


def check_invariance(model: Qwen3Next, ops: Ops, progress: Callable[[str, int, int], None]) -> None:
    """Raises LoadError with the first layer output that differs."""
    rng = random.Random(0)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(LENGTH)] for _ in range(NUM_SEQUENCES)]
    stage = "checking reference numerics"
    progress(stage, 0, 2)
    with torch.inference_mode():
        alone = [_run(model, ops, [prompt], lambda _: 1)[0] for prompt in prompts[:2]]
        progress(stage, 1, 2)
        packed = _run(model, ops, prompts, lambda _: rng.choice((1, 2, 5, 9, 17, 33)))
    progress(stage, 2, 2)
    for i, (one, many) in enumerate(zip(alone, packed, strict=False)):
        different = (one != many).any(-1).nonzero()
        if different.numel():
            position = int(different[0])
            gap = float((one[position] - many[position]).abs().max())
            raise LoadError(
                "model.numerics reference does not hold on this machine: the hidden state of a token depends on its batch "
                f"(sequence {i}, position {position}, difference {gap:.1e}); serve with numerics default, or set "
                "cluster.worker_threads to 1 and MKL_CBWR=COMPATIBLE"
            )


def _run(model: Qwen3Next, ops: Ops, prompts: list[list[int]], chunk: Callable[[int], int]) -> list[Tensor]:
    """Hidden states [LENGTH, 2 D + V] per prompt (target, drafter, logits), fed in chunks drawn by `chunk`."""
    settings = CacheSettings(memory_mib=1 << 20, page_size=PAGE_SIZE, max_running=len(prompts))
    memory = plan_memory(
        model.state_layout, settings, max_model_len=LENGTH + 1, max_step_tokens=1024, gamma_max=0, hidden_window=1, drafting=False
    )
    device = model.embed(torch.zeros(1, dtype=torch.int64)).device
    pools = DevicePools(model.state_layout, memory.sizes, device)
    pages = memory.pages_per_longest
    slots = list(range(1, len(prompts) + 1))
    tables = [tuple(tuple(range(1 + i * pages, 1 + (i + 1) * pages)) for _ in memory.cache_groups) for i in range(len(prompts))]
    pools.enter(slots, prompts, tables)
    done = [0] * len(prompts)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    while any(count < LENGTH for count in done):
        live = [i for i, count in enumerate(done) if count < LENGTH]
        counts = [min(chunk(i), LENGTH - done[i]) for i in live]
        rows = _pass(model, ops, pools, [slots[i] for i in live], counts, max(done) + max(counts))
        for i, part in zip(live, rows.split(counts), strict=True):
            parts[i].append(part)
        for i, count in zip(live, counts, strict=True):
            done[i] += count
    return [torch.cat(part) for part in parts]


def _pass(model: Qwen3Next, ops: Ops, pools: DevicePools, slots: list[int], counts: list[int], max_length: int) -> Tensor:
    slots_B = torch.tensor(slots).to(pools.device)
    counts_B = torch.tensor(counts).to(pools.device)
    batch = build_batch(
        slots=slots,
        max_counts=counts,
        exact=True,
        counts_B=counts_B,
        committed_B=pools.committed_len.index_select(0, slots_B),
        num_real=sum(counts),
        row_multiple=ops.row_multiple,
        max_length=max_length,
    )
    txn = StepTransaction(pools, slots_B, batch.buckets, batch.num_rows, ops.delta_fold)
    hidden = model.forward(_tokens(pools, batch, 0), _context(model, ops, pools, batch, TARGET_GROUP, txn))
    txn.commit(counts_B)
    out = [hidden.for_logits, model.logits(pad_rows(hidden.for_logits, ops.row_multiple))]
    if model.drafter is not None:
        ctx = _context(model, ops, pools, batch, DRAFTER_GROUP, None)
        out.append(model.drafter.forward(model.embed(_tokens(pools, batch, 1)), hidden.for_draft, ctx).for_logits)
    return torch.cat(out, -1)[: batch.num_real]


def _tokens(pools: DevicePools, batch: Batch, offset: int) -> Tensor:
    log = pools.token_log
    return log.view(-1).index_select(0, batch.slot_N * log.shape[1] + batch.position_N + offset).to(torch.int64)


def _context(model: Qwen3Next, ops: Ops, pools: DevicePools, batch: Batch, group: str, txn: StepTransaction | None) -> PassContext:
    return PassContext(
        batch=batch,
        views={group: ops.attention_view(batch, pools, group, None)},
        kv=pools.kv,
        angles=model.rotary.angles(batch.position_N),
        txn=txn,
    )
