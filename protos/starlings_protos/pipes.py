"""Length-prefixed protobuf over a child's stdin and stdout: 4 bytes big-endian length, then the message."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import BinaryIO, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

# Leases carry samples: 64 MiB holds any sane grant, and a stray print into the pipe is found at once.
MESSAGE_LIMIT_BYTES = 64 << 20
_PREFIX = struct.Struct(">I")

M = TypeVar("M", bound=Message)


class PipeError(Exception):
    """The other side of the pipe wrote something that is no message."""


class _Writer(Protocol):
    def write(self, data: bytes) -> object: ...


def pack(message: Message) -> bytes:
    body = message.SerializeToString()
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise PipeError(f"message of {len(body)} bytes is above the limit of {MESSAGE_LIMIT_BYTES}")
    return _PREFIX.pack(len(body)) + body


def parse(body: bytes, cls: type[M]) -> M:
    try:
        return cls.FromString(body)
    except DecodeError as error:
        raise PipeError(f"not a {cls.DESCRIPTOR.name}: {error}") from None


def _length(prefix: bytes) -> int:
    (length,) = _PREFIX.unpack(prefix)
    if length > MESSAGE_LIMIT_BYTES:
        raise PipeError(f"length prefix {length} is above the limit of {MESSAGE_LIMIT_BYTES}")
    return int(length)


async def read(stream: asyncio.StreamReader, cls: type[M]) -> M | None:
    """The next message, or None at the end of the stream.

    Raises:
        PipeError: a truncated or malformed message.
    """
    try:
        prefix = await stream.readexactly(_PREFIX.size)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise PipeError("the stream ended within a length prefix") from None
    try:
        body = await stream.readexactly(_length(prefix))
    except asyncio.IncompleteReadError:
        raise PipeError("the stream ended within a message") from None
    return parse(body, cls)


def read_blocking(stream: BinaryIO, cls: type[M]) -> M | None:
    """As `read`, for a child without an event loop."""
    prefix = stream.read(_PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < _PREFIX.size:
        raise PipeError("the stream ended within a length prefix")
    length = _length(prefix)
    body = stream.read(length)
    if len(body) < length:
        raise PipeError("the stream ended within a message")
    return parse(body, cls)


def write(stream: _Writer, message: Message) -> None:
    stream.write(pack(message))


def claim_stdio() -> tuple[BinaryIO, BinaryIO]:
    """For a child at its start: (what the parent writes, what the parent reads).

    Afterwards standard input is empty and standard output is standard error: a stray print or a library's
    banner cannot get between two messages.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")
