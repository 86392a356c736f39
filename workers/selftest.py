"""Does reference numerics hold on this machine, at this model's shapes? Run at start; refuses to go on if it does not.

A few made-up sequences go through the target and the drafter alone, token by token, and again packed into passes with
changing neighbours, chunk sizes and row offsets. Every output must come out with the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable

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
