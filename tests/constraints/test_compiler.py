"""Each kind of constraint compiles to what it says, bad ones are refused with a place, none costs without bound."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
from constraints.tiny_tokenizers import compiler_of, constraint, ids, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from configs.load import demo_checkpoint
from workers.constraints import compiler as compiler_module
from workers.constraints.compiler import Compiler, ConstraintError, mask_of
from workers.constraints.grammar import MAX_TOLD
from workers.demands import Constraint, ConstraintKind

V, END = 4096, 0


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(demo_checkpoint() / "tokenizer.json", V, [END])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))


def takes(compiler: Compiler, of: Constraint, tokens: Sequence[int]) -> bool:
    """Whether the tokens may stand one behind the other and the end behind them."""
    matcher = compiler.matcher(of)
    for token in tokens:
        mask = mask_of(matcher, compiler.vocab_size)
        if mask is None or token not in ids(mask) or not matcher.consume_token(token):
            return False
    mask = mask_of(matcher, compiler.vocab_size)
    return mask is not None and END in ids(mask)


def problem(compiler: Compiler, kind: ConstraintKind, what: object) -> str:
    with pytest.raises(ConstraintError) as caught:
        compiler.prepare(constraint(kind, what))
    told = str(caught.value)
    assert len(told) <= MAX_TOLD
    assert "\n" not in told
    assert "verbose" not in told
    return told


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

GOOD: dict[str, tuple[Constraint, list[str], list[str]]] = {
    "json_schema": (
        constraint("json_schema", PERSON),
        ['{"name":"Ann","age":3}', '{"name": "안녕 👍🏽", "age": 0}', '{\n  "name" : "",\n  "age": 10\n}'],
        ['{"name":"Ann"}', '{"name":"Ann","age":-1}', '{"age":3,"name":"Ann"} ', "null", ""],
    ),
    "any JSON": (constraint("json_schema", "true"), ["1", '"a"', "[]", '{"a": [1, null]}'], ["", "a", "[1,]"]),
    "json_object": (constraint("json_object"), ["{}", '{"a": {"b": [1.5e3]}}'], ["[]", "{", '{"a"}', "{} "]),
    "regex": (constraint("regex", r"[ab]+(-\d{2})?"), ["a", "abba", "b-07"], ["", "a-7", "ab-123", "c"]),
    "regex with anchors": (constraint("regex", "^ab$"), ["ab"], ["a", "abb"]),
    "regex with flags": (constraint("regex", "(?i)ab/\n"), ["aB/\n"], ["ab"]),
    "lark": (
        constraint("lark", 'start: "(" start ")" | WORD\nWORD: /[a-z]+/\n%ignore " "'),
        ["a", "((abc))", "( a )"],
        ["", "((a)", "A"],
    ),
    "choice": (
        constraint("choice", ["yes", "yes, but", "no"]),
        ["yes", "yes, but", "no"],
        ["", "ye", "yes, ", "maybe"],
    ),
}


@pytest.mark.parametrize(("of", "good", "bad"), GOOD.values(), ids=GOOD)
def test_each_kind_takes_what_it_says_and_nothing_else(
    compiler: Compiler, tokenizer: Tokenizer, of: Constraint, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert takes(compiler, of, tokenizer.encode(text).ids), text
        assert takes(compiler, of, [id for letter in text for id in tokenizer.encode(letter).ids]), text
    for text in bad:
        assert not takes(compiler, of, tokenizer.encode(text).ids), text


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_a_choice_is_taken_letter_by_letter_whatever_the_letters_are(
    compiler: Compiler, tokenizer: Tokenizer, choices: list[str]
) -> None:
    of = constraint("choice", choices)
    for choice in choices:
        assert takes(compiler, of, tokenizer.encode(choice).ids)
    other = choices[0] + "x"
    assert takes(compiler, of, tokenizer.encode(other).ids) == (other in choices)


BAD: dict[str, tuple[ConstraintKind, object, str]] = {
    "unknown type": ("json_schema", {"type": "text"}, "at #: Invalid type: text"),
    "a property": (
        "json_schema",
        {"properties": {"a": {"type": "integer"}, "b/c": {"type": "text"}}},
        "at #/properties/b~1c: Invalid type: text",
    ),
    "a definition": (
        "json_schema",
        {"$defs": {"q": {"anyOf": [{}, {"not": {}}]}}, "properties": {"a": {"items": {"$ref": "#/$defs/q"}}}},
        'at #/$defs/q/anyOf/1: Unimplemented keys: ["not"]',
    ),
    "a pattern": ("json_schema", {"items": {"pattern": "ab("}}, "at #/items: character 3: unclosed group"),
    "a bound": (
        "json_schema",
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 4}}, "required": ["a"]},
        "at #/properties/a: Unsatisfiable schema: minimum (5) is greater than maximum (4)",
    ),
    "another document": ("json_schema", {"$ref": "http://elsewhere/"}, "at #: Resource 'http://elsewhere/'"),
    "itself": ("json_schema", {"$ref": "#"}, "at #: no output meets it"),
    "false": ("json_schema", "false", "no output meets it"),
    "a number": ("json_schema", "3", "a schema is a JSON object or true"),
    "half": ("json_schema", '{"type":\n "obj', "line 2, column 2: no JSON"),
    "not a number": ("json_schema", '{"minimum": NaN}', "NaN is no JSON"),
    "infinite": ("json_schema", '{"items": {"const": 1e999}}', "at #/items/const: the number is too large"),
    "a long number": ("json_schema", '{"minimum": ' + "9" * 5000 + "}", "a number in it is too long"),
    "deep": ("json_schema", '{"items":' * 6000 + "true" + "}" * 6000, "nested too deeply"),
    "deeper": ("json_schema", '{"enum":' + "[" * 50_000, "nested too deeply"),
    "quite deep": ("json_schema", '{"items":' * 500 + "true" + "}" * 500, "nested too deeply"),
    "regex": ("regex", "a/b(c", "character 4: unclosed group"),
    "regex, second line": ("regex", "a\nb[z-a]", "character 5: invalid character class range"),
    "regex that looks ahead": ("regex", "(?=a)b", "character 1: look-around"),
    "regex with a word boundary": ("regex", r"a\b", "lookarounds not supported"),
    "regex that ends in a backslash": ("regex", "ab\\", "character 3: incomplete escape"),
    "regex of nothing": ("regex", r"[^\s\S]", "no output meets it"),
    "regex in parentheses": ("regex", "(" * 30_000 + "a" + ")" * 30_000, "character 251: exceed the maximum number"),
    "no start": ("lark", 'begin: "a"', "no start rule"),
    "no rule": ("lark", 'start: a\n  | "x" b\na: "y"', 'line 1, column 8: unknown name: "b"'),
    "no string": ("lark", 'start: "x"\nq: "a', "line 2, column 6: lexer error"),
    "no lark": ("lark", '{"grammars": []}', "line 1, column 1"),
    "lark in circles": ("lark", "start: start", "no output meets it"),
    "lark in parentheses": ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "too deeply nested"),
    "lark with a bad schema": ("lark", 'start: %json {"type": "text"}', "line 1, column 8: failed to compile JSON"),
    "a rule's own limit": ("lark", 'start: a "x"\na[max_tokens=3]: /.*/', "max_tokens and stop of a rule"),
    "a rule's own stop": ("lark", 'start: a "x"\na[stop="b"]: /.*/', "max_tokens and stop of a rule"),
}


@pytest.mark.parametrize(("kind", "what", "told"), BAD.values(), ids=BAD)
def test_what_cannot_be_followed_is_refused_and_its_place_is_told(
    compiler: Compiler, kind: ConstraintKind, what: object, told: str
) -> None:
    assert told in problem(compiler, kind, what)
    compiler.prepare(constraint("regex", "ab"))


def test_the_place_of_a_fault_is_looked_for_in_bounded_time(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.constraints.grammar.MAX_SEARCH_S", 0.0)
    assert problem(compiler, "json_schema", {"items": {"type": "text"}}) == "at #: Invalid type: text"


HUGE: dict[str, Constraint] = {
    "a million repetitions": constraint("regex", "[ab](x{1000}){1000}"),
    "a state for each subset": constraint("regex", "[ab]*a[ab]{200}c"),
    "repetitions of anything": constraint("regex", "(.{0,1000}b){0,1000}"),
    "a long word": constraint("regex", "[ab]" + "x" * 60_000),
    "a string of any length": constraint("json_schema", {"type": "string", "minLength": 10**6}),
    "an array of any length": constraint("json_schema", {"type": "array", "minItems": 10**9}),
    "a thousand properties": constraint(
        "json_schema", {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1000)}}
    ),
    "a million combinations": constraint(
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "null"}}} for j in (0, 1)]} for i in range(20)]},
    ),
    "nested repetitions": constraint("lark", 'start: ((("a" | "b"){1,1000}){1,1000}){1,1000}'),
    "every way to read it": constraint("lark", 'start: e\ne: e e | "a"'),
    "a chain of rules": constraint(
        "lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2000)) + '\nr2000: "a"'
    ),
    "a thousand choices": constraint("choice", [f"choice number {i}" for i in range(1024)]),
}


@pytest.mark.parametrize("of", HUGE.values(), ids=HUGE)
def test_a_huge_constraint_is_refused_or_followed_within_the_limits(compiler: Compiler, of: Constraint) -> None:
    """Without the limits some of these take minutes and gigabytes; the test's time limit is the bound."""
    try:
        matcher = compiler.matcher(of)
    except ConstraintError:
        return
    for _ in range(20):
        mask = mask_of(matcher, V)
        if mask is None or not (allowed := ids(mask) - {END}):
            break
        if not matcher.consume_token(max(allowed)):
            break
    if matcher.is_error():
        assert re.search(r"lexer|max is|fuel|items", matcher.get_error()), matcher.get_error()


