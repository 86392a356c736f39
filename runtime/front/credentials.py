"""What a client shows to a server, and by what it knows the server. Knows no command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from configs.load import SettingsError
from runtime.access.callers import TOKEN_KEY
from workers.certificates import CertificateProblem, read_authority, read_pair
from workers.channel import PLAIN, Security


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Of one client; PEM files, read whenever a channel is made.

    ca: authorities of the server's certificate; None speaks plain text. certificate, key: the client's own, for servers
    that ask for them. token: for servers that know it; sent with every call, to whoever answers where `ca` is None.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = field(default=None, repr=False)

    def security(self) -> Security:
        """Raises SettingsError that names field, file and remedy."""
        given = [name for name in ("certificate", "key") if getattr(self, name) is not None]
        if len(given) == 1:
            [missing] = {"certificate", "key"} - {*given}
            raise SettingsError(f"{missing} is not set, but {given[0]} is; set both, or neither")
        if self.ca is None:
            if given:
                raise SettingsError("ca is not set, but certificate and key are; set it to the server's authority")
            return PLAIN
        try:
            ca = read_authority(self.ca, setting="ca")
            if self.certificate is None or self.key is None:
                return Security(channel=grpc.ssl_channel_credentials(ca))
            pair = read_pair(self.certificate, self.key, where="client")
        except CertificateProblem as problem:
            raise SettingsError(str(problem)) from None
        return Security(channel=grpc.ssl_channel_credentials(ca, pair.key, pair.certificate))


class BearingChannel:
    """A channel that brings a token with every call. Has what generated stubs ask of one."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._brought = ((TOKEN_KEY, f"Bearer {token}"),)

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._bringing(self._channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._bringing(self._channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._bringing(self._channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._bringing(self._channel.stream_stream(*method, **options))

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def _bringing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def make(*request: Any, metadata: Sequence[tuple[str, str | bytes]] | None = None, **options: Any) -> Any:
            return call(*request, metadata=(*(metadata or ()), *self._brought), **options)

        return make
