"""A server that lives as long as a command needs it. Knows no command."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from configs.schema import ServeSettings
from runtime.cli.startup import StartupProgress


@contextlib.asynccontextmanager
async def own_server(settings: ServeSettings) -> AsyncIterator[str]:
    """Starts a deployment, with progress on standard error; yields its address, and stops it in the end.

    Raises as `Deployment.start`.
    """
    from runtime.serve import Deployment

    deployment = Deployment(settings)
    try:
        with StartupProgress(settings.parallel) as progress:
            await deployment.start(progress)
        yield deployment.address
    finally:
        await deployment.stop(0)
