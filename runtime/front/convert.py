"""Wire messages to domain values and back; checks every field and applies every default. Knows no engine, no files.

A field that is absent takes its default; a plain zero is a value. What is wrong is refused by its path in the message,
with the remedy; what this server does not know is refused too, since dropping it would change what was asked for.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.v1 import inference_pb2, types_pb2
from parallel.mesh import Mesh
from runtime.front.bounds import MAX_CHAT_MESSAGES
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import InvalidRequest, MissingFeature, UnknownModel
from runtime.request import (
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Finish,
    FinishReason,
    Request,
    Round,
    SamplingParams,
    StopParams,
    Usage,
)
from runtime.stream.text_stream import Delta
from workers.plan import OracleDrafts, WorkerDescription

MIN_TEMPERATURE = 2.0**-20
"""About 1e-6. Below it, logits divided by the temperature leave float32; greedy is 0."""
MAX_TEMPERATURE = 1000.0

MAX_REQUEST_ID_CHARS = 256

MAX_UNKNOWN_BYTES = 4096
"""Unknown fields beyond this many bytes are refused without looking for the first: listing them takes long."""

REQUEST_ID_KEY = "x-request-id"
"""Metadata key of the request id, both ways."""

_FINISH_REASONS = {
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against, and what they get where they say nothing. takes_oracle: whether they may bring
    drafts of their own."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: int
    defaults: SamplingDefaults
    takes_oracle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """A checked request before its prompt is known in tokens. max_tokens, max_drafts: None where it names none."""

    request_id: str
    sampling: SamplingParams
    max_tokens: int | None
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    priority: int
    report_rounds: bool
    max_drafts: int | None
    oracle: OracleDrafts | None


def request_id_of(message: inference_pb2.GenerateRequest, metadata: Mapping[str, str | bytes]) -> str:
    """The caller's name for a request: the field, else `x-request-id`, else a new one. Raises InvalidRequest."""
    if message.HasField("request_id"):
        field, request_id = "request_id", message.request_id
    elif REQUEST_ID_KEY in metadata:
        field, request_id = REQUEST_ID_KEY, str(metadata[REQUEST_ID_KEY])
    else:
        return uuid.uuid4().hex
    # It travels back in metadata, which takes printable ASCII and trims spaces at the ends.
    is_sound = request_id.isascii() and request_id.isprintable() and request_id == request_id.strip()
    if not is_sound or not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            field,
            f"must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces at the ends; "
            "leave it out to have one made",
        )
    return request_id


def options_of(message: inference_pb2.GenerateRequest, request_id: str, model: ServedModel) -> GenerateOptions:
    """Everything but the prompt. Raises InvalidRequest, UnknownModel or MissingFeature."""
    check_counts(message, model)
    refuse_unknown_fields(message)
    if message.HasField("lora_adapter"):
        raise InvalidRequest("lora_adapter", "LoRA adapters are not served; leave it out")
    if message.HasField("model") and message.model != model.name:
        raise UnknownModel(f"model: {message.model!r} is not served here, {model.name!r} is")
    stopping = message.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidRequest("stopping.max_tokens", "must be at least 1; leave it out for the server's default")
    sampling = sampling_of(message.sampling, model)
    return GenerateOptions(
        request_id=request_id,
        sampling=sampling,
        max_tokens=max_tokens,
        eos_token_ids=() if stopping.ignore_eos else model.eos_token_ids,
        stop_token_ids=_stop_token_ids(stopping, model),
        stop_strings=_stop_strings(stopping),
        priority=message.priority,
        report_rounds=message.report_rounds,
        max_drafts=message.max_drafts if message.HasField("max_drafts") else None,
        oracle=_oracle(message.oracle, sampling, model) if message.HasField("oracle") else None,
    )


def check_counts(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, model: ServedModel) -> None:
    """The first check of a request: how many entries its lists have, before any is looked at. Raises InvalidRequest."""
    num_messages = len(message.chat.messages)
    if num_messages > MAX_CHAT_MESSAGES:
        raise InvalidRequest("chat.messages", f"{num_messages} messages; at most {MAX_CHAT_MESSAGES} are taken")
    if isinstance(message, inference_pb2.TokenizeRequest):
        return
    _check_room("token_ids", len(message.token_ids.ids), model)
    num_recorded = len(message.oracle.continuation)
    if num_recorded > model.max_model_len:
        raise InvalidRequest(
            "oracle.continuation",
            f"{num_recorded} ids, and the context holds {model.max_model_len}; leave out the rest",
        )
    num_ids, num_strings = len(message.stopping.stop_token_ids), len(message.stopping.stop)
    if num_ids > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stopping.stop_token_ids", f"{num_ids} ids; at most {MAX_STOP_TOKEN_IDS} are taken")
    if num_strings > MAX_STOP_STRINGS:
        raise InvalidRequest("stopping.stop", f"{num_strings} strings; at most {MAX_STOP_STRINGS} are taken")


