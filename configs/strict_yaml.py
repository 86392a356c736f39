"""YAML as settings and identities are written in it. Knows no setting."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError


class StrictLoader(yaml.SafeLoader):
    """YAML in which a key is a name, and given twice is an error: the first value would silently lose.

    What cannot be used is a MarkedYAMLError, also a scalar of a kind that it is no value of (2001-99-99, !!int x).
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be a name", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"{key.value} is given twice; keep one", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError):
            # Not in the library's words, which repeat what stands there.
            problem = "is no value of the kind that it looks like; put it in quotes"
            raise ConstructorError(None, None, problem, node.start_mark) from None
