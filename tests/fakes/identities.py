"""A front that knows an identity per role, clients of each, and what its audit log says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from fakes.front import Front, serving

from runtime.access.identity import Role
from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials

TOKENS = {role.value: f"token-of-{role.value}" for role in Role} | {"nobody": "token-of-nobody"}
"""Of one identity per role, named after it, and one that no server knows."""


def entry(name: str, *roles: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "roles": list(roles), **more}


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def write_identities(path: Path, *entries: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"identities": [dict(one) for one in entries]}))
    return path


def by_role(path: Path) -> Path:
    """One identity per role, named after it."""
    return write_identities(
        path, *(entry(role.value, role.value, token_sha256=digest(TOKENS[role.value])) for role in Role)
    )


@asynccontextmanager
async def guarded(tmp_path: Path, **settings: Any) -> AsyncIterator[Front]:
    """A front with an identity per role."""
    chosen = {
        "access.identities": by_role(tmp_path / "identities.yaml"),
        "access.audit_log": tmp_path / "audit.jsonl",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    async with serving(settings=chosen) as front:
        yield front


def as_(name: str, address: str) -> OutriderClient:
    return OutriderClient(address, Credentials(token=TOKENS[name]))


def audited(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
