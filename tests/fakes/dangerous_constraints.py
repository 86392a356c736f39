"""Constraints that fit into a message and take the life, or minutes, of whoever compiles them; and such as would be
followed, but not to what they say. Test material only."""

from __future__ import annotations

import json

from workers.demands import Constraint


def _references(count: int) -> str:
    chain = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(count)}
    return json.dumps({"$defs": chain | {f"a{count}": {"type": "integer"}}, "$ref": "#/$defs/a0"})


def _rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(count)) + f'\nr{count}: "a"'


def _intersections(count: int) -> str:
    return "start: T\nT: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(1, count))


DANGEROUS = {
    "references to references": Constraint(kind="json_schema", text=_references(900)),
    "rules of rules": Constraint(kind="lark", text=_rules(3500)),
    "places in an intersection": Constraint(kind="lark", text=_intersections(40)),
    "thousands of options": Constraint(kind="regex", text="a?" * 30_000),
}

UNSOUND = {
    "a number without an opposite": Constraint(kind="json_schema", text='{"const": -9223372036854775808}'),
    "a number that would be rounded": Constraint(kind="json_schema", text='{"enum": [{"a": 1234567890123456789}]}'),
    "a number in a grammar": Constraint(kind="lark", text='start: %json {"maximum": 9007199254740993}'),
    "an infinite number": Constraint(kind="json_schema", text='{"const": 1e999}'),
    "an endless object": Constraint(
        kind="json_schema",
        text='{"$defs": {"t": {"type": "object", "properties": {"c": {"$ref": "#/$defs/t"}}, "required": ["c"]}},'
        ' "$ref": "#/$defs/t"}',
    ),
    "itself": Constraint(kind="json_schema", text='{"$ref": "#"}'),
}
