"""A small hybrid model, about half of whose drafts stand, and the exact law of its first tokens. Test material only."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from oracles.make_tiny_models import write_checkpoint
from oracles.ranks import load_worker

from workers.probe import trace_sequences
from workers.sampling.processors import RowParams, target_law
from workers.step import Worker

Stream = tuple[int, ...]

VOCAB_SIZE = 48
PROMPT = (11,)
CUTS: dict[str, Any] = {"top_k": 4, "top_p": 0.8, "min_p": 0.2}
"""Each of them takes tokens away that the other two leave."""


@functools.cache
def worker(slots: int) -> Worker:
    """A rank that holds so many sequences at once."""
    shape = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), shape, agree=0.15)
        return load_worker(Path(directory), max_running=slots, max_model_len=32)


def next_laws(
    rank: Worker, streams: Sequence[Stream], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The target's law of the token after PROMPT and each stream, at temperature 1, [streams, V]."""
    traces = trace_sequences(rank.rank.model, rank.rank.ops, [PROMPT + stream for stream in streams], lambda i: 99)
    ones = torch.ones(len(streams))
    cuts = RowParams(
        temperature=ones,
        top_k=(ones * top_k).long(),
        top_p=ones * top_p,
        min_p=ones * min_p,
        typical_p=ones,
    )
    return target_law(torch.stack([trace.logits[-1] for trace in traces]), cuts, any_sampled=True, any_sorted=True)


def exact_law(rank: Worker, depth: int) -> dict[Stream, float]:
    """P(first `depth` tokens) under CUTS."""
    law: dict[Stream, float] = {(): 1.0}
    for _ in range(depth):
        law = {
            (*stream, token): probability * float(law_V[token])
            for (stream, probability), law_V in zip(law.items(), next_laws(rank, list(law), **CUTS), strict=True)
            for token in law_V.nonzero().flatten().tolist()
        }
    return law
