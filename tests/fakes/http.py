"""An HTTP/1.1 client that hands out an answer as it comes, trailers included. Knows one request per connection."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """headers, and trailers once the body has been read: names in lower case."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    trailers: dict[str, str] = field(default_factory=dict)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece as the server sent it. Raises IncompleteReadError where it breaks off."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        self.trailers = await _headers(self.reader)

    async def lines(self) -> AsyncIterator[str]:
        """The body's lines, each as soon as it is whole."""
        rest = b""
        async for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode()
        assert not rest, "a line without an end"

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def json(self) -> Any:
        return json.loads(await self.body())


@asynccontextmanager
async def asking(
    method: str,
    address: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Answer]:
    """One request and its answer's head; leaving the block closes the connection.

    address: host:port. body: bytes as they are, anything else as JSON.
    """
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname=host if tls else None)
    try:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"host": address, "content-length": str(len(content)), "content-type": "application/json"}
        fields |= headers or {}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        status = (await reader.readuntil(b"\r\n")).split()[1]
        yield Answer(int(status), await _headers(reader), reader)
    finally:
        writer.close()


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers = {}
    while line := (await reader.readuntil(b"\r\n")).decode().strip():
        name, value = line.split(":", 1)
        headers[name.lower()] = value.strip()
    return headers