def _check_room(field: str, num_tokens: int, model: ServedModel) -> None:
    if num_tokens >= model.max_model_len:
        raise InvalidRequest(
            field,
            f"the prompt has {num_tokens} tokens and the context holds {model.max_model_len}; "
            f"at most {model.max_model_len - 1} leave room for an answer",
        )


def sampling_of(message: types_pb2.Sampling, model: ServedModel) -> SamplingParams:
    """Checked sampling with defaults. A request without a seed gets one here. Raises InvalidRequest."""
    defaults = model.defaults
    temperature = message.temperature if message.HasField("temperature") else defaults.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            "sampling.temperature", f"{temperature:g} is not 0 (greedy) and not from 1e-6 to {MAX_TEMPERATURE:g}"
        )
    top_k = message.top_k if message.HasField("top_k") else defaults.top_k
    top_p = message.top_p if message.HasField("top_p") else defaults.top_p
    if not 0 < top_p <= 1:
        raise InvalidRequest("sampling.top_p", f"{top_p:g} is not above 0 and at most 1; 1 keeps all tokens")
    if not 0 <= message.min_p <= 1:
        raise InvalidRequest("sampling.min_p", f"{message.min_p:g} is not from 0 to 1; 0 keeps all tokens")
    if message.verification not in types_pb2.Verification.values():
        raise InvalidRequest(
            "sampling.verification",
            f"{message.verification} is unknown; choose {', '.join(types_pb2.Verification.keys()[1:])}",
        )
    has_seed = message.HasField("seed")
    coupled = {types_pb2.VERIFICATION_STANDARD: False, types_pb2.VERIFICATION_COUPLED: True}
    return SamplingParams(
        temperature=abs(temperature),  # -0.0 is greedy too
        # k of the whole vocabulary or more keeps everything, as 0 does.
        top_k=0 if top_k >= model.vocab_size else top_k,
        top_p=top_p,
        min_p=abs(message.min_p),
        seed=message.seed if has_seed else secrets.randbits(63),
        coupled=coupled.get(message.verification, has_seed),
    )


def _oracle(message: inference_pb2.Oracle, sampling: SamplingParams, model: ServedModel) -> OracleDrafts:
    """Raises MissingFeature or InvalidRequest."""
    if not model.takes_oracle:
        raise MissingFeature(
            "oracle: this server's drafter takes no recordings; serve with speculation.drafter=oracle, which is for "
            "measurements alone, or leave it out"
        )
    if not sampling.is_greedy:
        raise InvalidRequest("oracle", "goes with greedy requests only; set sampling.temperature to 0")
    if not message.continuation:
        raise InvalidRequest("oracle.continuation", "is empty; give the ids that the model answered before")
    for index, token_id in enumerate(message.continuation):
        if token_id >= model.vocab_size:
            raise InvalidRequest(f"oracle.continuation[{index}]", _outside(token_id, model))
    if not 0 <= message.acceptance <= 1:
        raise InvalidRequest("oracle.acceptance", f"{message.acceptance:g} is not from 0 to 1; it is a probability")
    return OracleDrafts(continuation=tuple(message.continuation), acceptance=message.acceptance)


def _stop_token_ids(stopping: types_pb2.Stopping, model: ServedModel) -> tuple[int, ...]:
    token_ids = tuple(dict.fromkeys(stopping.stop_token_ids))
    for index, token_id in enumerate(stopping.stop_token_ids):
        if token_id >= model.vocab_size:
            raise InvalidRequest(f"stopping.stop_token_ids[{index}]", _outside(token_id, model))
    return token_ids


def _stop_strings(stopping: types_pb2.Stopping) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(stopping.stop))
    for index, stop in enumerate(stopping.stop):
        size_bytes = len(stop.encode())
        if not stop:
            raise InvalidRequest(f"stopping.stop[{index}]", "is empty, which every text contains; leave it out")
        if size_bytes > MAX_STOP_STRING_BYTES:
            raise InvalidRequest(
                f"stopping.stop[{index}]", f"{size_bytes} bytes long; at most {MAX_STOP_STRING_BYTES} are taken"
            )
    return stops


def _outside(token_id: int, model: ServedModel) -> str:
    return f"{token_id} is outside the vocabulary; ids go from 0 to {model.vocab_size - 1}"


