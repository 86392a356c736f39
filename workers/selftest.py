"""Does reference numerics hold on this machine, at this model's shapes? Run at start; refuses to go on if it does not.

Over batches: a few made-up sequences go through the target and the drafter alone, token by token, and again packed into
passes with changing neighbours, chunk sizes and row offsets. Every output must come out with the same bits.

Over ranks: a product of some columns must have the bits that the product of all has there, since that is all that a
rank computes of it. One rank so vouches for the layouts that cut its matrices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from workers.models.qwen3_next import Qwen3Next
from workers.ops.base import Ops
from workers.plan import LoadError
from workers.probe import trace_sequences

NUM_SEQUENCES, NUM_ALONE, LENGTH = 6, 2, 45
CHUNKS = (1, 2, 5, 9, 17, 33)


def check_invariance(model: Qwen3Next, ops: Ops, progress: Callable[[str, int, int], None]) -> None:
    """Raises LoadError that names the output and the first position that differs."""
    rng = random.Random(0)
    length = min(LENGTH, model.config.context_length)
    sequences = [[rng.randrange(model.config.vocab_size) for _ in range(length)] for _ in range(NUM_SEQUENCES)]
    stage = "checking reference numerics"
    progress(stage, 0, NUM_ALONE + 1)
    alone = []
    for i, sequence in enumerate(sequences[:NUM_ALONE]):
        alone += trace_sequences(model, ops, [sequence], lambda _: 1)
        progress(stage, i + 1, NUM_ALONE + 1)
    packed = trace_sequences(model, ops, sequences, lambda _: rng.choice(CHUNKS))
    progress(stage, NUM_ALONE + 1, NUM_ALONE + 1)
    for i, (one, many) in enumerate(zip(alone, packed, strict=False)):
        for output in ("hidden", "logits", "drafter"):
            a, b = getattr(one, output), getattr(many, output)
            if a is None:
                continue
            different = (a != b).any(-1).nonzero()
            if different.numel():
                position = int(different[0])
                gap = float((a[position] - b[position]).abs().max())
                raise LoadError(
                    f"model.numerics reference does not hold on this machine: {output} of sequence {i} at position "
                    f"{position} depends on its batch (difference {gap:.1e}); serve with numerics default, or set "
                    "cluster.worker_threads to 1 and start with MKL_CBWR=COMPATIBLE in the environment"
                )


def check_columns(weights: Mapping[str, Tensor], ops: Ops) -> None:
    """Every shape of matrix among a rank's parameters, stacks of experts included, cut into halves and quarters, and
    where no kernel would. Raises LoadError that names the parameter, the part and the first column that differs."""
    generator = torch.Generator().manual_seed(0)
    checked: set[tuple[int, ...]] = set()
    with torch.inference_mode():
        for name, weight in weights.items():
            if weight.dim() < 2 or weight.shape[-2:] in checked:
                continue
            checked.add(weight.shape[-2:])
            weight_OD = weight if weight.dim() == 2 else weight[0]
            num_columns, width = weight_OD.shape
            x_ND = torch.randn(ops.row_multiple, width, generator=generator).to(weight_OD)
            whole_NO = ops.linear(x_ND, weight_OD)
            for start, stop in _parts(num_columns):
                different = (ops.linear(x_ND, weight_OD[start:stop]) != whole_NO[:, start:stop]).any(0).nonzero()
                if different.numel():
                    raise LoadError(
                        f"model.numerics reference does not hold on this machine: column {start + int(different[0])} "
                        f"of {name} depends on how many are computed with it ({stop - start} of {num_columns}), so "
                        "ranks would not agree; serve with numerics default, or start with MKL_CBWR=COMPATIBLE in the "
                        "environment"
                    )


def _parts(num_columns: int) -> Iterator[tuple[int, int]]:
    """Halves, quarters, and a part that starts at the second column."""
    for count in (2, 4):
        size = -(-num_columns // count)
        for start in range(0, num_columns, size):
            yield start, min(start + size, num_columns)
    yield 1, 1 + num_columns // 2
