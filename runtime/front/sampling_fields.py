"""Sampling, stopping and constraint of a request: checked field by field, defaults applied. Knows no prompt.

Whatever could make a row of logits unusable (an id outside the vocabulary, a number that is none, bans that leave
nothing) is refused here; ranks take what they get.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence, Set

from outrider.v1 import types_pb2
from runtime.front.defaults import MAX_REPETITION, MIN_REPETITION, SamplingDefaults
from runtime.front.errors import InvalidRequest, MissingFeature
from runtime.request import (
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from workers.demands import Constraint, Shaping, Typical

MIN_TEMPERATURE = 2.0**-20
"""About 1e-6. Below it, logits divided by the temperature leave float32; greedy is 0."""
MAX_TEMPERATURE = 1000.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_BANNED = 1024
MAX_ALLOWED = 65536
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 64
MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_CHOICES = 1024
DEFAULT_TYPICAL = Typical()

Encode = Callable[[str], Sequence[int]]
"""Ids of a short text, without special tokens."""


def check_sampling_counts(sampling: types_pb2.Sampling, stopping: types_pb2.Stopping) -> None:
    """How many entries lists have, before any is looked at. Raises InvalidRequest."""
    for field, count, most, what in (
        ("sampling.logit_bias", len(sampling.logit_bias), MAX_BIASES, "entries"),
        ("sampling.banned_token_ids", len(sampling.banned_token_ids), MAX_BANNED, "ids"),
        ("sampling.allowed_token_ids", len(sampling.allowed_token_ids), MAX_ALLOWED, "ids"),
        ("sampling.bad_words", len(sampling.bad_words), MAX_BAD_WORDS, "words"),
        ("stopping.stop_token_ids", len(stopping.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids"),
        ("stopping.stop", len(stopping.stop), MAX_STOP_STRINGS, "strings"),
    ):
        if count > most:
            raise InvalidRequest(field, f"{count} {what}; at most {most} are taken")


def sampling_of(
    message: types_pb2.Sampling,
    *,
    vocab_size: int,
    defaults: SamplingDefaults,
    encode: Encode,
    min_tokens: int,
    ends: Iterable[int],
    constraint: Constraint | None,
    takes_typical: bool,
) -> SamplingParams:
    """Checked sampling with defaults. A request without a seed gets one here.

    encode: of bad words. min_tokens, ends: before how many tokens which ids may not stand. takes_typical: whether the
    server allows lossy verification.

    Raises InvalidRequest or MissingFeature.
    """
    temperature = message.temperature if message.HasField("temperature") else defaults.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            "sampling.temperature", f"{temperature:g} is not 0 (greedy) and not from 1e-6 to {MAX_TEMPERATURE:g}"
        )
    top_k = message.top_k if message.HasField("top_k") else defaults.top_k
    top_p = _share(message, "top_p", defaults.top_p)
    if not 0 <= message.min_p <= 1:
        raise InvalidRequest("sampling.min_p", f"{message.min_p:g} is not from 0 to 1; 0 keeps all tokens")
    has_seed = message.HasField("seed")
    is_coupled, typical = _verification(message, has_seed=has_seed, takes_typical=takes_typical)
    return SamplingParams(
        temperature=abs(temperature),  # -0.0 is greedy too
        # k of the whole vocabulary or more keeps everything, as 0 does.
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=top_p,
        min_p=abs(message.min_p),
        typical_p=_share(message, "typical_p", 1.0),
        seed=message.seed if has_seed else secrets.randbits(63),
        coupled=is_coupled,
        shaping=_shaping(message, vocab_size, defaults, encode, min_tokens, frozenset(ends), constraint),
        constraint=constraint,
        # A greedy law holds one token: a draft stands there if it is that, and nothing is lost.
        typical=None if temperature == 0 else typical,
    )


def constraint_of(message: types_pb2.Constraint) -> Constraint:
    """What it says, not yet whether it can be followed. Raises InvalidRequest."""
    kind = message.WhichOneof("kind")
    if kind is None:
        names = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields)
        raise InvalidRequest("constraint", f"is empty; set one of {names}, or leave it out")
    field = f"constraint.{kind}"
    match kind:
        case "json_object":
            if not message.json_object:
                raise InvalidRequest(field, "is false; leave the constraint out for free text")
            return Constraint(kind="json_object")
        case "choice":
            return Constraint(kind="choice", text=_choices(field, message.choice.texts))
        case "json_schema":
            return Constraint(kind="json_schema", text=_schema(field, message.json_schema))
        case "regex":
            return Constraint(kind="regex", text=_text(field, message.regex))
        case _:
            return Constraint(kind="lark", text=_text(field, message.lark))


def stop_token_ids_of(stopping: types_pb2.Stopping, vocab_size: int) -> tuple[int, ...]:
    """Raises InvalidRequest."""
    check_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)
    return tuple(dict.fromkeys(stopping.stop_token_ids))


def stop_strings_of(stopping: types_pb2.Stopping) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    for index, stop in enumerate(stopping.stop):
        size_bytes = len(stop.encode())
        if not stop:
            raise InvalidRequest(f"stopping.stop[{index}]", "is empty, which every text contains; leave it out")
        if size_bytes > MAX_STOP_STRING_BYTES:
            raise InvalidRequest(
                f"stopping.stop[{index}]", f"{size_bytes} bytes long; at most {MAX_STOP_STRING_BYTES} are taken"
            )
    return tuple(dict.fromkeys(stopping.stop))


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest that names the first one which is no token."""
    # The search is for those that have one: lists may be as long as the context.
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidRequest(f"{field}[{index}]", _outside(ids[index], vocab_size))


