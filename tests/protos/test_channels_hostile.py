"""What a stranger or a hostile member sends costs a coded refusal and no memory, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from starlings_protos import channels, data_pb2, data_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.channels import (
    DATA,
    ENROLMENT,
    Transport,
    bind,
    make_server,
    peer_channel,
    server_credentials,
)
from starlings_protos.identity import KEEPER, Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from support import raw_http2
from support.raw_http2 import call_headers, frame, raw_connection

MEMORY_BOUND_BYTES = 48 << 20
FORWARD = "/starlings.v1.Data/Forward"
CANCEL = (8).to_bytes(4, "big")


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("job", time.time())


def worker(authority: CertificateAuthority) -> Identity:
    key = new_key()
    peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
    pem = authority.issue(key.public_key(), peer, time.time())
    return Identity(peer, key_to_pem(key), pem, authority.certificate_pem)


class Counting(data_pb2_grpc.DataServicer):
    """Counts what reaches it after the library's checks."""

    def __init__(self) -> None:
        self.bytes = 0

    async def Forward(
        self, request_iterator: AsyncIterator[data_pb2.Frame], context: Any
    ) -> data_pb2.Receipt:
        async for received in request_iterator:
            self.bytes += received.ByteSize()
        return data_pb2.Receipt(queued=1)


@asynccontextmanager
async def served(
    authority: CertificateAuthority, transport: Transport = DATA
) -> AsyncIterator[tuple[Counting, str]]:
    server, service = make_server(transport), Counting()
    data_pb2_grpc.add_DataServicer_to_server(service, server)
    credentials = server_credentials(authority.issue_identity(KEEPER, time.time()))
    port = bind(server, "127.0.0.1", 0, credentials)
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def unbounded(address: str, identity: Identity) -> AsyncIterator[grpc.aio.Channel]:
    """A client that keeps none of our limits."""
    credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.certificate_pem)
    options = [
        ("grpc.ssl_target_name_override", "keeper.w.starlings"),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        yield channel


async def honest(address: str, identity: Identity) -> data_pb2.Receipt:
    async with peer_channel(address, "keeper", identity) as channel:
        call: Any = data_pb2_grpc.DataStub(channel).Forward(iter([data_pb2.Frame(chunk=b"x")]))
        return await asyncio.wait_for(call, 10)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def refused(call: Any, frame: bytes) -> grpc.StatusCode:
    try:
        await call.write(frame)
        await call.done_writing()
        await call
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    return await asyncio.wait_for(call.code(), 10)


def raw(channel: grpc.aio.Channel, **options: Any) -> Any:
    multi: Any = channel.stream_unary(FORWARD, request_serializer=lambda data: data)
    return multi(**options)


async def test_a_compressed_message_is_refused_before_it_is_unpacked(authority: CertificateAuthority) -> None:
    bomb = data_pb2.Frame(chunk=bytes(64 << 20)).SerializeToString()
    async with served(authority) as (service, address), unbounded(address, worker(authority)) as channel:
        before = psutil.Process().memory_info().rss
        code = await refused(raw(channel, compression=grpc.Compression.Gzip), bomb)
        assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
        assert service.bytes == 0
        assert psutil.Process().memory_info().rss - before < MEMORY_BOUND_BYTES
        assert (await honest(address, worker(authority))).queued == 1


async def test_a_message_above_the_limit_is_refused_at_its_first_bytes(
    authority: CertificateAuthority,
) -> None:
    """As a library sends it."""
    large = data_pb2.Frame(chunk=bytes(64 << 20)).SerializeToString()
    async with served(authority) as (service, address), unbounded(address, worker(authority)) as channel:
        before = psutil.Process().memory_info().rss
        assert await refused(raw(channel), large) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert service.bytes == 0
        assert psutil.Process().memory_info().rss - before < MEMORY_BOUND_BYTES + len(large)
        assert (await honest(address, worker(authority))).queued == 1


@pytest.mark.slow
async def test_streams_that_are_opened_and_reset_at_once_cost_no_memory(
    authority: CertificateAuthority,
) -> None:
    """As fast as the server looks at them, which is what costs it most (see channels.server_options)."""
    headers = call_headers(FORWARD)
    async with served(authority, ENROLMENT) as (_, address):
        before = psutil.Process().memory_info().rss

        async def attack() -> None:
            async with raw_connection(port_of(address), authority.certificate_pem, worker(authority)) as raw:
                reading = asyncio.create_task(raw.read_until(None))
                for first in range(1, 2 * 8000, 8):
                    streams = range(first, first + 8, 2)
                    frames = [
                        frame(raw_http2.HEADERS, raw_http2.END_HEADERS, n, headers)
                        + frame(raw_http2.RST_STREAM, 0, n, CANCEL)
                        for n in streams
                    ]
                    await raw.send(*frames)
                    await asyncio.sleep(0.001)
                reading.cancel()

        await asyncio.gather(*(attack() for _ in range(8)))
        assert psutil.Process().memory_info().rss - before < MEMORY_BOUND_BYTES
        assert (await honest(address, worker(authority))).queued == 1


async def test_connections_that_never_finish_tls_are_dropped_and_harm_nobody(
    authority: CertificateAuthority,
) -> None:
    async with served(authority, replace(DATA, handshake_timeout_s=1.0)) as (_, address):
        host, _, port = address.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        # Half of them say nothing, half begin a handshake and stop.
        for _, writer in opened[::2]:
            writer.write(b"\x16\x03\x01\x02\x00\x01")
        assert (await honest(address, worker(authority))).queued == 1
        ends = (asyncio.wait_for(reader.read(), 20) for reader, _ in opened)
        await asyncio.gather(*ends, return_exceptions=False)
        for _, writer in opened:
            writer.close()


async def test_metadata_above_the_limit_is_refused(authority: CertificateAuthority) -> None:
    async with served(authority) as (service, address), unbounded(address, worker(authority)) as channel:
        metadata = (("junk", "x" * (channels.METADATA_LIMIT_BYTES + 1000)),)
        code = await refused(raw(channel, metadata=metadata), data_pb2.Frame(chunk=b"x").SerializeToString())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert service.bytes == 0
        assert (await honest(address, worker(authority))).queued == 1
