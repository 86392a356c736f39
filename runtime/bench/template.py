"""HTML pages of templates that lie beside the code. Knows no figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2


def render(template: Path, *, filters: Mapping[str, Callable[..., object]] | None = None, **context: object) -> str:
    """HTML text; whatever is put in is escaped, and a name that is missing is an error."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(filters or {})
    return environment.from_string(template.read_text(encoding="utf-8")).render(**context)