def prompt_ids_of(message: inference_pb2.TokenIds, model: ServedModel) -> tuple[int, ...]:
    """Checked ids of a prompt given as such. Raises InvalidRequest."""
    ids = tuple(message.ids)
    if ids and max(ids) >= model.vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= model.vocab_size)
        raise InvalidRequest(f"token_ids.ids[{index}]", _outside(ids[index], model))
    return ids


def messages_of(chat: inference_pb2.Chat) -> tuple[list[dict[str, str]], bool]:
    """Messages of a chat, and whether the template shall open the answer. Raises InvalidRequest."""
    if not chat.messages:
        raise InvalidRequest("chat.messages", "is empty; give at least one message")
    for index, one in enumerate(chat.messages):
        if not one.role:
            raise InvalidRequest(f"chat.messages[{index}].role", "is empty; name who speaks, such as user")
        if one.images:
            raise InvalidRequest(f"chat.messages[{index}].images", "images are not served; send text alone")
    opens_answer = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return [{"role": one.role, "content": one.content} for one in chat.messages], opens_answer


def request_of(
    options: GenerateOptions, prompt: tuple[int, ...], *, field: str, uid: int, model: ServedModel
) -> Request:
    """The whole request. max_tokens is clipped to what the context leaves: the sequence then ends with LENGTH there.

    field: the message field that the prompt came from. Raises InvalidRequest when nothing fits behind the prompt.
    """
    if not prompt:
        raise InvalidRequest(field, "the prompt has no tokens; give at least one")
    _check_room(field, len(prompt), model)
    max_tokens = model.default_max_tokens if options.max_tokens is None else options.max_tokens
    return Request(
        uid=uid,
        request_id=options.request_id,
        prompt=prompt,
        sampling=options.sampling,
        stopping=StopParams(
            max_tokens=min(max_tokens, model.max_model_len - len(prompt)),
            eos_token_ids=options.eos_token_ids,
            stop_token_ids=options.stop_token_ids,
            stop_strings=options.stop_strings,
        ),
        priority=options.priority,
        report_rounds=options.report_rounds,
        max_drafts=options.max_drafts,
        oracle=options.oracle,
    )


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Raises InvalidRequest where a newer client set a field that this server does not know.

    Linear, and inside protobuf where there is none: only what leaving them out makes smaller is walked.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    num_bytes = message.ByteSize() - known.ByteSize()
    if num_bytes > MAX_UNKNOWN_BYTES:
        raise InvalidRequest(
            path or message.DESCRIPTOR.name, f"{num_bytes} bytes are fields not known to this server; leave them out"
        )
    if num_bytes:
        _refuse_first_unknown_field(message, path)


def _refuse_first_unknown_field(message: Message, path: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(
            path or message.DESCRIPTOR.name,
            f"field number {unknown[0].field_number} is not known to this server; leave it out or ask a newer one",
        )
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                _refuse_first_unknown_field(part, f"{path}.{field.name}" if path else field.name)


def frame_of(delta: Delta, request_id: str) -> inference_pb2.GenerateResponse:
    """One frame of the stream."""
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        usage=usage_message(delta.usage),
        finish=None if delta.finish is None else finish_message(delta.finish),
        rounds=[round_message(one) for one in delta.rounds],
    )


def usage_message(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        rounds=usage.rounds,
        drafted=usage.drafted,
        admitted=usage.admitted,
        accepted=usage.accepted,
        trimmed=usage.trimmed,
        seed=usage.seed,
    )


def finish_message(finish: Finish) -> inference_pb2.Finish:
    return inference_pb2.Finish(
        reason=_FINISH_REASONS[finish.reason], stop_token_id=finish.stop_token_id, stop=finish.stop_string
    )


def round_message(one: Round) -> types_pb2.Round:
    return types_pb2.Round(
        drafted_token_ids=one.drafted,
        accepted=one.accepted,
        emitted_token_ids=one.emitted,
        emitted_margins=one.margins,
    )


def model_message(
    description: WorkerDescription, mesh: Mesh, name: str, version: str
) -> inference_pb2.GetModelResponse:
    """What is served. context_length is the longest sequence served, which may be below the checkpoint's own."""
    return inference_pb2.GetModelResponse(
        name=name,
        model_type=description.model_type,
        vocab_size=description.vocab_size,
        context_length=description.max_model_len,
        eos_token_ids=description.eos_token_ids,
        dtype=description.dtype,
        numerics=description.numerics,
        gamma_max=description.gamma_max,
        version=version,
        num_parameters=description.num_parameters,
        dp=mesh.dp,
        tp=mesh.tp,
        ep=mesh.ep,
        drafter=description.drafter,
    )