def test_whitespace_between_the_parts_of_a_json_text_is_bounded(compiler: Compiler, tokenizer: Tokenizer) -> None:
    of = constraint("json_object")
    assert takes(compiler, of, tokenizer.encode('{"a":' + "\n" * 60 + "1}").ids)
    assert not takes(compiler, of, tokenizer.encode('{"a":' + "\n" * 70 + "1}").ids)


def test_rows_without_tokens_and_special_tokens_never_stand(tmp_path: Path) -> None:
    """A model may have more rows than the tokenizer tokens."""
    compiler = compiler_of(tmp_path, ["a", "b"], special=("<end>", "<tool>"), vocab_size=13)
    mask = mask_of(compiler.matcher(constraint("regex", "(?s:.*)")), 13)
    assert mask is not None
    assert len(mask) == 2
    assert ids(mask) == {0, 1, 2}


def test_every_end_of_the_checkpoint_may_end_an_output(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, ["a", "b"], ("<end>", "<other>"))
    compiler = Compiler(path, 4, [3, 2])
    mask = mask_of(compiler.matcher(constraint("regex", "a*")), 4)
    assert ids(mask) == {0, 2, 3}
    assert sorted(compiler.eos_token_ids()) == [2, 3]


@pytest.mark.parametrize("text", ["", "{}", "[", '{"model": {"type": "none"}}'])
def test_a_tokenizer_that_cannot_be_read_is_the_constraints_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ConstraintError, match="tokenizer"):
        Compiler(path, 4, [0]).prepare(constraint("regex", "a"))


