"""Sampling defaults that a checkpoint recommends, read from its generation_config.json. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.front.files import read_object
from workers.plan import LoadError

MIN_REPETITION = 2.0**-7
"""Logits divided by far less leave float32."""
MAX_REPETITION = 100.0
KINDS = {"temperature": float, "top_k": int, "top_p": float, "repetition_penalty": float}
"""What is read."""
MOST = 1e9
"""Past this no number means anything here; those of JSON may be larger than a float holds, or NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of fields that a request leaves out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, directory: Path) -> SamplingDefaults:
        """The defaults of a checkpoint directory; our own where it has no opinion.

        `do_sample` is not read: it steers transformers' own loop, and checkpoints ship false beside a temperature.

        Raises LoadError that names the file and the key.
        """
        path = directory / "generation_config.json"
        config = read_object(path)
        given = {key: config[key] for key in KINDS if config.get(key) is not None}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise LoadError(f"{path}: {key}: {value!r} is not a number")
            if not -MOST <= value <= MOST:
                raise LoadError(f"{path}: {key}: {value!r} is out of range")
        defaults = cls(**{key: KINDS[key](value) for key, value in given.items()})
        ranges = {
            "temperature": defaults.temperature >= 0,
            "top_k": defaults.top_k >= 0,
            "top_p": 0 < defaults.top_p <= 1,
            "repetition_penalty": MIN_REPETITION <= defaults.repetition_penalty <= MAX_REPETITION,
        }
        for key, is_sound in ranges.items():
            if not is_sound:
                raise LoadError(f"{path}: {key}: {given[key]!r} is out of range")
        return defaults
