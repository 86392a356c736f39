"""A server that lives as long as a command needs it. Knows no command."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from configs.access import AccessSettings, TlsSettings
from configs.schema import OperatorSettings, ServerSettings, ServeSettings
from runtime.cli.startup import StartupProgress


@contextlib.asynccontextmanager
async def own_server(settings: ServeSettings) -> AsyncIterator[str]:
    """Starts a deployment, with progress on standard error; yields its address, and stops it in the end.

    It is the command's alone and speaks plain text to whoever asks, whatever the settings say of access. Raises as
    `Deployment.start`.
    """
    from runtime.serve import Deployment

    deployment = Deployment(_without_access(settings))
    try:
        with StartupProgress(settings.parallel) as progress:
            await deployment.start(progress)
        yield deployment.address
    finally:
        await deployment.stop(0)


def _without_access(settings: ServeSettings) -> ServeSettings:
    return settings.model_copy(
        update={
            "server": settings.server.model_copy(update={"host": ServerSettings().host, "tls": TlsSettings()}),
            "operator": OperatorSettings(),
            "access": AccessSettings(),
        }
    )