def test_fewer_rows_than_tokens_are_the_constraints_error(tmp_path: Path) -> None:
    with pytest.raises(ConstraintError, match="tokenizer"):
        compiler_of(tmp_path, ["a", "b", "c"], vocab_size=3).prepare(constraint("regex", "a"))


def test_the_least_recently_used_constraint_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 3)
    compiled: list[str] = []
    real = compiler_module.compile_matcher
    monkeypatch.setattr(compiler_module, "compile_matcher", lambda t, of: (compiled.append(of.text), real(t, of))[1])
    compiler = compiler_of(tmp_path, ["a", "b"])
    for text in ("a", "b", "ab", "a", "ba", "a", "b"):
        compiler.matcher(constraint("regex", text))
    assert compiled == ["a", "b", "ab", "ba", "b"]
    assert [text for text in ("a", "b", "ab", "ba") if compiler.is_ready(constraint("regex", text))] == ["a", "b", "ba"]


def test_what_is_made_ready_waits_for_its_sequence_whatever_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than are kept of those that sequences had: none of them is compiled within a step."""
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    compiler = compiler_of(tmp_path, ["a", "b"])
    many = [constraint("regex", "a" * count) for count in range(1, 40)]
    for of in many:
        compiler.prepare(of)
    monkeypatch.setattr(compiler_module, "compile_matcher", lambda tokenizer, of: pytest.fail(f"compiled {of}"))
    for of in many:
        assert ids(mask_of(compiler.matcher(of), 3)) == {0}
    assert [of for of in many if compiler.is_ready(of)] == many[-2:]


def test_what_waits_is_bounded_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_AWAITED_BYTES", 10)
    path = write_tokenizer(tmp_path, ["a", "b"])
    compiler = Compiler(path, 3, [2], lambda of: len(of.text))
    sizes = ("aaaa", "bbbb", "aa", "bbbbb", "ab")
    for text in sizes:
        compiler.prepare(constraint("regex", text))
    assert [text for text in sizes if compiler.is_ready(constraint("regex", text))] == ["aa", "bbbbb", "ab"]
    compiler.matcher(constraint("regex", "bbbbb"))
    compiler.prepare(constraint("regex", "bbbbbb"))
    assert compiler.is_ready(constraint("regex", "ab"))


def test_what_was_not_tried_is_not_compiled_in_a_step_and_what_was_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 1)
    tried: list[str] = []
    compiler = Compiler(write_tokenizer(tmp_path, ["a", "b"]), 3, [2], lambda of: (tried.append(of.text), 1)[1])
    first, second = constraint("regex", "a"), constraint("regex", "b")
    with pytest.raises(ConstraintError, match="not made ready"):
        compiler.matcher(first)
    for of in (first, second, first):
        compiler.prepare(of)
        compiler.matcher(of)
    assert not compiler.is_ready(second)
    compiler.matcher(second)
    assert tried == ["a", "b"]


def test_constraints_of_one_text_and_several_kinds_are_several(compiler: Compiler, tokenizer: Tokenizer) -> None:
    text = '{"type": "null"}'
    compiler.prepare(constraint("json_schema", text))
    assert takes(compiler, constraint("json_schema", text), tokenizer.encode("null").ids)
    assert not takes(compiler, constraint("choice", [text]), tokenizer.encode("null").ids)


def test_threads_that_compile_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    compiler = compiler_of(tmp_path, ["a", "b"])
    texts = ["a", "b", "(", "ab", "b{3}", "[", "a*", "(a|b)+"]
    told: dict[int, list[str]] = {}

    def work(seed: int) -> None:
        told[seed] = []
        for i in range(40):
            text = texts[(seed + i * (1 + seed)) % len(texts)]
            try:
                mask = mask_of(compiler.matcher(constraint("regex", text)), 3)
                told[seed].append(f"{text} {sorted(ids(mask))}")
            except ConstraintError as error:
                told[seed].append(f"{text} {error}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = {answer.split(" ", 1)[0]: answer for answer in told[0]}
    assert all(answer == answers.get(answer.split(" ", 1)[0], answer) for each in told.values() for answer in each)
    assert sum(map(len, told.values())) == 160


def whole(parts: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


schemas = st.recursive(
    st.sampled_from([{"type": "integer"}, {"enum": [1, "a", None]}, {"type": "string", "maxLength": 3}]),
    lambda inner: (
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(whole)
        | inner.map(lambda part: {"type": "array", "items": part, "maxItems": 2})
    ),
    max_leaves=4,
)


@given(schemas)
def test_what_a_schema_lets_stand_meets_it(compiler: Compiler, tokenizer: Tokenizer, schema: dict[str, object]) -> None:
    """The token with the least id that may stand, until the end may: short texts, as nothing asks for long ones."""
    matcher = compiler.matcher(constraint("json_schema", schema))
    tokens: list[int] = []
    for _ in range(200):
        mask = mask_of(matcher, V)
        assert mask is not None
        allowed = ids(mask)
        if END in allowed:
            break
        tokens.append(max(allowed))
        assert matcher.consume_token(tokens[-1])
    text = tokenizer.decode(tokens)
    if END in allowed:
        jsonschema.validate(json.loads(text), schema)
