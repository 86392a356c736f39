"""Requests of vllm.grpc.engine as ours, so that one set of checks holds for both, and errors back under their names.

Most fields of this face are plain scalars of proto3, and their zero stands for "not given". What it means then is
vLLM's choice, not the checkpoint's; gateways read the checkpoint's defaults from GetModelInfo and fill them in.

temperature absent   1            top_k 0                0, which keeps all
top_p 0              1            repetition_penalty 0   1
n 0                  1            max_tokens absent      what the context leaves behind the prompt, and one frame
                                                         can tell the log-probabilities of
seed absent, or -1   drawn        skip_special_tokens, spaces_between_special_tokens: no ids depend on them
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from outrider.v1 import inference_pb2, types_pb2
from runtime.front.bounds import LOGPROBS_LIMIT_BYTES, logprobs_bytes
from runtime.front.convert import ServedModel, check_room, refuse_unknown_fields
from runtime.front.errors import InvalidRequest, NotServed
from runtime.front.sampling_fields import MAX_BIAS, MAX_BIASES, MAX_CHOICES, MAX_CONSTRAINT_BYTES
from runtime.request import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

NO_SEED = -1
"""vLLM's word for a seed that it is to draw."""

_NOT_SERVED = {
    "kv_transfer_params": "caches are not handed over between servers",
    "kv_transfer_params_json": "caches are not handed over between servers",
    "mm_inputs": "images, video and sound are not served; send text alone",
    "extra_mm_inputs": "images, video and sound are not served; send text alone",
    "media_refs": "images, video and sound are not served; send text alone",
}
_NOT_SERVED_SAMPLING = {
    "truncate_prompt_tokens": "prompts are never cut; send as much of it as is to be read",
    "structural_tag": "structural tags are not followed; say it with json_schema, regex, grammar or choice",
}

_THEIR_NAMES = {
    "constraint.choice.texts": "sampling_params.choice.choices",
    "constraint.lark": "sampling_params.grammar",
    "constraint": "sampling_params",
    "sampling": "sampling_params",
    "stopping": "sampling_params",
    "stopping.include_stop": "sampling_params.include_stop_str_in_output",
    "n": "sampling_params.n",
    "logprobs": "sampling_params.logprobs",
    "prompt_logprobs": "sampling_params.prompt_logprobs",
    "token_ids": "tokenized.input_ids",
    "token_ids.ids": "tokenized.input_ids",
    "input.token_ids": "tokenized.input_ids",
}

MAX_EBNF_BYTES = 16 * 1024
MAX_EBNF_RULES = 256
"""What it takes to read EBNF grows with both together: half a second at the most."""

_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


@contextmanager
def under_their_names() -> Iterator[None]:
    """A field that is refused is named as the callers of this face know it."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(their_name(error.field), error.problem) from None


def their_name(field: str) -> str:
    """The path in this face's request of what has a path in ours: of the longest part that has a name of its own."""
    head, rest = field, ""
    while head:
        if head in _THEIR_NAMES:
            return _THEIR_NAMES[head] + rest
        cut = max(head.rfind("."), head.rfind("["), 0)
        head, rest = field[:cut], field[cut:]
    return field


async def read_request(message: vllm.GenerateRequest, model: ServedModel) -> inference_pb2.GenerateRequest:
    """The same request as one of ours, which has yet to be checked but for what ours has no field for.

    Raises InvalidRequest under this face's names, or NotServed.
    """
    refuse_unknown_fields(message)
    params = message.sampling_params
    _refuse_what_is_not_served(message)
    _check_counts(params)
    request = inference_pb2.GenerateRequest(
        request_id=message.request_id or None,
        sampling=_sampling_of(params),
        stopping=_stopping_of(message, model),
        constraint=await _constraint_of(params),
        n=params.n or 1,
        logprobs=_num_logprobs(params, "logprobs"),
        prompt_logprobs=_num_logprobs(params, "prompt_logprobs"),
        stream=message.stream,
    )
    match message.WhichOneof("input"):
        case "tokenized":
            check_room("tokenized.input_ids", len(message.tokenized.input_ids), model)
            request.token_ids.ids.extend(message.tokenized.input_ids)
        case "text":
            request.text = message.text
        case _:
            raise InvalidRequest("input", "none is given; set tokenized or text")
    return request


def _refuse_what_is_not_served(message: vllm.GenerateRequest) -> None:
    for field, _ in message.ListFields():
        if field.name in _NOT_SERVED:
            raise NotServed(f"{field.name}: {_NOT_SERVED[field.name]}")
    for name, why in _NOT_SERVED_SAMPLING.items():
        if message.sampling_params.HasField(name):
            raise NotServed(f"sampling_params.{name}: {why}")


