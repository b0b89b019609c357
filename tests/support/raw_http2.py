"""HTTP/2 by hand, for what no library sends: frames as bytes on a TLS connection that is in order otherwise."""

from __future__ import annotations

import asyncio
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlings_protos.identity import Identity

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, section 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_headers(path: str) -> bytes:
    """A gRPC call's header block: literals without indexing (RFC 7541, section 6.2.2), nothing compressed."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


class RawConnection:
    """Frames out and in; settings and pings are answered as they should be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, *frames: bytes) -> None:
        self._writer.write(b"".join(frames))
        await self._writer.drain()

    async def read(self) -> tuple[int, int, int, bytes] | None:
        """The next frame: kind, flags, stream, payload; None when the other side closed the connection."""
        try:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3]))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
            if kind in (SETTINGS, PING) and not flags & ACK:
                await self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return kind, flags, stream, payload

    async def read_until(self, kind: int | None) -> bytes:
        """The payload of the next frame of that kind; b"" when the connection ends first, which None waits for."""
        while (found := await self.read()) is not None:
            if found[0] == kind:
                return found[3]
        return b""


@asynccontextmanager
async def raw_connection(
    port: int, ca_pem: bytes, member: Identity | None = None
) -> AsyncIterator[RawConnection]:
    """To a port of this machine, as `member` where certificates are demanded."""
    context = ssl.create_default_context(cadata=ca_pem.decode())
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if member is not None:
        with tempfile.TemporaryDirectory() as folder:
            both = Path(folder) / "both.pem"
            both.write_bytes(member.key_pem + member.certificate_pem)
            context.load_cert_chain(both)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        connection = RawConnection(reader, writer)
        await connection.send(_PREFACE, frame(SETTINGS, 0, 0))
        yield connection
    finally:
        writer.transport.abort()
