"""What a schema's compiler would round, or follow for ever, is refused with its place; what is sound is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from constraints.tiny_tokenizers import constraint
from hypothesis import given
from hypothesis import strategies as st

from workers.constraints.grammar import grammar_of
from workers.constraints.soundness import check_ends, check_schema, embedded_schemas

INTEGER: dict[str, Any] = {"type": "integer"}


def thing(name: str = "c", *required: str, of: Any) -> dict[str, Any]:
    """An object with a property, and those that it must have."""
    return {"type": "object", "properties": {name: of}, "required": list(required)}


def some(schema: Any, count: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": count}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}" if name else "#"}


def at(schema: Any) -> str:
    """The place of what is wrong; "" where nothing is."""
    try:
        check_schema(schema)
    except ValueError as error:
        return str(error).split(": ")[0].removeprefix("at ")
    return ""


HALF = "\ud800"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": HALF}, "#/const"),
        ({"properties": {"a": {"enum": ["b", f"{HALF}x"]}}}, "#/properties/a/enum/1"),
        ({"properties": {HALF: {"const": 1}}}, r"#/properties/\ud800/const"),
        ({"pattern": HALF}, "#/pattern"),
        ({"const": "😀"}, ""),
        ({"x-guidance": {"lenient": True}, "not": {}}, "#/x-guidance/lenient"),
        ({"x-guidance": {"item_separator": "("}}, "#/x-guidance/item_separator"),
        ({"x-guidance": 3}, "#/x-guidance"),
        ({"x-guidance": {"whitespace_flexible": 1}}, "#/x-guidance/whitespace_flexible"),
        ({"items": {"x-guidance": {"whitespace_flexible": True}}}, "#/items/x-guidance"),
        ({"$defs": {"a": {"x-guidance": {"coerce_one_of": True}}}}, "#/$defs/a/x-guidance"),
        ({"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": " "}}, ""),
        ({"properties": {"x-guidance": {"type": "string"}}}, ""),
    ],
)
def test_text_that_is_none_and_words_to_the_compiler_are_refused(schema: dict[str, Any], place: str) -> None:
    assert at(schema) == place


@pytest.mark.parametrize(
    ("lark", "place"),
    [
        ("start: <|end|>", "line 1, column 8"),
        ('start: "abc" <[7]> "d"', "line 1, column 14"),
        ('start: a\na: "x"\n  | <[3,5-9]>', "line 3, column 5"),
        ("start: <[3-6,8]>", ""),
        ('start: "<|end|>" /<[7]>/ "</b>"', ""),
        ('start: a // <[7]>\na: "x" <[^7]> <|other|>', ""),
    ],
)
def test_a_grammar_that_goes_on_behind_an_end_is_refused_at_its_place(lark: str, place: str) -> None:
    try:
        check_ends(lark, {7: "<|end|>"})
    except ValueError as error:
        told = str(error)
    else:
        told = ""
    assert told.rpartition(": ")[0] == place


ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "itself": (ref(""), "#"),
    "a property of itself": (thing("c", "c", of=ref("")), "#"),
    "a tree without leaves": ({"$defs": {"t": thing("c", "c", of=ref("t"))}, **ref("t")}, "#/$defs/t"),
    "deep inside": (thing("a", "a", of={"$defs": {}, "allOf": [some(ref(""))]}), "#"),
    "items": ({"$defs": {"t": some(ref("t"))}, **thing("a", "a", of=ref("t"))}, "#/$defs/t"),
    "first items": ({"type": "array", "prefixItems": [INTEGER, ref("")], "minItems": 2}, "#"),
    "one by the other": (
        {"$defs": {"a": thing("b", "b", of=ref("b")), "b": some(ref("a"))}, "anyOf": [ref("a"), ref("b")]},
        "#/$defs/a",
    ),
    "any of two": ({"anyOf": [ref(""), thing("c", "c", of=ref(""))]}, "#"),
    "one of two": ({"oneOf": [ref(""), ref("")]}, "#"),
    "all of two": ({"allOf": [INTEGER, ref("")]}, "#"),
    "what else it has": ({"type": "object", "additionalProperties": ref(""), "required": ["x"]}, "#"),
    "names with strokes": ({"$defs": {"a/b~": thing("c", "c", of=ref("a~1b~0"))}, **ref("a~1b~0")}, "#/$defs/a~1b~0"),
    "by its number": ({"anyOf": [{"$ref": "#/anyOf/0"}]}, "#/anyOf/0"),
}
FINITE: dict[str, dict[str, Any]] = {
    "a tree": {"$defs": {"t": thing("c", of=ref("t"))}, **ref("t")},
    "a list": {"$defs": {"t": thing("c", "c", of={"anyOf": [ref("t"), {"type": "null"}]})}, **ref("t")},
    "items that may be none": thing("c", "c", of=some(ref(""), 0)),
    "first items that may be none": {"type": "array", "prefixItems": [INTEGER, ref("")], "minItems": 1},
    "an object or null": {**thing("c", "c", of=ref("")), "type": ["object", "null"]},
    "any type": {"properties": {"c": ref("")}, "required": ["c"]},
    "a value": {"const": {"c": 1}, **thing("c", "c", of=ref(""))},
    "beside what is endless": {"$defs": {"t": ref("t")}, **thing("c", of=ref("t"))},
    "another document": {"$ref": "http://elsewhere/"},
    "odd parts": {"$ref": 3, "required": 5, "type": "object", "minItems": "x", "anyOf": {}, "allOf": [True, 3]},
    "odd properties": {"type": "object", "properties": [], "required": ["a", 3], "additionalProperties": True},
    "a name from a pattern": {"type": "object", "patternProperties": {"^a": INTEGER}, "required": ["ab"]},
}


@pytest.mark.parametrize(("schema", "place"), ENDLESS.values(), ids=ENDLESS)
def test_a_schema_that_only_endless_outputs_meet_is_refused_where_it_comes_back(
    schema: dict[str, Any], place: str
) -> None:
    assert at(schema) == place
    with pytest.raises(ValueError, match="no output meets it"):
        grammar_of(constraint("json_schema", schema))
    with pytest.raises(ValueError, match="line 2, in %json: at #"):
        grammar_of(constraint("lark", f"start: x\nx: %json {json.dumps(schema)}"))


@pytest.mark.parametrize("schema", FINITE.values(), ids=FINITE)
def test_recursion_that_may_end_is_none_of_that(schema: dict[str, Any]) -> None:
    assert at(schema) == ""


def test_long_chains_are_followed_in_any_order() -> None:
    for names in (range(3000), range(2999, -1, -1)):
        chain: dict[str, Any] = {f"a{i}": ref(f"a{i + 1}") for i in names}
        assert at({"$defs": chain | {"a3000": INTEGER}, **ref("a0")}) == ""
        assert at({"$defs": chain | {"a3000": ref("a0")}, **ref("a0")}) == "#/$defs/a0"


NUMBERS = (2**53 + 1, -(2**53) - 1, 1234567890123456789, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**22 + 1)
EXACT = (0, -1, 2**53, -(2**53), 2**53 + 2, 10**18, 2**60, 10**20, 10**22, 1.5, 1e300, True)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
def test_integers_that_would_be_rounded_are_refused_where_they_stand(key: str, number: int) -> None:
    assert at({key: number}) == f"#/{key}"
    assert at({"$defs": {"x": {"items": {key: number}}}, **ref("x")}) == f"#/$defs/x/items/{key}"
    assert at({"enum": ["a", {"b": [1, number]}]}) == "#/enum/1/b/1"
    with pytest.raises(ValueError, match=f"line 3, in %json: at #/{key}: {number} has more digits"):
        grammar_of(constraint("lark", f'start: "%json {{" A\nA: /%json "/\n  | %json {{"{key}": {number}}} "x"'))


@pytest.mark.parametrize("number", EXACT)
def test_numbers_that_come_out_as_they_are_may_stand(number: float) -> None:
    assert at({"const": number, "enum": [[number]], "maximum": number}) == ""


def test_numbers_that_say_nothing_of_the_output_may_be_any() -> None:
    assert at({"default": 2**63 - 1, "examples": [2**53 + 1], "properties": {"const": INTEGER, "maximum": {}}}) == ""


def test_a_number_beyond_doubles_is_refused_wherever_it_stands() -> None:
    for text, place in (('{"const": 1e999}', "#/const"), ('{"examples": [{"a/b": -1e999}]}', "#/examples/0/a~1b")):
        with pytest.raises(ValueError, match=f"^at {place}: the number is too large"):
            grammar_of(constraint("json_schema", text))


def test_schemas_in_a_grammar_are_found_where_they_are_and_nowhere_else() -> None:
    lark = r"""start: a // %json {"no": 1}
a: "%json {\"no\": 2}" | /%json {"no": 3}/ | %json {"yes": "%json {\"no\": 4}"} b
b: %json   {"yes": [1]} | %json [1] | %json {"no": | %json true | "é" %json {"yes": {}}
"""
    assert list(embedded_schemas(lark)) == [
        (2, {"yes": '%json {"no": 4}'}),
        (3, {"yes": [1]}),
        (3, {"yes": {}}),
    ]
    assert list(embedded_schemas("%json")) == list(embedded_schemas("")) == []


KEYS = st.sampled_from(
    ["$ref", "$defs", "type", "properties", "required", "items", "minItems", "prefixItems", "anyOf", "allOf", "const"]
) | st.sampled_from(["object", "array", "#", "a"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(st.dictionaries(KEYS, json_values | st.sampled_from(["object", "array", "#", "#/$defs/a", "#/items"])))
def test_whatever_stands_in_a_schema_it_is_refused_or_left_to_the_compiler(schema: dict[str, Any]) -> None:
    assert at(schema) == "" or at(schema).startswith("#")