def check_rank(message: vllm.GenerateRequest, num_ranks: int) -> None:
    """Raises InvalidRequest or NotServed for a data-parallel rank that is not where the request would go anyway."""
    if not message.HasField("data_parallel_rank"):
        return
    rank = message.data_parallel_rank
    if not 0 <= rank < num_ranks:
        raise InvalidRequest("data_parallel_rank", f"{rank} is no rank; there are {num_ranks}, from 0")
    if num_ranks > 1:
        raise NotServed("data_parallel_rank: the server spreads requests over its ranks itself; leave it out")


def _check_counts(params: vllm.SamplingParams) -> None:
    """How many entries lists have, before any is copied. Raises InvalidRequest."""
    for name, entries, most in (
        ("stop", params.stop, MAX_STOP_STRINGS),
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", params.logit_bias, MAX_BIASES),
        ("choice.choices", params.choice.choices, MAX_CHOICES),
    ):
        if len(entries) > most:
            raise InvalidRequest(f"sampling_params.{name}", f"{len(entries)} entries; at most {most} are taken")


def _sampling_of(params: vllm.SamplingParams) -> types_pb2.Sampling:
    """Every field set, so that no default of the checkpoint's comes in."""
    has_seed = params.HasField("seed") and params.seed != NO_SEED
    return types_pb2.Sampling(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        # Other negative ones keep a place of their own.
        seed=params.seed % 2**64 if has_seed else None,
        logit_bias=_biases_of(params),
    )


def _biases_of(params: vllm.SamplingParams) -> dict[int, float]:
    for token_id, bias in params.logit_bias.items():
        field = f"sampling_params.logit_bias[{token_id}]"
        if token_id < 0:
            raise InvalidRequest(field, "is no token id; ids go from 0")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(field, f"{bias:g} is not from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return dict(params.logit_bias)


def _stopping_of(message: vllm.GenerateRequest, model: ServedModel) -> types_pb2.Stopping:
    params = message.sampling_params
    if params.HasField("max_tokens") and not params.max_tokens:
        raise InvalidRequest(
            "sampling_params.max_tokens", "must be at least 1; leave it out for all that there is room for"
        )
    return types_pb2.Stopping(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else _most_tokens(message, model),
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop=params.include_stop_str_in_output,
    )


def _most_tokens(message: vllm.GenerateRequest, model: ServedModel) -> int:
    """Of output, where the caller sets no limit: whatever the context leaves, but for log-probabilities that are not
    streamed. Those have one frame, and who asks for a few words with them is not to be refused for its size."""
    params = message.sampling_params
    if message.stream or not params.HasField("logprobs"):
        return model.max_model_len
    left_bytes = LOGPROBS_LIMIT_BYTES
    if params.HasField("prompt_logprobs"):
        num_prompt = len(message.tokenized.input_ids)
        left_bytes -= logprobs_bytes(num_prompt, max(0, params.prompt_logprobs), model.vocab_size)
    most = left_bytes // logprobs_bytes(1, max(0, params.logprobs), model.vocab_size)
    return max(1, min(most, model.max_model_len))


def _num_logprobs(params: vllm.SamplingParams, name: str) -> int | None:
    if not params.HasField(name):
        return None
    number: int = getattr(params, name)
    if number < 0:
        raise InvalidRequest(f"sampling_params.{name}", f"{number}: the whole vocabulary is not reported; say how many")
    return number


async def _constraint_of(params: vllm.SamplingParams) -> types_pb2.Constraint | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return types_pb2.Constraint(json_schema=params.json_schema)
        case "json_object":
            return types_pb2.Constraint(json_object=params.json_object)
        case "regex":
            return types_pb2.Constraint(regex=params.regex)
        case "choice":
            return types_pb2.Constraint(choice=types_pb2.Choices(texts=params.choice.choices))
        case _:
            return types_pb2.Constraint(lark=await _lark_of(params.grammar))


async def _lark_of(grammar: str) -> str:
    """A grammar in Lark as it is; one in EBNF, as llama.cpp and XGrammar write it, in Lark. Raises InvalidRequest."""
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_CONSTRAINT_BYTES or not (num_rules := len(_EBNF_RULE.findall(grammar))):
        return grammar
    if num_bytes > MAX_EBNF_BYTES or num_rules > MAX_EBNF_RULES:
        raise InvalidRequest(
            "sampling_params.grammar",
            f"{num_rules} rules of EBNF in {num_bytes} bytes; at most {MAX_EBNF_RULES} in {MAX_EBNF_BYTES} are taken, "
            "and more of Lark",
        )
    return await asyncio.to_thread(_lark_of_ebnf, grammar)


def _lark_of_ebnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    field = "sampling_params.grammar"
    try:
        # The directive it begins with says nothing.
        return gbnf_to_lark(grammar).removeprefix("%llguidance {}\n\n")
    except (RecursionError, IndexError):
        raise InvalidRequest(field, "this EBNF is nested too deeply, or ends too early; simplify it") from None
    except Exception as error:  # the library raises bare Exception, whatever is wrong
        raise InvalidRequest(field, f"this EBNF cannot be read: {error}; correct it, or send Lark") from None
