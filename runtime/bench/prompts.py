"""Turns a workload into the ids that are sent, and checks them against the model that is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.bench.workload import Prompt, WorkloadError

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2
    from runtime.front.client import OutriderClient
    from runtime.front.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Ids and longest completion of each prompt, in order."""

    ids: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]


async def prompts_for(
    client: OutriderClient,
    model: inference_pb2.GetModelResponse,
    prompts: Sequence[Prompt],
    *,
    longest: int | None,
    max_tokens: int,
) -> Prompts:
    """Texts become ids once, before anything is measured: what tokenising costs is in no figure.

    longest: tokens kept of a prompt, from its start. max_tokens: of prompts that name none. Raises WorkloadError for
    prompts that the model cannot take.
    """
    ids = []
    for prompt in prompts:
        found = await client.tokenize(prompt.content) if isinstance(prompt.content, str) else prompt.content
        ids.append(tuple(found[:longest]))
    limits = tuple(max_tokens if prompt.max_tokens is None else prompt.max_tokens for prompt in prompts)
    for number, (prompt, one, limit) in enumerate(zip(prompts, ids, limits, strict=True), 1):
        where = prompt.where or f"prompt {number}"
        if not one:
            raise WorkloadError(f"{where}: has no tokens; give it some text")
        if max(one) >= model.vocab_size:
            raise WorkloadError(
                f"{where}: id {max(one)} is past the vocabulary of {model.vocab_size} ids; give ids below it"
            )
        if len(one) + limit > model.context_length:
            raise WorkloadError(
                f"{where}: {len(one)} tokens and {limit} more are past the context of {model.context_length}; "
                "cut prompts with --prompt-tokens or lower --max-tokens (or the max_tokens of its line)"
            )
    return Prompts(ids=tuple(ids), max_tokens=limits)


def plain_vocabulary(tokenizer: Tokenizer, model: inference_pb2.GetModelResponse) -> list[int]:
    """Ids that stand for text: neither special ones, which decode to nothing, nor those that end a sequence."""
    ends = set(model.eos_token_ids)
    return [token for token in range(model.vocab_size) if token not in ends and tokenizer.decode([token])]
