"""What is asked: the demo's held-out text, by itself, constrained or in conversations, a file of prompts, or ids drawn
at random. Knows no server and no load."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

from configs.load import SettingsError, demo_checkpoint
from runtime.bench.extras import Conversation
from runtime.bench.output_schemas import output_schemas

Workload = Literal["code", "random", "code-edit", "json-schema", "chat"]

KEYS = ("prompt", "token_ids", "messages", "max_tokens", "prediction", "json_schema")
"""Of a line of a file of prompts."""

RANDOM_PROMPTS = 256
"""As many as the held-out set has."""
RANDOM_PROMPT_TOKENS = 32
"""Length of a random prompt where none is given: about that of the held-out ones."""


class WorkloadError(SettingsError):
    """A workload that cannot be used. The text names the place and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """content: text, token ids, or messages. max_tokens: of its completion; None takes that of the run. prediction,
    json_schema: as in Extras. where: file and line."""

    content: str | tuple[int, ...] | Conversation
    max_tokens: int | None = None
    prediction: str | tuple[int, ...] = ()
    json_schema: str = ""
    where: str = field(default="", compare=False)


def heldout() -> list[Prompt]:
    """Text of the demo's corpus that its model never saw in training."""
    return read_prompts(demo_checkpoint() / "heldout.jsonl")


def heldout_texts() -> list[str]:
    return [prompt.content for prompt in heldout() if isinstance(prompt.content, str)]


def constrained(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Each with one of the bundled schemas, in turns."""
    return [
        replace(prompt, json_schema=schema) for prompt, schema in zip(prompts, cycle(output_schemas()), strict=False)
    ]


def conversations(texts: Sequence[str]) -> list[Prompt]:
    """As many as texts: an instruction, then user and assistant by turns, 3, 5 and 7 messages; the user is last. Each
    begins where the one before it ended in the texts."""
    rest = cycle(texts)
    return [Prompt(content=_conversation(list(islice(rest, 3 + 2 * (i % 3))))) for i in range(len(texts))]


def _conversation(texts: Sequence[str]) -> Conversation:
    turns = zip(cycle(("user", "assistant")), texts, strict=False)
    return Conversation((("system", "You complete Python code."), *turns))


def random_prompts(vocabulary: Sequence[int], num_tokens: int, seed: int) -> list[Prompt]:
    """Ids drawn evenly from `vocabulary`: text without structure. The same for the same seed.

    What follows such a prompt is the model's own, and a greedy model repeats itself: drafts fail most where tokens are
    sampled, at a temperature near 1.
    """
    if not vocabulary:
        raise WorkloadError("--workload random: the vocabulary has no tokens beside special ones; use --prompts FILE")
    source = random.Random(seed)
    return [Prompt(content=tuple(source.choices(vocabulary, k=num_tokens))) for _ in range(RANDOM_PROMPTS)]


def read_prompts(path: Path) -> list[Prompt]:
    """A prompt per line, as JSON: {"prompt": text}, {"token_ids": [...]} or {"messages": [{"role": ..., "content":
    ...}]}.

    Beside it may stand "max_tokens", if it has one of its own, "prediction" (text, or a list of ids) and "json_schema"
    (an object). Empty lines are skipped. Raises WorkloadError that names file, line and remedy.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}; give the path of a JSONL file that can be read") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: not UTF-8 text; save the file as UTF-8") from None
    prompts = list(_prompts(path, text))
    if not prompts:
        raise WorkloadError(f'{path}: holds no prompt; put {{"prompt": "..."}} on a line')
    return prompts


def _prompts(path: Path, text: str) -> Iterator[Prompt]:
    # Not splitlines: a JSON text may hold other line ends, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield replace(_prompt(line), where=f"{path}:{number}")
            except WorkloadError as error:
                raise WorkloadError(f"{path}:{number}: {error}") from None


def _prompt(line: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"not JSON: {error}; one object per line") from None
    except RecursionError:
        raise WorkloadError("not JSON: nested too deep; one object per line") from None
    if not isinstance(entry, dict):
        raise WorkloadError(f'a {type(entry).__name__} where an object belongs, such as {{"prompt": "..."}}')
    unknown = sorted(entry.keys() - {*KEYS})
    if unknown:
        raise WorkloadError(f"unknown key {unknown[0]!r}; keys are {', '.join(KEYS[:-1])} and {KEYS[-1]}")
    if len(entry.keys() & {*KEYS[:3]}) != 1:
        raise WorkloadError("give either prompt, token_ids or messages, and one of them only")
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and not _is_count(max_tokens, 2):
        raise WorkloadError(f"max_tokens is {max_tokens!r}; give a whole number, 2 or more")
    return Prompt(
        content=_content(entry),
        max_tokens=max_tokens,
        prediction=_prediction(entry["prediction"]) if "prediction" in entry else (),
        json_schema=_json_schema(entry["json_schema"]) if "json_schema" in entry else "",
    )


def _content(entry: dict[str, Any]) -> str | tuple[int, ...] | Conversation:
    if "prompt" in entry:
        return _text("prompt", entry["prompt"])
    if "token_ids" in entry:
        return _ids("token_ids", entry["token_ids"])
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        raise WorkloadError('messages is not a list, or empty; give some, such as {"role": "user", "content": "..."}')
    return Conversation(tuple(_message(number, message) for number, message in enumerate(messages)))


def _message(number: int, message: object) -> tuple[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        raise WorkloadError(f"{where} is not an object with role and content, and nothing else; give both as texts")
    return _text(f"{where}.role", message["role"]), _text(f"{where}.content", message["content"])


def _prediction(value: object) -> str | tuple[int, ...]:
    return _text("prediction", value) if isinstance(value, str) else _ids("prediction", value)


def _json_schema(value: object) -> str:
    if not isinstance(value, dict):
        raise WorkloadError("json_schema is not an object; give a JSON Schema as it is, not as text")
    return json.dumps(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or _has_surrogates(value):
        raise WorkloadError(f"{name} is not text, or empty; give a string of characters")
    return value


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(_is_count(one, 0) for one in value):
        raise WorkloadError(f"{name} is not a list of whole numbers, or empty; give ids of the model's vocabulary")
    return tuple(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**32


def _has_surrogates(text: str) -> bool:
    """Halves of characters, which JSON can hold and no message can carry."""
    return any("\ud800" <= character <= "\udfff" for character in text)