def _shaping(
    message: types_pb2.Sampling,
    vocab_size: int,
    defaults: SamplingDefaults,
    encode: Encode,
    min_tokens: int,
    ends: frozenset[int],
    constraint: Constraint | None,
) -> Shaping:
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else defaults.repetition_penalty
    if not MIN_REPETITION <= repetition <= MAX_REPETITION:
        raise InvalidRequest(
            "sampling.repetition_penalty",
            f"{repetition:g} is not from {MIN_REPETITION:g} to {MAX_REPETITION:g}; 1 is off",
        )
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = getattr(message, name)
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise InvalidRequest(
                f"sampling.{name}", f"{penalty:g} is not from {-MAX_PENALTY:g} to {MAX_PENALTY:g}; 0 is off"
            )
    for token_id, bias in message.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise InvalidRequest(field, _outside(token_id, vocab_size))
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                field, f"{bias:g} is not from {-MAX_BIAS:g} to {MAX_BIAS:g}; to ban a token name it in banned_token_ids"
            )
    check_ids("sampling.banned_token_ids", message.banned_token_ids, vocab_size)
    check_ids("sampling.allowed_token_ids", message.allowed_token_ids, vocab_size)
    words = _bad_words(message.bad_words, vocab_size, encode)
    named = frozenset(message.banned_token_ids)
    shaping = Shaping(
        repetition=repetition,
        frequency=message.frequency_penalty,
        presence=message.presence_penalty,
        bias=tuple(sorted((token_id, bias) for token_id, bias in message.logit_bias.items() if bias)),
        allowed=tuple(sorted({*message.allowed_token_ids})),
        banned=tuple(sorted(named.union(word[0] for word in words if len(word) == 1))),
        bad_words=tuple(word for word in words if len(word) > 1),
        min_tokens=min_tokens,
    )
    if constraint is None:
        _check_something_is_left(shaping, vocab_size, ends, named)
    return shaping


def _check_something_is_left(shaping: Shaping, vocab_size: int, ends: frozenset[int], named: Set[int]) -> None:
    """Of ids alone: what else may not stand depends on the output. named: those that were banned by id."""

    def leaves_any(out: Set[int]) -> bool:
        return bool(set(shaping.allowed) - out) if shaping.allowed else len(out) < vocab_size

    if not leaves_any(set(shaping.banned)):
        field = "sampling.bad_words" if leaves_any(named) else "sampling.banned_token_ids"
        raise InvalidRequest(field, "bans every token that is allowed; leave one that may stand")
    if shaping.min_tokens and not leaves_any(ends.union(shaping.banned)):
        raise InvalidRequest(
            "stopping.min_tokens",
            "every token that is allowed ends the output; allow another one, or leave min_tokens out",
        )


