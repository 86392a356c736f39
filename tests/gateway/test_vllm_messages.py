"""From this face's requests to ours: zeros that mean "not given", names of fields, and what is refused."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from gateway.vllm_face import message_for
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from outrider.v1 import inference_pb2, types_pb2
from runtime.front import convert
from runtime.front.convert import ServedModel
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import InvalidRequest, NotServed, OutriderError
from runtime.front.vllm.messages import check_rank, read_request, their_name, under_their_names
from workers.demands import Constraint

MODEL = ServedModel(
    name="demo",
    vocab_size=4096,
    max_model_len=512,
    eos_token_ids=(0,),
    default_max_tokens=16,
    # None of these may ever come in: what a zero means on this face is not the checkpoint's business.
    defaults=SamplingDefaults(temperature=0.3, top_k=7, top_p=0.5, repetition_penalty=1.5),
)


def read(message: vllm.GenerateRequest) -> inference_pb2.GenerateRequest:
    return asyncio.run(read_request(message, MODEL))


def options_of(message: vllm.GenerateRequest) -> convert.GenerateOptions:
    with under_their_names():
        return convert.options_of(read(message), "r", MODEL)


def refusal_of(message: vllm.GenerateRequest) -> tuple[type[OutriderError], str]:
    with pytest.raises(OutriderError) as caught:
        options_of(message)
    return type(caught.value), str(caught.value)


def test_a_request_that_names_nothing_is_what_vllm_makes_of_it() -> None:
    options = options_of(vllm.GenerateRequest(text="x"))
    sampling, stopping = options.sampling, options.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert sampling.shaping.repetition == 1.0
    assert (options.n, options.whole, options.max_drafts, options.priority) == (1, True, None, 0)
    # As much as the context leaves; it is clipped where the prompt is known.
    assert stopping.max_tokens == MODEL.max_model_len
    assert stopping.eos_token_ids == MODEL.eos_token_ids
    assert options.report.num_logprobs is None
    assert not sampling.coupled, "no seed was given"


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"logprobs": 20}, {"logprobs": 5, "prompt_logprobs": 5}])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_no_limit_are_as_many_as_one_frame_holds(params: dict[str, int], stream: bool) -> None:
    """A chat without max_tokens is the usual one, and models have contexts beyond what a frame can tell of."""
    model = replace(MODEL, vocab_size=151_936, max_model_len=262_144)
    message = message_for(ids=(1,) * 100, stream=stream, **params)
    options = convert.options_of(asyncio.run(read_request(message, model)), "r", model)
    prompt = tuple(message.tokenized.input_ids)
    request = convert.request_of(options, prompt, field="token_ids", uid=1, model=model)
    most = request.stopping.max_tokens
    if stream:
        assert most == model.max_model_len - len(prompt)
        return
    assert 8_000 < most < model.max_model_len - len(prompt)
    message.sampling_params.max_tokens = most + 200
    options = convert.options_of(asyncio.run(read_request(message, model)), "r", model)
    with pytest.raises(InvalidRequest, match="for less output, or stream it"):
        convert.request_of(options, prompt, field="token_ids", uid=1, model=model)


def test_zeros_that_were_given_are_the_same_as_none() -> None:
    zeros: dict[str, Any] = dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "n"), 0)
    given = options_of(message_for(**zeros, frequency_penalty=0, presence_penalty=0, seed=5))
    assert given.sampling == options_of(message_for(seed=5)).sampling


def test_a_temperature_of_zero_is_greedy_and_not_the_default() -> None:
    assert options_of(message_for(temperature=0)).sampling.is_greedy


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (5, 5), (2**31 - 1, 2**31 - 1), (-2, 2**64 - 2), (-(2**31), 2**64 - 2**31)]
)
def test_seeds_keep_apart(seed: int, expected: int) -> None:
    sampling = options_of(message_for(seed=seed)).sampling
    assert (sampling.seed, sampling.coupled) == (expected, True)


def test_minus_one_is_no_seed() -> None:
    assert len({options_of(message_for(seed=-1)).sampling.seed for _ in range(2)}) == 2


def test_every_field_that_is_served_comes_through() -> None:
    options = options_of(
        message_for(
            temperature=0.5,
            top_p=0.25,
            top_k=9,
            min_p=0.125,
            frequency_penalty=-1.5,
            presence_penalty=0.5,
            repetition_penalty=1.25,
            max_tokens=40,
            min_tokens=3,
            stop=["a", "b"],
            stop_token_ids=[7, 8],
            ignore_eos=True,
            n=3,
            logprobs=2,
            prompt_logprobs=0,
            include_stop_str_in_output=True,
            logit_bias={5: 1.5},
            regex="a+",
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            grammar_from_first_token=True,
        )
    )
    sampling, stopping, shaping = options.sampling, options.stopping, options.sampling.shaping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 9, 0.125)
    assert (shaping.frequency, shaping.presence, shaping.repetition) == (-1.5, 0.5, 1.25)
    assert shaping.bias == ((5, 1.5),)
    assert (stopping.max_tokens, stopping.min_tokens, stopping.include_stop) == (40, 3, True)
    assert (stopping.stop_strings, stopping.stop_token_ids, stopping.eos_token_ids) == (("a", "b"), (7, 8), ())
    assert (options.n, options.whole) == (3, False)
    assert (options.report.num_logprobs, options.report.num_prompt_logprobs) == (2, 0)
    assert sampling.constraint == Constraint(kind="regex", text="a+")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"json_schema": '{"type": "object"}'}, Constraint(kind="json_schema", text='{"type": "object"}')),
        ({"json_object": True}, Constraint(kind="json_object")),
        ({"regex": "[ab]"}, Constraint(kind="regex", text="[ab]")),
        ({"grammar": 'start: "a"'}, Constraint(kind="lark", text='start: "a"')),
        ({"choice": vllm.ChoiceConstraint(choices=["x", "y"])}, Constraint(kind="choice", text='["x", "y"]')),
    ],
)
def test_constraints_are_ours(params: dict[str, Any], expected: Constraint) -> None:
    assert options_of(message_for(**params)).sampling.constraint == expected


def test_ebnf_becomes_lark_and_lark_stays_as_it_is() -> None:
    ebnf = '# yes or no\nroot ::= answer "." | other*\nanswer ::= "yes" | "no"\nother ::= root [0-9]\n'
    constraint = options_of(message_for(grammar=ebnf)).sampling.constraint
    assert constraint is not None
    words = constraint.text.replace("// yes or no", "").split()
    assert " ".join(words) == 'start: ANSWER "." | other* ANSWER: "yes" | "no" other: start /[0-9]/'
    for lark in ('start: "::="', 'start: x\nx: "root ::= 1"'):
        assert options_of(message_for(grammar=lark)).sampling.constraint == Constraint(kind="lark", text=lark)


@pytest.mark.parametrize(
    ("ebnf", "problem"),
    [
        ('root ::= "a', "Unexpected end of input"),
        ("root ::= missing", "Rule 'missing' not found"),
        ('main ::= "a"', "No 'root' rule found"),
        ("root ::= " + "(" * 9000, "nested too deeply"),
        ("root ::= a\n" * 257, "257 rules of EBNF in 2827 bytes; at most 256 in 16384 are taken, and more of Lark"),
        ("root ::= " + "a " * 9000, "1 rules of EBNF in 18009 bytes"),
        ('root ::= "\\', "ends too early"),
    ],
)
def test_ebnf_that_cannot_be_read_is_refused_with_the_reason(ebnf: str, problem: str) -> None:
    kind, text = refusal_of(message_for(grammar=ebnf))
    assert kind is InvalidRequest
    assert text.startswith("sampling_params.grammar: ")
    assert problem in text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (vllm.GenerateRequest(), "input: none is given; set tokenized or text"),
        (message_for(top_p=2), "sampling_params.top_p: 2 is not above 0"),
        (message_for(top_p=math.nan), "sampling_params.top_p: nan is not above 0"),
        (message_for(temperature=-1), "sampling_params.temperature: -1 is not 0"),
        (message_for(min_p=1.5), "sampling_params.min_p: 1.5 is not from 0 to 1"),
        (message_for(repetition_penalty=-1), "sampling_params.repetition_penalty: -1 is not from"),
        (message_for(frequency_penalty=3), "sampling_params.frequency_penalty: 3 is not from"),
        (message_for(max_tokens=0), "sampling_params.max_tokens: must be at least 1"),
        (message_for(max_tokens=2, min_tokens=3), "sampling_params.min_tokens: 3 is above max_tokens, 2"),
        (message_for(stop=[""]), "sampling_params.stop[0]: is empty"),
        (message_for(stop=["x"] * 17), "sampling_params.stop: 17 entries; at most 16 are taken"),
        (message_for(stop_token_ids=[1, 4096]), "sampling_params.stop_token_ids[1]: 4096 is outside the vocabulary"),
        (message_for(stop_token_ids=range(99)), "sampling_params.stop_token_ids: 99 entries"),
        (message_for(logit_bias={4096: 1}), "sampling_params.logit_bias[4096]: 4096 is outside the vocabulary"),
        (message_for(logit_bias={-1: 1}), "sampling_params.logit_bias[-1]: is no token id"),
        (message_for(logit_bias={1: 200}), "sampling_params.logit_bias[1]: 200 is not from -100 to 100"),
        (message_for(logit_bias={1: math.nan}), "sampling_params.logit_bias[1]: nan is not from -100 to 100"),
        (message_for(n=65), "sampling_params.n: 65 is not from 1 to 64"),
        (message_for(logprobs=-1), "sampling_params.logprobs: -1: the whole vocabulary is not reported"),
        (message_for(prompt_logprobs=-1), "sampling_params.prompt_logprobs: -1: the whole vocabulary"),
        (message_for(logprobs=21), "sampling_params.logprobs: 21 is above 20"),
        (message_for(json_schema="{"), "sampling_params.json_schema: is no JSON"),
        (message_for(json_object=False), "sampling_params.json_object: is false"),
        (message_for(regex=" "), "sampling_params.regex: is empty"),
        (message_for(choice=vllm.ChoiceConstraint()), "sampling_params.choice.choices: is empty"),
        (message_for(choice=vllm.ChoiceConstraint(choices=["a", ""])), "sampling_params.choice.choices[1]: is empty"),
        (message_for(ids=range(512)), "tokenized.input_ids: the prompt has 512 tokens and the context holds 512"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named_as_callers_of_this_face_know_it(message: vllm.GenerateRequest, text: str) -> None:
    kind, told = refusal_of(message)
    assert kind is InvalidRequest
    assert told.startswith(text)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (vllm.GenerateRequest(text="x", kv_transfer_params_json=""), "kv_transfer_params_json"),
        (vllm.GenerateRequest(text="x", kv_transfer_params=vllm.KvTransferParams()), "kv_transfer_params"),
        (vllm.GenerateRequest(text="x", mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
        (vllm.GenerateRequest(text="x", extra_mm_inputs=[vllm.MultimodalInputs()]), "extra_mm_inputs"),
        (vllm.GenerateRequest(text="x", media_refs=vllm.MediaRefs()), "media_refs"),
        (message_for(truncate_prompt_tokens=0), "sampling_params.truncate_prompt_tokens"),
        (message_for(structural_tag="{}"), "sampling_params.structural_tag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_server_does_is_refused_by_name(message: vllm.GenerateRequest, field: str) -> None:
    kind, told = refusal_of(message)
    assert kind is NotServed
    assert told.startswith(f"{field}: ")


def test_a_field_that_is_newer_than_the_stubs_is_refused_by_number() -> None:
    message = message_for()
    message.sampling_params.MergeFromString(bytes([0x98, 0x06, 0x01]))  # field 99, a varint
    kind, told = refusal_of(message)
    assert kind is InvalidRequest
    assert told.startswith("sampling_params: field number 99 is not known to this server")


def test_every_field_of_the_request_is_either_served_or_refused() -> None:
    """Of a newer smg-grpc-proto, a field that this face has not heard of would be dropped."""
    known_params = {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("ignore_eos", "n", "logprobs", "prompt_logprobs", "seed", "include_stop_str_in_output", "logit_bias"),
        *("truncate_prompt_tokens", "grammar_from_first_token", "json_schema", "regex", "grammar", "structural_tag"),
        *("json_object", "choice"),
    }
    known = {
        *("request_id", "tokenized", "text", "sampling_params", "stream", "kv_transfer_params", "mm_inputs"),
        *("extra_mm_inputs", "kv_transfer_params_json", "data_parallel_rank", "media_refs"),
    }
    assert {field.name for field in vllm.SamplingParams.DESCRIPTOR.fields} == known_params
    assert {field.name for field in vllm.GenerateRequest.DESCRIPTOR.fields} == known


def test_ranks_are_chosen_by_the_server() -> None:
    def pinned(rank: int) -> vllm.GenerateRequest:
        return vllm.GenerateRequest(text="x", data_parallel_rank=rank)

    check_rank(vllm.GenerateRequest(text="x"), 4)
    check_rank(pinned(0), 1)
    with pytest.raises(NotServed, match="data_parallel_rank: the server spreads"):
        check_rank(pinned(1), 2)
    for rank in (-1, 1):
        with pytest.raises(InvalidRequest, match=f"data_parallel_rank: {rank} is no rank; there are 1"):
            check_rank(pinned(rank), 1)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.logit_bias[7]", "sampling_params.logit_bias[7]"),
        ("stopping.max_tokens", "sampling_params.max_tokens"),
        ("stopping.include_stop", "sampling_params.include_stop_str_in_output"),
        ("constraint", "sampling_params"),
        ("constraint.lark", "sampling_params.grammar"),
        ("constraint.choice.texts[3]", "sampling_params.choice.choices[3]"),
        ("token_ids.ids[9]", "tokenized.input_ids[9]"),
        ("token_ids", "tokenized.input_ids"),
        ("text", "text"),
        ("x-request-id", "x-request-id"),
        ("normal", "normal"),
    ],
)
def test_names_are_translated_by_their_longest_part(ours: str, theirs: str) -> None:
    assert their_name(ours) == theirs


SCALARS = {
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=8),
}


@st.composite
def wild_messages(draw: st.DrawFn) -> vllm.GenerateRequest:
    """Any scalar fields with any values."""
    message = vllm.GenerateRequest()
    for part in (message, message.sampling_params):
        for field in part.DESCRIPTOR.fields:
            if field.message_type is None and not field.is_repeated and draw(st.integers(0, 3)) == 0:
                setattr(part, field.name, draw(SCALARS[field.type]))
    message.sampling_params.stop.extend(draw(st.lists(st.text(max_size=3), max_size=3)))
    return message


@given(wild_messages())
def test_whatever_is_sent_is_read_or_refused_and_never_a_defect(message: vllm.GenerateRequest) -> None:
    try:
        request = read(message)
    except (InvalidRequest, NotServed):
        return
    assert isinstance(request, inference_pb2.GenerateRequest)
    for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
        assert request.sampling.HasField(name), "no default of the checkpoint's comes in"
    assert request.stopping.HasField("max_tokens")
    assert types_pb2.Sampling.FromString(request.sampling.SerializeToString()) is not None
