"""Turns a workload into the ids that are sent, and checks them against the model that is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.bench.completion import chat_of
from runtime.bench.extras import Conversation, Extras, Variant
from runtime.bench.workload import Prompt, WorkloadError

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2
    from runtime.front.client import OutriderClient
    from runtime.front.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Ids and longest completion of each prompt, in order. conversations, predictions, json_schemas: those of some, by
    number; a conversation is sent as it is, and its ids are what the server makes of it."""

    ids: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    conversations: Mapping[int, Conversation] = field(default_factory=dict)
    predictions: Mapping[int, str | tuple[int, ...]] = field(default_factory=dict)
    json_schemas: Mapping[int, str] = field(default_factory=dict)

    def content(self, number: int) -> Conversation | tuple[int, ...]:
        """What is sent as a prompt."""
        return self.conversations.get(number, self.ids[number])

    def extras(self, number: int, variant: Variant) -> Extras:
        """What is sent beside it."""
        if not variant.brings:
            return Extras(ngram=variant.ngram)
        return Extras(
            prediction=self.predictions.get(number, ()),
            json_schema=self.json_schemas.get(number, ""),
            ngram=variant.ngram,
        )


async def prompts_for(
    client: OutriderClient,
    model: inference_pb2.GetModelResponse,
    prompts: Sequence[Prompt],
    *,
    longest: int | None,
    max_tokens: int,
) -> Prompts:
    """Texts become ids once, before anything is measured: what tokenising costs is in no figure.

    longest: tokens kept of a prompt, from its start; a conversation is not cut. max_tokens: of prompts that name none.
    Raises WorkloadError for prompts that the model cannot take.
    """
    found = [await _ids(client, prompt) for prompt in prompts]
    ids = [one[:longest] for one in found]
    limits = tuple(max_tokens if prompt.max_tokens is None else prompt.max_tokens for prompt in prompts)
    for number, (prompt, whole, one, limit) in enumerate(zip(prompts, found, ids, limits, strict=True), 1):
        where = prompt.where or f"prompt {number}"
        if not one:
            raise WorkloadError(f"{where}: has no tokens; give it some text")
        if isinstance(prompt.content, Conversation) and len(one) < len(whole):
            raise WorkloadError(
                f"{where}: a conversation of {len(whole)} tokens, which --prompt-tokens {longest} does not cut; "
                "shorten it, or leave --prompt-tokens out"
            )
        if max(one) >= model.vocab_size:
            raise WorkloadError(
                f"{where}: id {max(one)} is past the vocabulary of {model.vocab_size} ids; give ids below it"
            )
        if len(one) + limit > model.context_length:
            raise WorkloadError(
                f"{where}: {len(one)} tokens and {limit} more are past the context of {model.context_length}; "
                "cut prompts with --prompt-tokens or lower --max-tokens (or the max_tokens of its line)"
            )
    numbered = list(enumerate(prompts))
    return Prompts(
        ids=tuple(ids),
        max_tokens=limits,
        conversations={i: prompt.content for i, prompt in numbered if isinstance(prompt.content, Conversation)},
        predictions={i: prompt.prediction for i, prompt in numbered if prompt.prediction},
        json_schemas={i: prompt.json_schema for i, prompt in numbered if prompt.json_schema},
    )


async def _ids(client: OutriderClient, prompt: Prompt) -> tuple[int, ...]:
    match prompt.content:
        case str():
            return tuple(await client.tokenize(prompt.content))
        case Conversation():
            return tuple(await client.tokenize_chat(chat_of(prompt.content)))
        case _:
            return prompt.content


def plain_vocabulary(tokenizer: Tokenizer, model: inference_pb2.GetModelResponse) -> list[int]:
    """Ids that stand for text: neither special ones, which decode to nothing, nor those that end a sequence."""
    ends = set(model.eos_token_ids)
    return [token for token in range(model.vocab_size) if token not in ends and tokenizer.decode([token])]