def _bad_words(texts: Sequence[str], vocab_size: int, encode: Encode) -> list[tuple[int, ...]]:
    """The runs of ids that the words are written with, at the start of a text and behind a space; each once. A run with
    an id that the model does not have is never output."""
    words: dict[tuple[int, ...], None] = {}
    for index, text in enumerate(texts):
        field = f"sampling.bad_words[{index}]"
        size_bytes = len(text.encode())
        if not text.strip():
            raise InvalidRequest(field, "has no characters but spaces; leave it out")
        if size_bytes > MAX_BAD_WORD_BYTES:
            raise InvalidRequest(field, f"{size_bytes} bytes long; at most {MAX_BAD_WORD_BYTES} are taken")
        for spelling in dict.fromkeys((text, " " + text.lstrip())):
            ids = tuple(encode(spelling))
            if not ids:
                raise InvalidRequest(field, f"{text!r} has no tokens in this vocabulary; leave it out")
            if max(ids) < vocab_size:
                words[ids] = None
    return list(words)


def _verification(message: types_pb2.Sampling, *, has_seed: bool, takes_typical: bool) -> tuple[bool, Typical | None]:
    """Whether sampled drafts share the target's noise, and the parameters of lossy verification."""
    wanted = message.verification
    if wanted not in types_pb2.Verification.values():
        raise InvalidRequest(
            "sampling.verification",
            f"{wanted} is unknown; choose {', '.join(types_pb2.Verification.keys()[1:])}",
        )
    if wanted != types_pb2.VERIFICATION_TYPICAL:
        if message.HasField("typical"):
            raise InvalidRequest("sampling.typical", "goes with verification VERIFICATION_TYPICAL; leave it out")
        coupled = {types_pb2.VERIFICATION_STANDARD: False, types_pb2.VERIFICATION_COUPLED: True}
        return coupled.get(wanted, has_seed), None
    if not takes_typical:
        raise MissingFeature(
            "sampling.verification: VERIFICATION_TYPICAL changes the law of the output, and this server does not allow "
            "it; serve with speculation.allow_typical, or choose another"
        )
    epsilon = message.typical.epsilon if message.typical.HasField("epsilon") else DEFAULT_TYPICAL.epsilon
    delta = message.typical.delta if message.typical.HasField("delta") else DEFAULT_TYPICAL.delta
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value <= 1:
            raise InvalidRequest(f"sampling.typical.{name}", f"{value:g} is not above 0 and at most 1")
    return False, Typical(epsilon=epsilon, delta=delta)


def _outside(token_id: int, vocab_size: int) -> str:
    return f"{token_id} is outside the vocabulary; ids go from 0 to {vocab_size - 1}"


def _share(message: types_pb2.Sampling, name: str, default: float) -> float:
    value = float(getattr(message, name)) if message.HasField(name) else default
    if not 0 < value <= 1:
        raise InvalidRequest(f"sampling.{name}", f"{value:g} is not above 0 and at most 1; 1 keeps all tokens")
    return value


def _text(field: str, text: str) -> str:
    size_bytes = len(text.encode())
    if not text.strip():
        raise InvalidRequest(field, "is empty; say what the output is to be, or leave the constraint out")
    if size_bytes > MAX_CONSTRAINT_BYTES:
        raise InvalidRequest(field, f"{size_bytes} bytes long; at most {MAX_CONSTRAINT_BYTES} are taken")
    return text


def _schema(field: str, text: str) -> str:
    try:
        schema = json.loads(_text(field, text), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(field, "is no schema; give a JSON object")
    if schema is False:
        raise InvalidRequest(field, "is false, which nothing meets")
    return text


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _choices(field: str, texts: Sequence[str]) -> str:
    if not texts:
        raise InvalidRequest(f"{field}.texts", "is empty; give at least one")
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"{field}.texts", f"{len(texts)} texts; at most {MAX_CHOICES} are taken")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{field}.texts[{index}]", "is empty; leave it out")
    return _text(f"{field}.texts", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))
