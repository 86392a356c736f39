"""`outrider settings`: every setting with its default and meaning, as a YAML file to start from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel

from configs.schema import ServeSettings
from runtime.cli.console import guarded, write


def settings() -> None:
    """Print every setting with its default and meaning, as a YAML file for `serve --config`."""
    with guarded():
        write("\n".join(_lines(ServeSettings(), "")) + "\n")


def _lines(values: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:  # {(type(value).__doc__ or '').splitlines()[0]}"
            yield from _lines(value, f"{indent}  ")
            continue
        yield from textwrap.wrap(
            field.description or "", 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        plain = str(value) if isinstance(value, Path) else value
        yield f"{indent}{name}: {yaml.safe_dump(plain).splitlines()[0]}"
