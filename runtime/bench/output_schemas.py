"""What the workload json-schema has outputs be: a record, a nested one, lists, choices and a call, with bounds that end
every text and number. Values alone.

White space is left to no model (x-guidance): a small one would go on with it for ever.
"""

from __future__ import annotations

import json
from typing import Any


def output_schemas() -> list[str]:
    """JSON Schemas as JSON, from the simplest on. No output that meets one has more than 200 characters."""
    return [json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}) for schema in _SCHEMAS]


def _object(**properties: object) -> dict[str, Any]:
    """All properties in order, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _words(most: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^[A-Za-z_.]{{1,{most}}}$"}


def _whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(items: object, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


_SCHEMAS = (
    _object(
        name=_words(20),
        line=_whole(1, 9999),
        is_public={"type": "boolean"},
        coverage={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    ),
    _object(
        file=_object(path=_words(30), language={"enum": ["python", "c", "rust"]}),
        owner=_object(name=_words(16), reviews=_whole(0, 99)),
    ),
    _object(module=_words(20), imports=_list(_words(12), 5), lines=_list(_whole(1, 999), 4)),
    _object(
        severity={"enum": ["note", "warning", "error"]},
        rule={"enum": ["unused-import", "line-too-long", "missing-docstring"]},
        message={"type": "string", "pattern": "^[A-Za-z ]{1,40}$"},
        column={"anyOf": [_whole(0, 200), {"type": "null"}]},
    ),
    _object(
        tool={"const": "search"},
        arguments=_object(
            query={"type": "string", "pattern": "^[a-z ]{1,30}$"},
            filters=_list(_object(field={"enum": ["name", "text"]}, value=_words(10)), 2),
            limit=_whole(1, 50),
        ),
    ),
)
