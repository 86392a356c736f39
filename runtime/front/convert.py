"""Wire messages to domain values; checks every field and applies every default. Knows no engine, no files.

A field that is absent takes its default; a plain zero is a value. What is wrong is refused by its path in the message,
with the remedy; what this server does not know is refused too, since dropping it would change what was asked for.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.v1 import inference_pb2, types_pb2
from runtime.front.bounds import LOGPROBS_LIMIT_BYTES, MAX_CHAT_MESSAGES, logprobs_bytes
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import InvalidRequest, MissingFeature, UnknownModel
from runtime.front.sampling_fields import (
    Encode,
    check_ids,
    check_sampling_counts,
    constraint_of,
    sampling_of,
    stop_strings_of,
    stop_token_ids_of,
)
from runtime.request import UNKNOWN_ORIGIN, Origin, ReportParams, Request, SamplingParams, StopParams
from workers.plan import OracleDrafts

MAX_REQUEST_ID_CHARS = 256
MAX_SEQUENCES = 64
MAX_LOGPROBS = 20

MAX_UNKNOWN_BYTES = 4096
"""Unknown fields beyond this many bytes are refused without looking for the first: listing them takes long."""

REQUEST_ID_KEY = "x-request-id"
"""Metadata key of the request id, both ways."""


def _no_tokenizer(text: str) -> Sequence[int]:
    raise InvalidRequest("sampling.bad_words", f"{text!r}: this server has no tokenizer; name ids in banned_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against, and what they get where they say nothing. takes_oracle: whether they may bring
    drafts of their own. takes_typical: whether they may be verified lossily. encode: of short texts."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: Callable[[], int]
    defaults: SamplingDefaults
    takes_oracle: bool = False
    takes_typical: bool = False
    encode: Encode = _no_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """A checked request before its prompt and its prediction are known in tokens.

    stopping: max_tokens and min_tokens as they were asked for, whatever the prompt leaves room for. whole: nothing is
    streamed. max_drafts: None where it names none.
    """

    request_id: str
    sampling: SamplingParams
    stopping: StopParams
    priority: int
    report: ReportParams
    n: int
    whole: bool
    looks_back: bool
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
    stopping = _stopping_of(message.stopping, model)
    constraint = constraint_of(message.constraint) if message.HasField("constraint") else None
    sampling = sampling_of(
        message.sampling,
        vocab_size=model.vocab_size,
        defaults=model.defaults,
        encode=model.encode,
        min_tokens=stopping.min_tokens,
        ends=(*stopping.eos_token_ids, *stopping.stop_token_ids),
        constraint=constraint,
        takes_typical=model.takes_typical,
    )
    n = message.n if message.HasField("n") else 1
    if not 1 <= n <= MAX_SEQUENCES:
        raise InvalidRequest("n", f"{n} is not from 1 to {MAX_SEQUENCES}; send more requests for more sequences")
    return GenerateOptions(
        request_id=request_id,
        sampling=sampling,
        stopping=stopping,
        priority=message.priority,
        report=_report_of(message, model),
        n=n,
        whole=message.HasField("stream") and not message.stream,
        looks_back=message.ngram,
        max_drafts=message.max_drafts if message.HasField("max_drafts") else None,
        oracle=_oracle(message, sampling, model) if message.HasField("oracle") else None,
    )


def _stopping_of(stopping: types_pb2.Stopping, model: ServedModel) -> StopParams:
    """Raises InvalidRequest."""
    most = stopping.max_tokens if stopping.HasField("max_tokens") else model.default_max_tokens()
    if not most:
        raise InvalidRequest("stopping.max_tokens", "must be at least 1; leave it out for the server's default")
    if stopping.min_tokens > most:
        raise InvalidRequest(
            "stopping.min_tokens", f"{stopping.min_tokens} is above max_tokens, {most}; lower it or raise max_tokens"
        )
    if stopping.HasField("time_limit_ms") and not stopping.time_limit_ms:
        raise InvalidRequest("stopping.time_limit_ms", "is 0; leave it out for no limit")
    return StopParams(
        max_tokens=most,
        eos_token_ids=() if stopping.ignore_eos else model.eos_token_ids,
        stop_token_ids=stop_token_ids_of(stopping, model.vocab_size),
        stop_strings=stop_strings_of(stopping),
        min_tokens=stopping.min_tokens,
        include_stop=stopping.include_stop,
        time_limit_s=stopping.time_limit_ms / 1000 if stopping.HasField("time_limit_ms") else None,
    )


def _report_of(message: inference_pb2.GenerateRequest, model: ServedModel) -> ReportParams:
    """Raises InvalidRequest."""
    return ReportParams(
        num_logprobs=_num_logprobs("logprobs", message, model),
        num_prompt_logprobs=_num_logprobs("prompt_logprobs", message, model),
        echo=message.echo,
        offsets=message.report_offsets,
        rounds=message.report_rounds,
    )


def _num_logprobs(name: str, message: inference_pb2.GenerateRequest, model: ServedModel) -> int | None:
    if not message.HasField(name):
        return None
    number: int = getattr(message, name)
    if number > MAX_LOGPROBS:
        raise InvalidRequest(name, f"{number} is above {MAX_LOGPROBS}; ask for fewer alternatives")
    return min(number, model.vocab_size)


def check_counts(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, model: ServedModel) -> None:
    """The first check of a request: how many entries its lists have, before any is looked at. Raises InvalidRequest."""
    num_messages = len(message.chat.messages)
    if num_messages > MAX_CHAT_MESSAGES:
        raise InvalidRequest("chat.messages", f"{num_messages} messages; at most {MAX_CHAT_MESSAGES} are taken")
    if isinstance(message, inference_pb2.TokenizeRequest):
        return
    check_room("token_ids", len(message.token_ids.ids), model)
    _check_fits("oracle.continuation", len(message.oracle.continuation), model)
    _check_fits("prediction.token_ids.ids", len(message.prediction.token_ids.ids), model)
    check_sampling_counts(message.sampling, message.stopping)


def check_room(field: str, num_tokens: int, model: ServedModel) -> None:
    """Whether a prompt leaves room for an answer. Raises InvalidRequest."""
    if num_tokens >= model.max_model_len:
        raise InvalidRequest(
            field,
            f"the prompt has {num_tokens} tokens and the context holds {model.max_model_len}; "
            f"at most {model.max_model_len - 1} leave room for an answer",
        )


def prediction_of(field: str, ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """A checked prediction. Raises InvalidRequest."""
    _check_fits(field, len(ids), model)
    check_ids(field, ids, model.vocab_size)
    return tuple(ids)


def _check_fits(field: str, num_tokens: int, model: ServedModel) -> None:
    if num_tokens > model.max_model_len:
        raise InvalidRequest(
            field, f"{num_tokens} ids, and the context holds {model.max_model_len}; leave out the rest"
        )


def _oracle(request: inference_pb2.GenerateRequest, sampling: SamplingParams, model: ServedModel) -> OracleDrafts:
    """Raises MissingFeature or InvalidRequest."""
    message = request.oracle
    if not model.takes_oracle:
        raise MissingFeature(
            "oracle: this server's drafter takes no recordings; serve with speculation.drafter=oracle, which is for "
            "measurements alone, or leave it out"
        )
    if not sampling.is_greedy:
        raise InvalidRequest("oracle", "goes with greedy requests only; set sampling.temperature to 0")
    for name in ("prediction", "ngram"):
        if getattr(request, name) if name == "ngram" else request.HasField(name):
            raise InvalidRequest(name, "goes without oracle, whose drafts take the place of all others; leave one out")
    if not message.continuation:
        raise InvalidRequest("oracle.continuation", "is empty; give the ids that the model answered before")
    check_ids("oracle.continuation", message.continuation, model.vocab_size)
    if not 0 <= message.acceptance <= 1:
        raise InvalidRequest("oracle.acceptance", f"{message.acceptance:g} is not from 0 to 1; it is a probability")
    return OracleDrafts(continuation=tuple(message.continuation), acceptance=message.acceptance)


def prompt_ids_of(message: inference_pb2.TokenIds, model: ServedModel) -> tuple[int, ...]:
    """Checked ids of a prompt given as such. Raises InvalidRequest."""
    check_ids("token_ids.ids", message.ids, model.vocab_size)
    return tuple(message.ids)


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
    options: GenerateOptions,
    prompt: tuple[int, ...],
    *,
    field: str,
    uid: int,
    model: ServedModel,
    prediction: tuple[int, ...] = (),
    origin: Origin = UNKNOWN_ORIGIN,
) -> Request:
    """The whole request. max_tokens is clipped to what the context leaves: the sequence then ends with LENGTH there.

    field: the message field that the prompt came from. uid: of the first of options.n sequences.

    Raises InvalidRequest when nothing fits behind the prompt, or when a frame could not hold what is to be reported.
    """
    if not prompt:
        raise InvalidRequest(field, "the prompt has no tokens; give at least one")
    check_room(field, len(prompt), model)
    max_tokens = min(options.stopping.max_tokens, model.max_model_len - len(prompt))
    _check_reports(options, len(prompt), max_tokens, model)
    return Request(
        uid=uid,
        request_id=options.request_id,
        prompt=prompt,
        sampling=options.sampling,
        stopping=replace(
            options.stopping, max_tokens=max_tokens, min_tokens=min(options.stopping.min_tokens, max_tokens)
        ),
        priority=options.priority,
        report=options.report,
        n=options.n,
        prediction=prediction,
        looks_back=options.looks_back,
        max_drafts=options.max_drafts,
        oracle=options.oracle,
        origin=origin,
    )


def _check_reports(options: GenerateOptions, num_prompt: int, max_tokens: int, model: ServedModel) -> None:
    """Raises InvalidRequest where a frame might grow past what clients read."""
    report = options.report
    size_bytes = 0
    for field, number, num_tokens in (
        ("prompt_logprobs", report.num_prompt_logprobs, num_prompt - 1),
        ("logprobs", report.num_logprobs, max_tokens if options.whole else 0),
    ):
        if number is not None:
            size_bytes += logprobs_bytes(num_tokens, number, model.vocab_size)
        if size_bytes > LOGPROBS_LIMIT_BYTES:
            raise InvalidRequest(
                field,
                f"{num_tokens} tokens with {number} alternatives each may take {size_bytes} bytes of one frame, and "
                f"{LOGPROBS_LIMIT_BYTES} are left for them; ask for fewer"
                + (", for less output, or stream it" if field == "logprobs" else ", or for a shorter prompt"),
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
        # A map has none: what its entries have besides key and value is dropped where they are read.
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                _refuse_first_unknown_field(part, f"{path}.{field.name}" if path else field.name)
