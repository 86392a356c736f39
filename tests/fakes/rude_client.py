"""An HTTP/2 client that does what a library would not: frames by hand over a socket. Knows no gRPC but its headers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ACK = END_STREAM = 1
END_HEADERS = 4
REFUSED_STREAM, ENHANCE_YOUR_CALM = 7, 11
MAX_CONCURRENT_STREAMS = 3
MAX_FRAME_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """Of an RST_STREAM or a GOAWAY."""
        return int.from_bytes(self.payload[:4] if self.kind == RST_STREAM else self.payload[4:8])

    @property
    def settings(self) -> dict[int, int]:
        return dict(struct.iter_unpack(">HI", self.payload))


class RudeClient:
    """One connection, on which nothing has been said yet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> None:
        head = len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4)
        self._writer.write(head + payload)

    def open(self) -> None:
        """Says the opening words."""
        self._writer.write(PREFACE)
        self.send(SETTINGS)

    def call(self, stream: int, method: str, *more: tuple[str, str], ends: bool = True) -> None:
        """Begins a call; its message and the end of the stream are not sent. ends: whether the headers do."""
        block = headers_of(method, *more)
        parts = [block[start : start + MAX_FRAME_BYTES] for start in range(0, len(block), MAX_FRAME_BYTES)]
        for number, part in enumerate(parts):
            is_last = ends and number == len(parts) - 1
            self.send(CONTINUATION if number else HEADERS, END_HEADERS if is_last else 0, stream, part)

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    def message(self, stream: int, message: bytes, flags: int = END_STREAM) -> None:
        self.send(DATA, flags, stream, b"\0" + len(message).to_bytes(4) + message)

    async def frame(self) -> Frame | None:
        """The next frame of the server; None where it has closed the connection."""
        try:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return Frame(head[3], head[4], int.from_bytes(head[5:9]) & 0x7FFFFFFF, payload)

    async def until(self, *kinds: int) -> Frame | None:
        """The next frame of one of these kinds; settings and pings on the way are answered."""
        while (frame := await self.frame()) is not None and frame.kind not in kinds:
            if frame.kind in (SETTINGS, PING) and not frame.flags & ACK:
                self.send(frame.kind, ACK, 0, frame.payload if frame.kind == PING else b"")
        return frame

    async def until_closed(self) -> list[Frame]:
        """What the server still says, to which nothing is answered; returns when it has closed the connection."""
        said = []
        while (frame := await self.frame()) is not None:
            said.append(frame)
        return said


@asynccontextmanager
async def rude_client(address: str) -> AsyncIterator[RudeClient]:
    """Connects to host:port."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RudeClient(reader, writer)
    finally:
        writer.close()


def headers_of(method: str, *more: tuple[str, str]) -> bytes:
    """Of a gRPC call, as literals that no table remembers (RFC 7541, 6.2.2)."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "test"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    )
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, length = len(data) - 127, bytearray((127,))
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes((*length, rest)) + data
