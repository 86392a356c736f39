"""What is asked: the demo's held-out text, a file of prompts, or ids drawn at random. Knows no server and no load."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.load import SettingsError, demo_checkpoint

RANDOM_PROMPTS = 256
"""As many as the held-out set has."""
RANDOM_PROMPT_TOKENS = 32
"""Length of a random prompt where none is given: about that of the held-out ones."""


class WorkloadError(SettingsError):
    """A workload that cannot be used. The text names the place and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """content: text, or token ids. max_tokens: of its completion; None takes that of the run. where: file and line."""

    content: str | tuple[int, ...]
    max_tokens: int | None = None
    where: str = field(default="", compare=False)


def heldout() -> list[Prompt]:
    """Text of the demo's corpus that its model never saw in training."""
    return read_prompts(demo_checkpoint() / "heldout.jsonl")


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
    """A prompt per line, as JSON: {"prompt": text} or {"token_ids": [...]}, with "max_tokens" if it has one of its own.

    Empty lines are skipped. Raises WorkloadError that names file, line and remedy.
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
    unknown = sorted(entry.keys() - {"prompt", "token_ids", "max_tokens"})
    if unknown:
        raise WorkloadError(f"unknown key {unknown[0]!r}; keys are prompt, token_ids and max_tokens")
    if ("prompt" in entry) == ("token_ids" in entry):
        raise WorkloadError("give either prompt or token_ids, and one of them only")
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and not _is_count(max_tokens, 2):
        raise WorkloadError(f"max_tokens is {max_tokens!r}; give a whole number, 2 or more")
    return Prompt(content=_content(entry), max_tokens=max_tokens)


def _content(entry: dict[str, Any]) -> str | tuple[int, ...]:
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text or _has_surrogates(text):
            raise WorkloadError("prompt is not text, or empty; give a string of characters")
        return text
    ids = entry["token_ids"]
    if not isinstance(ids, list) or not ids or not all(_is_count(one, 0) for one in ids):
        raise WorkloadError("token_ids is not a list of whole numbers, or empty; give ids of the model's vocabulary")
    return tuple(ids)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**32


def _has_surrogates(text: str) -> bool:
    """Halves of characters, which JSON can hold and no message can carry."""
    return any("\ud800" <= character <= "\udfff" for character in text)
