"""A job's authority served on a real enrolment port, and servers that only pretend."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlings_coordinator.enrolment import (
    DEFAULT_LIMITS,
    EnrolmentAuthority,
    EnrolmentLimits,
    EnrolmentService,
)
from starlings_protos import channels, control_pb2_grpc
from starlings_protos.invite import Invite, parse_invite


@dataclass
class MovableClock:
    """A wall clock that tests may set."""

    offset_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


@dataclass
class EnrolmentWorld:
    authority: EnrolmentAuthority
    clock: MovableClock
    port: int
    events: list[tuple[str, str]] = field(default_factory=list)

    def invite(self, lifetime_s: float = 0.0, uses: int = 0, role: str = "worker", **changed) -> Invite:
        invite = parse_invite(self.authority.create_invite(lifetime_s, uses, role).invite)
        return replace(invite, **changed)


@asynccontextmanager
async def enrolment_world(
    directory: Path, *, job: str = "job", limits: EnrolmentLimits = DEFAULT_LIMITS, offset_s: float = 0.0
) -> AsyncIterator[EnrolmentWorld]:
    clock = MovableClock(offset_s)
    events: list[tuple[str, str]] = []
    authority = EnrolmentAuthority(
        directory, job, limits=limits, wall=clock, observe=lambda kind, text: events.append((kind, text))
    )
    server = channels.make_server(channels.ENROLMENT)
    control_pb2_grpc.add_EnrolmentServicer_to_server(EnrolmentService(authority), server)
    port = channels.bind(server, "127.0.0.1", 0, channels.enrolment_credentials(authority.ca))
    authority.serve_at([f"127.0.0.1:{port}"], ["127.0.0.1:7700", "train.example.org:7700"])
    await server.start()
    try:
        yield EnrolmentWorld(authority, clock, port, events)
    finally:
        await server.stop(0)


@dataclass
class Recorder:
    """What a pretender got to see, after decryption."""

    port: int = 0
    connections: int = 0
    received: bytearray = field(default_factory=bytearray)


@asynccontextmanager
async def pretender(directory: Path, key_pem: bytes, certificate_pem: bytes) -> AsyncIterator[Recorder]:
    """A TLS server with the given certificate that writes down every byte and answers nothing."""
    for name, pem in (("pretender.key", key_pem), ("pretender.pem", certificate_pem)):
        (directory / name).write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "pretender.pem", directory / "pretender.key")
    context.set_alpn_protocols(["h2"])
    recorder = Recorder()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        recorder.connections += 1
        try:
            while data := await reader.read(1 << 16):
                recorder.received += data
        except (OSError, ssl.SSLError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(record, "127.0.0.1", 0, ssl=context)
    recorder.port = server.sockets[0].getsockname()[1]
    try:
        yield recorder
    finally:
        server.close()


@asynccontextmanager
async def forwarder(choose: Callable[[int], int]) -> AsyncIterator[int]:
    """A TCP port that passes its n-th connection on to port `choose(n)`."""
    count = 0
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", choose(count))
        for pair in ((reader, inner_writer), (inner_reader, writer)):
            task = asyncio.create_task(pump(*pair))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
