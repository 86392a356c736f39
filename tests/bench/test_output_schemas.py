"""The bundled schemas: whatever a model answers under them ends, and meets them."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from configs.load import demo_checkpoint
from runtime.bench.output_schemas import output_schemas
from runtime.front.tokenizer import Tokenizer
from workers.constraints.compiler import Compiler
from workers.demands import Constraint

EOS = 0
MOST_TOKENS = 200


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(demo_checkpoint() / "tokenizer.json", 4096, (EOS,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_checkpoint())


@pytest.mark.parametrize("schema", output_schemas())
def test_an_answer_of_any_tokens_that_may_stand_ends_and_meets_the_schema(schema, compiler, tokenizer):
    for seed in range(3):
        source, matcher = random.Random(seed), compiler.matcher(Constraint(kind="json_schema", text=schema))
        tokens: list[int] = []
        while not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            may_stand = [token for token in range(4096) if mask >> token & 1 and token != EOS]
            tokens.append(source.choice(may_stand))
            assert matcher.consume_token(tokens[-1])
            assert len(tokens) <= MOST_TOKENS
        text = tokenizer.decode(tokens)
        jsonschema.validate(json.loads(text), json.loads(schema))
        assert len(text) <= 200
        assert "\n" not in text
