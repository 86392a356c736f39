"""Callers: their names, roles and limits. Knows no files, no certificates and no gRPC."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What an identity may do: GENERATE text and ask about the model, OBSERVE what the server does, OPERATE it. Who may
    operate may observe."""

    GENERATE = "generate"
    OBSERVE = "observe"
    OPERATE = "operate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None sets none. concurrency: Generate calls at a time. tokens_per_minute: of prompt and output, in any minute.
    max_context: prompt and output of one sequence, in tokens."""

    concurrency: int | None = None
    tokens_per_minute: int | None = None
    max_context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A caller. name: as logs and audit name it; never a secret."""

    name: str
    roles: frozenset[Role]
    limits: Limits = Limits()


ANYONE = Identity(name="anyone", roles=frozenset(Role))
"""Whoever calls a server that knows no identities."""

UNKNOWN = Identity(name="unknown", roles=frozenset())
"""Whoever calls a server that knows identities, and is none of them."""

RESERVED = frozenset({ANYONE.name, UNKNOWN.name, "server"})
"""Names that stand in logs for nobody's identity."""

CALLER: ContextVar[Identity] = ContextVar("caller", default=ANYONE)
"""Of the RPC that the running task handles. Set before its handler runs."""
