"""JSON files that may lie beside a checkpoint's weights, as the front reads them. Knows no field of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.plan import LoadError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file. Raises LoadError that names the file."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path}: expected an object, found {type(config).__name__}")
    return config
