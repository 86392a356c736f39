"""What gateways are told of the checkpoint: facts of its configuration, and its tokenizer's files as one archive.

Knows a directory and nothing of what is loaded from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2

from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import MissingFeature
from runtime.front.files import read_object

CHUNK_BYTES = 64 * 1024
"""Of the archive in one message."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)
"""Names and patterns of what a gateway may need to encode, decode and render chats as the checkpoint has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Of config.json, as far as it says so: -1 where it names no such token."""

    architectures: tuple[str, ...]
    bos_token_id: int
    pad_token_id: int

    @classmethod
    def load(cls, directory: Path) -> CheckpointFacts:
        """Raises LoadError where config.json is not JSON."""
        config = read_object(directory / "config.json")
        text = {**config, **_section(config, "text_config")}
        return cls(
            architectures=tuple(str(name) for name in config.get("architectures") or ()),
            bos_token_id=_token(text, "bos_token_id"),
            pad_token_id=_token(text, "pad_token_id"),
        )


def defaults_json(defaults: SamplingDefaults) -> str:
    """The checkpoint's sampling defaults that are not everybody's, as JSON; empty where there are none."""
    neutral = SamplingDefaults()
    own = {
        name: getattr(defaults, name)
        for name in SamplingDefaults.__slots__
        if getattr(defaults, name) != getattr(neutral, name)
    }
    return json.dumps(own, sort_keys=True) if own else ""


class TokenizerArchive:
    """The files of a checkpoint's tokenizer, zipped when somebody first asks for them, and kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._making: asyncio.Task[bytes] | None = None

    async def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Parts of the archive in order; the last one carries the SHA-256 of all. Raises MissingFeature."""
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(_zipped, self._directory))
            self._making.add_done_callback(self._forget_failure)
        # Whoever leaves early takes the archive from nobody else.
        archive = await asyncio.shield(self._making)
        digest = hashlib.sha256(archive).hexdigest()
        return (
            common_pb2.GetTokenizerChunk(
                data=archive[start : start + CHUNK_BYTES],
                sha256=digest if start + CHUNK_BYTES >= len(archive) else "",
            )
            for start in range(0, len(archive), CHUNK_BYTES)
        )

    def _forget_failure(self, making: asyncio.Task[bytes]) -> None:
        if making.cancelled() or making.exception() is not None:
            self._making = None


def _zipped(directory: Path) -> bytes:
    """Replicas of one checkpoint have one archive, and one fingerprint: files have no dates of their own in it.

    Raises MissingFeature where they are not there (any more).
    """
    paths = {path.name: path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()}
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in sorted(paths.items()):
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    except OSError as error:
        raise MissingFeature(f"the tokenizer's files cannot be read: {error.strerror}: {error.filename}") from None
    if "tokenizer.json" not in paths:
        raise MissingFeature("the checkpoint's directory holds no tokenizer.json any more; give the gateway a copy")
    return buffer.getvalue()


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _token(config: Mapping[str, Any], name: str) -> int:
    """The id, or the first of several."""
    value = config.get(name)
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and not isinstance(first, bool) else -1
