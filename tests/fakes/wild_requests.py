"""Generate requests with sound, extreme and random values in every field of the message, from a stream of chance.

Most values are sound, so that most requests are not refused for their first field. The fields are found in the message
itself: one that no sound value is named for is an error here, and so none is left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from fakes.dangerous_constraints import DANGEROUS, UNSOUND
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from outrider.v1.inference_pb2 import GenerateRequest
from outrider.v1.types_pb2 import VERIFICATION_TYPICAL

UNKNOWN_FIELD = b"\xc0\x3e\x01"
WORDS = ("a", " b", "def f(x):\n    return x", "한국어", "👩‍👩‍👧", "é", "END", "0.5", "{", '"', "\n")
WILD_TEXTS = ("", " ", "\x00", "x" * 5000, "한" * 90, "<|endoftext|>", "\ufffd", "@", "e\u0301" * 40, "{" * 3000)
WILD_FLOATS = (0.0, -0.0, -1.0, 1e-38, 1e-45, 3e38, -3e38, 2.0, 1e9, math.nan, math.inf, -math.inf)
WILD_NUMBERS = (0, 1, 21, 65, 127, 4095, 4096, 10**9, 2**31 - 1, 2**31, 2**32 - 1)
SCHEMAS = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    '{"enum": ["x", 1, null]}',
    '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}',
    "true",
)
WILD_SCHEMAS = (
    '{"type": 7}',
    '{"$ref": "#/nowhere"}',
    '{"type": "string", "pattern": "(((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000})"}',
    '{"allOf": [{"type": "string"}, {"type": "integer"}]}',
    '{"minimum": 5, "maximum": 1, "type": "integer"}',
    '{"type": "array", "minItems": 1000000}',
    "[1",
)
WILD_REGEXES = ("(", "(a{1,1000}){1,1000}", "[^\\s\\S]", "a**", "(?=x)", "\\p{Nope}", "((a+)+)+$", "(?i)" * 500)
WILD_GRAMMARS = ("start:", "start: start", 'start: "a" | nope', "x: /a/", 'start: (("a"*)*)*', "%%%", "start: /(/")

Chance = random.Random


def text(chance: Chance) -> str:
    return "".join(chance.choices(WORDS, k=chance.randint(1, 4)))


def number(least: int, most: int) -> Callable[[Chance], int]:
    return lambda chance: chance.randint(least, most)


def share(chance: Chance) -> float:
    return chance.randint(1, 16) / 16


def one_of(*values: Any) -> Callable[[Chance], Any]:
    return lambda chance: chance.choice(values)


SOUND: dict[str, Callable[[Chance], Any]] = {
    "request_id": lambda chance: f"{chance.getrandbits(64):x}",
    "model": one_of("demo"),
    "text": text,
    "token_ids.ids": number(1, 4095),
    "chat.messages.role": one_of("user", "system", "assistant"),
    "chat.messages.content": text,
    "chat.messages.images.url": one_of("file:x"),
    "chat.messages.images.data": one_of(b"x"),
    "chat.add_generation_prompt": one_of(True, False),
    "sampling.temperature": one_of(0.0, 0.5, 1.0, 2.0),
    "sampling.top_k": number(0, 50),
    "sampling.top_p": share,
    "sampling.min_p": one_of(0.0, 0.01, 0.1),
    "sampling.seed": lambda chance: chance.getrandbits(64),
    "sampling.verification": number(0, 3),
    "sampling.typical_p": share,
    "sampling.repetition_penalty": one_of(0.5, 1.0, 1.1, 2.0),
    "sampling.frequency_penalty": one_of(-2.0, 0.0, 0.5),
    "sampling.presence_penalty": one_of(-2.0, 0.0, 0.5),
    "sampling.logit_bias": one_of(-100.0, -1.0, 2.5, 100.0),
    "sampling.banned_token_ids": number(0, 4095),
    "sampling.allowed_token_ids": number(0, 4095),
    "sampling.bad_words": text,
    "sampling.typical.epsilon": share,
    "sampling.typical.delta": share,
    "stopping.max_tokens": number(1, 6),
    "stopping.stop_token_ids": number(0, 4095),
    "stopping.stop": text,
    "stopping.ignore_eos": one_of(True, False),
    "stopping.min_tokens": number(0, 3),
    "stopping.include_stop": one_of(True, False),
    "stopping.time_limit_ms": number(1, 3000),
    "priority": number(-3, 3),
    "stream": one_of(True, False),
    "report_rounds": one_of(True, False),
    "lora_adapter": one_of("math"),
    "max_drafts": number(0, 9),
    "constraint.json_schema": one_of(*SCHEMAS),
    "constraint.json_object": one_of(True),
    "constraint.regex": one_of("[a-z ]{3,20}", "(yes|no)", "\\d+"),
    "constraint.lark": one_of('start: "a" | "b" start', "start: /[a-z]+/"),
    "constraint.choice.texts": text,
    "n": one_of(1, 2, 3),
    "logprobs": number(0, 20),
    "prompt_logprobs": number(0, 20),
    "echo": one_of(True, False),
    "report_offsets": one_of(True, False),
    "prediction.text": text,
    "prediction.token_ids.ids": number(1, 4095),
    "ngram": one_of(True, False),
    "oracle.continuation": number(1, 4095),
    "oracle.acceptance": share,
}


def one_of_constraints(kind: str, *others: str) -> Callable[[Chance], Any]:
    return one_of(*others, *(each.text for each in (*DANGEROUS.values(), *UNSOUND.values()) if each.kind == kind))


WILD: dict[str, Callable[[Chance], Any]] = {
    "constraint.json_schema": one_of_constraints("json_schema", *WILD_SCHEMAS, *WILD_TEXTS),
    "constraint.regex": one_of_constraints("regex", *WILD_REGEXES, *WILD_TEXTS),
    "constraint.lark": one_of_constraints("lark", *WILD_GRAMMARS, *WILD_TEXTS),
    "request_id": one_of("", "é", "x" * 300, "a\nb", "twice"),
}
RARE = frozenset({"lora_adapter", "oracle", "chat.messages.images"})
"""Never served here: in every request they would hide all else."""
ODDS_OF_WILD = 0.03
ODDS_OF_RARE = 0.01


def leaf_paths(kind: Descriptor, path: str = "") -> list[str]:
    """Paths of all fields that hold a value."""
    found = []
    for field in kind.fields:
        name = f"{path}{field.name}"
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            found.append(name)
        else:
            found += leaf_paths(field.message_type, f"{name}.")
    return found


def wild_request(chance: Chance) -> GenerateRequest:
    """A request in which any field may be set, and almost always a prompt."""
    request = GenerateRequest()
    _fill(request, chance, "", odds=0.3)
    if not request.stopping.max_tokens and chance.random() < 0.95:
        request.stopping.max_tokens = chance.randint(1, 6)
    if request.sampling.HasField("typical") and chance.random() < 0.9:
        request.sampling.verification = VERIFICATION_TYPICAL
    return request


def _fill(message: Message, chance: Chance, path: str, odds: float) -> None:
    # Of fields that exclude each other one is chosen; a list in one is not empty.
    choices = [one.fields for one in message.DESCRIPTOR.oneofs if len(one.fields) > 1]
    chosen = [chance.choice(fields) for fields in choices if chance.random() < 0.97]
    left_out = {field.name for fields in choices for field in fields if field not in chosen}
    for field in message.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        if field.name in left_out or chance.random() >= (
            ODDS_OF_RARE if name in RARE else 1.0 if field in chosen else odds
        ):
            continue
        if field.is_repeated:
            _fill_list(message, field, chance, name)
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            _fill(part, chance, f"{name}.", odds=0.97 if field in chosen else 0.4)
        else:
            setattr(message, field.name, _value(field, chance, name))
    if chance.random() < 0.005:
        message.MergeFromString(UNKNOWN_FIELD)


def _fill_list(message: Message, field: FieldDescriptor, chance: Chance, name: str) -> None:
    entries = getattr(message, field.name)
    count = (
        chance.choice((0, 1, 1, 2, 2, 3))
        if chance.random() >= ODDS_OF_WILD
        else chance.choice((17, 65, 600, 1025, 5000))
    )
    for _ in range(count):
        if field.message_type is None:
            entries.append(_value(field, chance, name))
        elif field.message_type.GetOptions().map_entry:
            key = chance.randint(0, 4095) if chance.random() >= ODDS_OF_WILD else chance.choice(WILD_NUMBERS)
            entries[key] = _value(field.message_type.fields_by_name["value"], chance, name)
        else:
            _fill(entries.add(), chance, f"{name}.", odds=0.9)


def _value(field: FieldDescriptor, chance: Chance, name: str) -> Any:
    if chance.random() >= ODDS_OF_WILD:
        return SOUND[name](chance)
    if name in WILD:
        return WILD[name](chance)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            wild = chance.choice(WILD_TEXTS)
            return wild.encode() if field.type == FieldDescriptor.TYPE_BYTES else wild
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return chance.choice(WILD_FLOATS)
        case FieldDescriptor.CPPTYPE_INT32:
            return chance.choice((-(2**31), -1, 2**31 - 1))
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice((-1, 4, 99, 2**31 - 1))
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_UINT64:
            return chance.choice((0, 2**63, 2**64 - 1))
        case _:
            return chance.choice(WILD_NUMBERS)
