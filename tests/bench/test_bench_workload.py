"""Workloads: the bundled ones, and files with every fault that a line can have."""

from __future__ import annotations

import pytest

from configs.load import demo_checkpoint
from outrider.v1 import inference_pb2
from runtime.bench.extras import Conversation
from runtime.bench.prompts import plain_vocabulary
from runtime.bench.workload import Prompt, WorkloadError, heldout, random_prompts, read_prompts
from runtime.front.tokenizer import Tokenizer


def test_the_held_out_prompts_are_texts():
    prompts = heldout()
    assert len(prompts) == 256
    assert all(isinstance(prompt.content, str) and prompt.max_tokens is None for prompt in prompts)


def test_a_file_gives_texts_and_ids_with_limits_of_their_own(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\u2028b"}\n\n{"token_ids": [5, 6], "max_tokens": 9}\r\n', encoding="utf-8-sig")
    assert [prompt.where for prompt in read_prompts(path)] == [f"{path}:1", f"{path}:3"]
    assert read_prompts(path) == [Prompt(content="a\u2028b"), Prompt(content=(5, 6), max_tokens=9)]


def test_a_file_gives_messages_predictions_and_schemas(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = (
        '{"messages": [{"role": "user", "content": "hello"}], "json_schema": {"type": "null"}}',
        '{"prompt": "x", "prediction": "some text", "max_tokens": 9}',
        '{"token_ids": [5], "prediction": [6, 7]}',
    )
    path.write_text("\n".join(lines))
    assert read_prompts(path) == [
        Prompt(content=Conversation((("user", "hello"),)), json_schema='{"type": "null"}'),
        Prompt(content="x", prediction="some text", max_tokens=9),
        Prompt(content=(5,), prediction=(6, 7)),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ("[1]", "a list where an object belongs"),
        (
            '{"text": "x"}',
            "unknown key 'text'; keys are prompt, token_ids, messages, max_tokens, prediction and json_schema",
        ),
        ("{}", "give either prompt, token_ids or messages"),
        ('{"prompt": "x", "token_ids": [1]}', "give either prompt, token_ids or messages"),
        ('{"prompt": "x", "messages": []}', "give either prompt, token_ids or messages"),
        ('{"messages": []}', "messages is not a list, or empty"),
        ('{"messages": "x"}', "messages is not a list, or empty"),
        ('{"messages": [{"role": "user"}]}', "messages[0] is not an object with role and content, and nothing else"),
        ('{"messages": [{"role": "user", "content": 1}]}', "messages[0].content is not text, or empty"),
        ('{"messages": [{"role": "u", "content": "x", "name": "y"}]}', "messages[0] is not an object with role"),
        ('{"prompt": "x", "prediction": ""}', "prediction is not text, or empty"),
        ('{"prompt": "x", "prediction": null}', "prediction is not a list of whole numbers, or empty"),
        ('{"prompt": "x", "prediction": [1.5]}', "prediction is not a list of whole numbers"),
        ('{"prompt": "x", "json_schema": "{}"}', "json_schema is not an object; give a JSON Schema as it is"),
        ('{"prompt": ""}', "prompt is not text, or empty"),
        ('{"prompt": 3}', "prompt is not text, or empty"),
        ('{"prompt": "\\ud800"}', "prompt is not text, or empty"),
        ('{"token_ids": []}', "token_ids is not a list of whole numbers, or empty"),
        ('{"token_ids": [1, true]}', "token_ids is not a list of whole numbers"),
        ('{"token_ids": [-1]}', "token_ids is not a list of whole numbers"),
        ('{"prompt": "x", "max_tokens": 1}', "max_tokens is 1; give a whole number, 2 or more"),
        ('{"prompt": "x", "max_tokens": "9"}', "max_tokens is '9'"),
    ],
)
def test_a_faulty_line_is_named_with_its_number_and_a_remedy(tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(WorkloadError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:3: {words}")


@pytest.mark.parametrize(
    ("content", "words"), [(b"\n\n", "holds no prompt"), (b"\xff\xfe", "not UTF-8 text"), (None, "No such file")]
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, content, words):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WorkloadError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}: {words}")


def test_random_prompts_are_the_same_for_a_seed_and_use_the_whole_vocabulary():
    vocabulary = range(10, 40)
    prompts = random_prompts(vocabulary, 12, seed=5)
    assert prompts == random_prompts(vocabulary, 12, seed=5)
    assert prompts != random_prompts(vocabulary, 12, seed=6)
    assert {len(prompt.content) for prompt in prompts} == {12}
    assert {token for prompt in prompts for token in prompt.content} == set(vocabulary)
    with pytest.raises(WorkloadError, match="--prompts FILE"):
        random_prompts([], 12, seed=5)


def test_the_plain_vocabulary_has_no_special_tokens_and_no_ends():
    tokenizer = Tokenizer.load(demo_checkpoint())
    model = inference_pb2.GetModelResponse(vocab_size=4096, eos_token_ids=[300])
    plain = plain_vocabulary(tokenizer, model)
    assert 300 not in plain
    assert all(tokenizer.decode([token]) for token in plain)
    special = set(range(4096)) - set(plain) - {300}
    assert special, "the demo's tokenizer has special tokens"
    assert len(special) < 64
