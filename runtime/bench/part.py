"""What all parts of a report have in common. Knows no figures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Base of all parts: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
