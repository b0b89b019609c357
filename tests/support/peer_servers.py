"""A data-plane server that does what a test says, with certificates of one small authority."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlings_protos import channels, data_pb2, data_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.identity import Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_worker.links import ADMITTED_METADATA_KEY

Handler = Callable[[AsyncIterator[data_pb2.Frame], Any], Awaitable[data_pb2.Receipt]]


class Certificates:
    def __init__(self, job: str = "test") -> None:
        self.authority = CertificateAuthority.create(job, time.time())

    def worker(self) -> Identity:
        key = new_key()
        peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
        pem = self.authority.issue(key.public_key(), peer, time.time())
        return Identity(peer, key_to_pem(key), pem, self.authority.certificate_pem)


class _Service(data_pb2_grpc.DataServicer):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def Forward(
        self, request_iterator: AsyncIterator[data_pb2.Frame], context: Any
    ) -> data_pb2.Receipt:
        return await self._handler(request_iterator, context)


async def read_all(frames: AsyncIterator[data_pb2.Frame]) -> int:
    """Bytes of all chunks."""
    total = 0
    async for frame in frames:
        total += len(frame.chunk)
    return total


async def take(frames: AsyncIterator[data_pb2.Frame], context: Any) -> data_pb2.Receipt:
    await context.send_initial_metadata(((ADMITTED_METADATA_KEY, "1"),))
    await read_all(frames)
    return data_pb2.Receipt(queued=1, free_slots=2)


async def never(frames: AsyncIterator[data_pb2.Frame], context: Any) -> data_pb2.Receipt:
    """A frozen peer: it admits and does nothing more."""
    await context.send_initial_metadata(((ADMITTED_METADATA_KEY, "1"),))
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def peer_server(identity: Identity, handler: Handler) -> AsyncIterator[str]:
    """Serves Forward by `handler`; gives the address."""
    server = channels.make_server(channels.DATA)
    data_pb2_grpc.add_DataServicer_to_server(_Service(handler), server)
    port = channels.bind(server, "127.0.0.1", 0, channels.server_credentials(identity))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
