"""Sampling defaults that a checkpoint recommends, read from its generation_config.json. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.front.files import read_object
from workers.plan import LoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of fields that a request leaves out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def load(cls, directory: Path) -> SamplingDefaults:
        """The defaults of a checkpoint directory; our own where it has no opinion.

        `do_sample` is not read: it steers transformers' own loop, and checkpoints ship false beside a temperature.

        Raises LoadError that names the file and the key.
        """
        path = directory / "generation_config.json"
        config = read_object(path)
        given = {key: config[key] for key in ("temperature", "top_k", "top_p") if config.get(key) is not None}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise LoadError(f"{path}: {key}: {value!r} is not a number")
        kinds = {"temperature": float, "top_k": int, "top_p": float}
        defaults = cls(**{key: kinds[key](value) for key, value in given.items()})
        ranges = {
            "temperature": 0 <= defaults.temperature < float("inf"),
            "top_k": defaults.top_k >= 0,
            "top_p": 0 < defaults.top_p <= 1,
        }
        for key, is_sound in ranges.items():
            if not is_sound:
                raise LoadError(f"{path}: {key}: {given[key]!r} is out of range")
        return defaults
