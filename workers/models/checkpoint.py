"""A checkpoint directory: its configuration, and its tensors through memory mapping. Knows no parameter of ours.

model.safetensors                                                          one file, or
model.safetensors.index.json, model-00001-of-00002.safetensors, ...        shards, listed by the index
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import torch
from safetensors import SafetensorError, safe_open

from workers.models.config import MTP_PREFIX, Qwen3NextConfig, read_config
from workers.models.fields import read_json
from workers.plan import LoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class StoredTensor(Protocol):
    """One published tensor on disk. Indexing reads what is indexed, from mapped memory, and nothing else."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _File(Protocol):
    """What we use of a `safetensors.safe_open`, whose own stubs carry no types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> StoredTensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a file's header says of one tensor. `stored` is safetensors' name of its element type, such as "BF16"."""

    shape: tuple[int, ...]
    stored: str
    file: str


class Checkpoint:
    """An open checkpoint; a context manager that closes its files.

    config: read from the directory; its num_mtp_layers takes into account what the files hold.
    tensors: every tensor of the files, by published name.
    """

    def __init__(self, path: Path, config: Qwen3NextConfig, files: Mapping[str, _File], closing: contextlib.ExitStack):
        self.path = path
        self.config = config
        self._files = files
        self._closing = closing
        self.tensors: dict[str, TensorInfo] = {}
        for name, file in files.items():
            for key in file.keys():  # noqa: SIM118  a safe_open is no mapping
                stored = file.get_slice(key)
                self.tensors[key] = TensorInfo(shape=tuple(stored.get_shape()), stored=stored.get_dtype(), file=name)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Maps the files and reads their headers; no tensor is read yet.

        Raises LoadError for a missing directory or file, a shard that is truncated or not safetensors, an index that
        does not match its shards, and everything that `read_config` refuses.
        """
        read_config(path)  # A wrong directory or model type is reported before its files are.
        with contextlib.ExitStack() as stack:
            files = _open_files(path, stack)
            names = {key for file in files.values() for key in file.keys()}  # noqa: SIM118
            config = read_config(path, names)
            if config.num_mtp_layers and not any(name.startswith(MTP_PREFIX) for name in names):
                raise LoadError(
                    f"{path / 'config.json'}: num_nextn_predict_layers is {config.num_mtp_layers}, but the files "
                    f"hold no tensor {MTP_PREFIX}*; set it to 0 to serve without MTP drafts"
                )
            return cls(path, config, files, stack.pop_all())

    def stored(self, name: str) -> StoredTensor:
        """The tensor `name` on disk. What indexing it returns aliases the mapped file until it is copied."""
        return self._files[self.tensors[name].file].get_slice(name)

    def identity(self) -> str:
        """SHA-256, in hex, of config.json and of all tensors' names, shapes and element types; no weight is read. It
        tells models of different make apart, not two trainings of one."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"\n{name} {list(info.shape)} {info.stored}".encode())
        return digest.hexdigest()

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_files(path: Path, stack: contextlib.ExitStack) -> dict[str, _File]:
    """The single file, or every shard that the index lists; the single file wins, as it does elsewhere."""
    if (path / SINGLE_FILE).exists():
        return {SINGLE_FILE: _open_file(path / SINGLE_FILE, stack)}
    if not (path / INDEX_FILE).exists():
        raise LoadError(
            f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; only weights in safetensors files are served"
        )
    weight_map = _weight_map(path / INDEX_FILE)
    files: dict[str, _File] = {}
    for name in sorted(set(weight_map.values())):
        if not (path / name).is_file():
            count = sum(file == name for file in weight_map.values())
            raise LoadError(f"{path / name} is missing; {INDEX_FILE} lists {count} tensors in it, download it again")
        files[name] = _open_file(path / name, stack)
    _check_index(path, weight_map, {name: file.keys() for name, file in files.items()})
    return files


def _open_file(path: Path, stack: contextlib.ExitStack) -> _File:
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is truncated or not a safetensors file ({error}); download it again") from error
    return cast("_File", file)


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{path}: weight_map is missing or empty; it must map tensor names to file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise LoadError(f"{path}: weight_map places {tensor} in {name!r}; a file name without directory is needed")
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], held: Mapping[str, Sequence[str]]) -> None:
    """Every tensor lies in the shard that the index says, and no other lies there."""
    listed = set(weight_map.items())
    found = {(tensor, name) for name, tensors in held.items() for tensor in tensors}
    for tensor, name in sorted(listed - found):
        raise LoadError(f"{path / INDEX_FILE} places {tensor} in {name}, which does not hold it; download both again")
    for tensor, name in sorted(found - listed):
        raise LoadError(f"{path / name} holds {tensor}, which {INDEX_FILE} does not place there; download both again")
