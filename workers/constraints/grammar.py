"""From a constraint to a grammar as llguidance takes it, and what it says of a bad one in our words. Knows no tokens.

Every grammar is told not to force: llguidance would else also forbid all but one spelling of what must come next, at a
cost that grows with the square of its length.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from workers.constraints.places import find_place
from workers.constraints.soundness import check_schema, embedded_schemas
from workers.demands import Constraint

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Of what is followed, and for most part of what is compiled: a schema of a thousand properties takes a tenth of a
second, a mask some tens of milliseconds, a state of a lexer half a kB or one. They do not bound how deep references and
rules go, nor what an intersection, or thousands of options in an expression, take to compile: `trial` does."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between two parts of a JSON text: a model that does not know how to go on could fill the output with it else."""

DEAD_END = "the output came to where the constraint lets nothing follow and is not met either"

MAX_TOLD = 400
"""Characters of a complaint; it may quote the grammar."""

MAX_SEARCH_S = 0.5
"""For the place of a fault; what is found until then is told."""

MAX_DIGITS = 300
"""Of a number in a schema."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_OF_COMPILER = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"\n *\d+ \| ")
_IN_REGEX = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^+\nerror: (.*)")


def grammar_of(constraint: Constraint) -> str:
    """Raises ValueError for what is none at first sight."""
    match constraint.kind:
        case "json_schema":
            schema = read_schema(constraint.text)
            check_schema(schema)
            return _json(schema)
        case "json_object":
            return _json({"type": "object"})
        case "regex":
            return _regex(constraint.text)
        case "lark":
            _check_embedded(constraint.text)
            return _lark(constraint.text)
        case "choice":
            return _lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(constraint.text)))


def read_schema(text: str) -> dict[str, Any]:
    """Raises ValueError with the place of what is no JSON."""
    try:
        schema = json.loads(text, parse_constant=_refuse, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: no JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except OverflowError:
        raise ValueError("a number in it is too long") from None
    if schema is False:
        raise ValueError("no output meets it")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object or true")
    return schema


def explain(constraint: Constraint, told: str) -> str:
    """What llguidance tells of a constraint that does not compile, with the place where it is known."""
    if told.startswith("NoExtensionBias"):
        return "no output meets it"
    if "rollback not supported" in told:
        return "max_tokens and stop of a rule cannot be followed; say with `suffix` what ends it"
    if told.startswith("recursion limit exceeded"):
        return "it is nested too deeply"
    if constraint.kind == "json_schema":
        until = time.monotonic() + MAX_SEARCH_S
        place, told = find_place(
            read_schema(constraint.text), told, lambda part: _complaint(part) if time.monotonic() < until else ""
        )
        return in_short(f"at {place}: {_plain(told)}")
    if constraint.kind == "regex":
        return in_short(_plain_regex(constraint.text, told))
    return in_short(_plain(told))


def explain_break(told: str) -> str:
    """What llguidance tells of a matcher that cannot go on."""
    if told.startswith("NoExtensionBias"):
        return DEAD_END
    return in_short(f"the constraint became too costly to follow: {_plain(told)}")


def in_short(told: str) -> str:
    """In one line, and no longer than may be told."""
    told = " ".join(told.split())
    return told if len(told) <= MAX_TOLD else told[: MAX_TOLD - 1] + "…"


def _json(schema: dict[str, Any]) -> str:
    schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    main = {"lark_grammar": "start: @json" + _NO_FORCING}
    return json.dumps({"grammars": [main, {"name": "json", "json_schema": schema}]}, allow_nan=False)


def _check_embedded(lark: str) -> None:
    for line, schema in embedded_schemas(lark):
        try:
            check_schema(schema)
        except ValueError as error:
            raise ValueError(f"line {line}, in %json: {error}") from None


def _regex(text: str) -> str:
    num_backslashes = len(text) - len(text.rstrip("\\"))
    if num_backslashes % 2:
        raise ValueError(f"character {len(text)}: incomplete escape sequence")
    return _lark(json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"])


def _lark(text: str) -> str:
    # Behind the rest, so that line numbers stay; in JSON, so that nothing else than Lark is taken.
    return json.dumps({"grammars": [{"lark_grammar": text + _NO_FORCING}]})


def _complaint(schema: dict[str, Any]) -> str:
    """What llguidance tells of a schema; "" where it is good."""
    told: str = LLMatcher.validate_grammar(_json(schema), None, limits=LIMITS)
    return told


def _plain_regex(text: str, told: str) -> str:
    _, _, told = told.rpartition(" (in regex): ")
    found = _IN_REGEX.search(told)
    if found is None:
        return _plain(re.sub(r" in regex /.*", "", told, count=1, flags=re.DOTALL))
    return f"character {_character(text, len(found[1]))}: {found[2]}"


def _character(text: str, column: int) -> int:
    """Which character of an expression, from 1, stands at a column, from 0, of what llguidance makes of it: slashes
    and line breaks are escaped there."""
    for place, character in enumerate(text):
        escapes = character == "\n" or (character == "/" and not text[:place].endswith("\\"))
        column -= 2 if escapes else 1
        if column < 0:
            return place + 1
    return len(text)


def _plain(told: str) -> str:
    """In one line, the place in words, without an excerpt."""
    told = told.replace(_OF_COMPILER, "say anyOf instead, where that is meant")
    told = _EXCERPT.split(told.replace("<non-verbose/>", "").split("\n  while processing ")[0])[0]
    told = _IN_REGEX.sub(lambda found: f"character {len(found[1]) + 1}: {found[2]}", told)
    told = _PLACE.sub(lambda found: f"line {found[1]}, column {found[2]}: ", told, count=1)
    return " ".join(told.split())


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise OverflowError
    return int(digits)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
