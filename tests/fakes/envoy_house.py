"""An Envoy before a real front over the fake engine, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakes.envoy import Envoy, running_envoy
from fakes.front import Front, serving

from runtime.front.client import OutriderClient


@asynccontextmanager
async def behind_envoy(folder: Path, **options: Any) -> AsyncIterator[tuple[Front, Envoy, OutriderClient]]:
    """With plain.yaml. folder: for Envoy's files. options: as in `serving`."""
    async with (
        serving(**options) as front,
        running_envoy(folder, [front.address]) as envoy,
        OutriderClient(envoy.address) as client,
    ):
        yield front, envoy, client
