"""Idle connections live: both sides' keepalive comes from one constant, so nobody is cut off with `too_many_pings`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from starlings_protos import channels, control_pb2, control_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.identity import COORDINATOR, OWNER, Identity
from starlings_protos.peers import CONTROL_POLICY, RoleGuard

# As in the product, much faster. gRPC's client keeps a second between two pings all the same.
FAST = replace(channels.CONTROL, keepalive_s=0.5, keepalive_timeout_s=20.0)


class _Idle(control_pb2_grpc.ControlServicer):
    async def Status(self, request, context):
        return control_pb2.StatusReply(job="idle")


class _Hearing(control_pb2_grpc.ControlServicer):
    """Answers the first message and the end."""

    async def Session(self, request_iterator, context):
        heard = 0
        async for _ in request_iterator:
            heard += 1
            if heard == 1:
                await context.write(control_pb2.ToWorker(heartbeat_ack=control_pb2.HeartbeatAck()))
        if heard == 21:
            await context.write(control_pb2.ToWorker(heartbeat_ack=control_pb2.HeartbeatAck()))


async def _serve(identity: Identity, transport: channels.Transport) -> tuple[grpc.aio.Server, int]:
    server = channels.make_server(transport, (RoleGuard(CONTROL_POLICY),))
    control_pb2_grpc.add_ControlServicer_to_server(_Idle(), server)
    port = channels.bind(server, "127.0.0.1", 0, channels.server_credentials(identity))
    await server.start()
    return server, port


async def _connected(port: int, identity: Identity, count: int) -> list[grpc.aio.Channel]:
    opened = [channels.control_channel(f"127.0.0.1:{port}", identity, FAST) for _ in range(count)]
    for channel in opened:
        reply = await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=30)
        assert reply.job == "idle"
    return opened


async def _first_to_leave_ready(opened: list[grpc.aio.Channel], within_s: float) -> int:
    """How many of the channels lost their connection within the time."""

    async def lost(channel: grpc.aio.Channel) -> None:
        state = channel.get_state()
        while state == grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state()

    tasks = [asyncio.create_task(lost(channel)) for channel in opened]
    done, pending = await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return len(done)


async def _close(opened: list[grpc.aio.Channel], server: grpc.aio.Server) -> None:
    await asyncio.gather(*(channel.close() for channel in opened))
    await server.stop(0)


@pytest.fixture(scope="module")
def identities() -> tuple[Identity, Identity]:
    authority = CertificateAuthority.create("job", time.time())
    return authority.issue_identity(COORDINATOR, time.time()), authority.issue_identity(OWNER, time.time())


async def test_200_idle_connections_are_kept(identities: tuple[Identity, Identity]):
    server, port = await _serve(identities[0], FAST)
    opened = await _connected(port, identities[1], 200)
    try:
        # Five pings each; the third early one would end a connection, as the next test shows.
        assert await _first_to_leave_ready(opened, within_s=5.5) == 0
        assert all(channel.get_state() == grpc.ChannelConnectivity.READY for channel in opened)
    finally:
        await _close(opened, server)


async def test_the_test_would_notice(identities: tuple[Identity, Identity]):
    """A server that expects rarer pings does cut them off."""
    server, port = await _serve(identities[0], replace(FAST, keepalive_s=600.0))
    opened = await _connected(port, identities[1], 1)
    try:
        assert await _first_to_leave_ready(opened, within_s=10.0) == 1
    finally:
        await _close(opened, server)


async def _packets_to_a_speaker(transport: channels.Transport, identities: tuple[Identity, Identity]) -> int:
    """How often the server sends something to a client that says twenty small things, one by one."""
    server = channels.make_server(transport)
    control_pb2_grpc.add_ControlServicer_to_server(_Hearing(), server)
    port = channels.bind(server, "127.0.0.1", 0, channels.server_credentials(identities[0]))
    await server.start()
    packets = 0

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool) -> None:
        nonlocal packets
        while octets := await reader.read(1 << 16):
            packets += counts
            writer.write(octets)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, there[1], False), pass_on(there[0], writer, True))

    proxy = await asyncio.start_server(between, "127.0.0.1", 0)
    channel = channels.control_channel(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", identities[1])
    call = control_pb2_grpc.ControlStub(channel).Session()
    beat = control_pb2.ToCoordinator(heartbeat=control_pb2.Heartbeat(progress=1))
    try:
        await call.write(beat)
        assert (await call.read()).WhichOneof("body") == "heartbeat_ack"
        packets = 0
        for _ in range(20):
            # Beyond the least pause between two pings of this kind.
            await asyncio.sleep(0.12)
            await call.write(beat)
        await call.done_writing()
        before = packets
        assert (await call.read()).WhichOneof("body") == "heartbeat_ack", "all of them were heard"
        return before
    finally:
        call.cancel()
        await channel.close()
        await server.stop(0)
        proxy.close()


async def test_whoever_speaks_to_a_coordinator_is_not_pinged_for_it(identities: tuple[Identity, Identity]):
    assert await _packets_to_a_speaker(channels.CONTROL, identities) <= 1
    # The count would notice.
    fitting = replace(channels.CONTROL, server_fits_windows=True)
    assert await _packets_to_a_speaker(fitting, identities) >= 3


def _connections(port: int) -> Iterator[socket.socket]:
    """Both ends of this process's connections to its own port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                internet = end.family in (socket.AF_INET, socket.AF_INET6)
                if internet and port in (end.getpeername()[1], end.getsockname()[1]):
                    yield end
        except OSError:
            continue  # no socket, or one without a peer


@pytest.mark.skipif(sys.platform != "linux", reason="there is no TCP_USER_TIMEOUT elsewhere")
async def test_whoever_speaks_into_a_dead_way_is_cut_off_without_a_ping(
    identities: tuple[Identity, Identity],
):
    """What rare pings on the control plane rest on: it is the system that waits for acknowledgements."""
    server, port = await _serve(identities[0], channels.CONTROL)
    channel = channels.control_channel(f"127.0.0.1:{port}", identities[1])
    try:
        await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=30)
        waits_ms = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in _connections(port)]
        assert waits_ms == [channels.KEEPALIVE_TIMEOUT_S * 1000] * 2
    finally:
        await _close([channel], server)


def test_every_option_is_one_that_grpc_knows():
    """It ignores a misspelt one without a word."""
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()
    for transport in (channels.ENROLMENT, channels.CONTROL, channels.DATA):
        for name, _ in (*channels.client_options(transport, "x"), *channels.server_options(transport)):
            assert name.encode() in library, name


def test_what_both_sides_say_fits_together():
    for transport in (channels.ENROLMENT, channels.CONTROL, channels.DATA):
        client, server = (
            dict(channels.client_options(transport, "x.w.starlings")),
            dict(channels.server_options(transport)),
        )
        pings_every = client["grpc.keepalive_time_ms"]
        assert server["grpc.http2.min_ping_interval_without_data_ms"] <= pings_every / 2
        assert server["grpc.keepalive_time_ms"] >= 1.5 * pings_every, "both sides would ping"
        assert server["grpc.keepalive_permit_without_calls"] == 1
        assert client["grpc.max_send_message_length"] == server["grpc.max_receive_message_length"]
        assert client["grpc.max_receive_message_length"] == server["grpc.max_send_message_length"]
        assert server["grpc.so_reuseport"] == 0
    assert dict(channels.server_options(channels.CONTROL))["grpc.max_receive_message_length"] == 1 << 20
    assert dict(channels.server_options(channels.DATA))["grpc.max_receive_message_length"] == 2 << 20
