"""Sampling defaults of a checkpoint: read where they are numbers, named by file and key where they are none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from outrider.v1.inference_pb2 import GenerateRequest
from outrider.v1.types_pb2 import Sampling
from runtime.front.convert import ServedModel, options_of
from runtime.front.defaults import SamplingDefaults
from workers.demands import NO_SHAPING
from workers.plan import LoadError


def served(defaults: SamplingDefaults) -> ServedModel:
    return ServedModel(
        name="demo",
        vocab_size=27,
        max_model_len=64,
        eos_token_ids=(26,),
        default_max_tokens=lambda: 16,
        defaults=defaults,
    )


def write_defaults(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_a_repetition_penalty_of_the_checkpoint_is_a_default(tmp_path: Path) -> None:
    model = served(SamplingDefaults.load(write_defaults(tmp_path, repetition_penalty=1.5)))
    assert options_of(GenerateRequest(), "r", model).sampling.shaping.repetition == 1.5
    given = GenerateRequest(sampling=Sampling(repetition_penalty=1))
    assert options_of(given, "r", model).sampling.shaping == NO_SHAPING


@pytest.mark.parametrize("key", ["temperature", "top_k", "top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 10**400, "1", True, [1]])
def test_defaults_that_are_no_number_are_refused_by_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(LoadError, match=rf"generation_config\.json: {key}: .* is (out of range|not a number)"):
        SamplingDefaults.load(write_defaults(tmp_path, **{key: value}))
