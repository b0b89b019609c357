"""A tunnel as its user holds it: TCP connections of this machine on one side, frames of a gRPC stream on the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

import grpc.aio

from starlings_protos import relay_pb2, relay_pb2_grpc
from starlings_protos.channels import TUNNEL, peer_channel
from starlings_protos.errors import StarlingsError, refused_error
from starlings_protos.identity import Identity
from starlings_protos.relay.core import WINDOW_MOST_BYTES, TunnelFault
from starlings_protos.relay.frames import (
    BEAT_S,
    CHUNK_BYTES,
    SILENT_S,
    Beat,
    BytesCarried,
    ConnectionEnded,
    ConnectionOpened,
    CreditGranted,
    TunnelFrame,
    TunnelOpened,
)
from starlings_protos.relay.server import frame_of, message_of

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Opens a connection to what this side wants to be reached at, for a connection from that worker.
Accept = Callable[[str], Awaitable[Stream]]
# Of what a relay has sent and the process on this machine has not taken yet.
WINDOW_BYTES = WINDOW_MOST_BYTES
# What the system keeps of a local connection beside that: little, so that senders feel the tunnel's pace.
SOCKET_BYTES = 256 << 10


class _Connection:
    def __init__(self, number: int, stream: Stream) -> None:
        self.number = number
        self.reader, self.writer = stream
        # What we may send.
        self.credit_bytes = 0
        self.credited = asyncio.Event()
        # What the relay may send: `WINDOW_BYTES` less what is not granted again yet.
        self.may_come_bytes = WINDOW_BYTES
        self.arrived: deque[bytes | None] = deque()
        self.wake = asyncio.Event()


class Tunnel:
    """One stream to one relay. `run` serves it until it breaks; meanwhile `carry` takes connections."""

    def __init__(self, relay_id: str, address: str, identity: Identity, accept: Accept | None = None) -> None:
        """
        Args:
            relay_id: whose certificate must answer at `address`, "host:port".
            accept: given by who wants to be reached.
        """
        self.relay_id, self.address = relay_id, address
        self._identity = identity
        self._accept = accept
        self._connections: dict[int, _Connection] = {}
        self._next_number = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._call: grpc.aio.StreamStreamCall[relay_pb2.TunnelFrame, relay_pb2.TunnelFrame] | None = None
        self.up = asyncio.Event()
        self.ended = asyncio.Event()
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def run(self) -> str:
        """Until the tunnel breaks; returns why."""
        channel = peer_channel(self.address, self.relay_id, self._identity, TUNNEL)
        try:
            self._call = relay_pb2_grpc.RelayStub(channel).Tunnel()
            await self._send(TunnelOpened(listens=self._accept is not None))
            return await self._read()
        except TimeoutError:
            return f"the relay {self.relay_id} at {self.address} was silent for {SILENT_S:.0f} s"
        except grpc.aio.AioRpcError as error:
            refused = refused_error(error)
            why = str(refused) if refused is not None else f"{error.code().name}: {error.details()}"
            return f"the relay {self.relay_id} at {self.address}: {why}"
        except (TunnelFault, StarlingsError, asyncio.InvalidStateError) as error:
            return f"the relay {self.relay_id} at {self.address}: {error}"
        finally:
            self.up.clear()
            self.ended.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._call is not None:
                self._call.cancel()
            await channel.close()

    async def _read(self) -> str:
        assert self._call is not None
        self._spawn(self._beat())
        while True:
            async with asyncio.timeout(SILENT_S):
                message: object = await self._call.read()
            if not isinstance(message, relay_pb2.TunnelFrame):
                return f"the relay {self.relay_id} at {self.address} ended the tunnel"
            self._received(frame_of(message))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._send(Beat())

    async def _send(self, frame: TunnelFrame) -> None:
        assert self._call is not None
        # The lock is fair: every connection has its turn, and credit waits for one chunk at most.
        async with self._writing:
            await self._call.write(message_of(frame))

    # ---------------------------------------------------------------- connections

    async def carry(self, worker_id: str, stream: Stream) -> None:
        """Connects a local stream to a worker that listens at the relay. What becomes of it, the stream's other end
        sees.
        """
        if not self.up.is_set():
            stream[1].transport.abort()
            return
        number, self._next_number = self._next_number, self._next_number + 1
        self._serve(_Connection(number, stream))
        await self._send(ConnectionOpened(number, worker_id, WINDOW_BYTES))

    def _received(self, frame: TunnelFrame) -> None:
        match frame:
            case TunnelOpened():
                self.up.set()
            case ConnectionOpened():
                if self._accept is None:
                    raise TunnelFault("a connection came that nobody listens for")
                self._spawn(self._incoming(frame, self._accept))
            case CreditGranted():
                if (connection := self._connections.get(frame.connection)) is not None:
                    connection.credit_bytes += frame.byte_count
                    connection.credited.set()
            case BytesCarried():
                if (connection := self._connections.get(frame.connection)) is not None:
                    connection.may_come_bytes -= len(frame.chunk)
                    if connection.may_come_bytes < 0 or len(frame.chunk) > CHUNK_BYTES:
                        raise TunnelFault("more bytes came than there was room for")
                    connection.arrived.append(frame.chunk)
                    connection.wake.set()
            case ConnectionEnded():
                if (connection := self._connections.get(frame.connection)) is not None:
                    connection.arrived.append(None)
                    connection.wake.set()
            case Beat():
                pass

    async def _incoming(self, frame: ConnectionOpened, accept: Accept) -> None:
        try:
            stream = await accept(frame.worker_id)
        except OSError as error:
            await self._send(ConnectionEnded(frame.connection, f"nothing listens there: {error}"[:200]))
            return
        connection = _Connection(frame.connection, stream)
        connection.credit_bytes = frame.credit_bytes
        self._serve(connection)
        await self._send(CreditGranted(frame.connection, WINDOW_BYTES))

    def _serve(self, connection: _Connection) -> None:
        self._connections[connection.number] = connection
        self._spawn(self._both_ways(connection))

    async def _both_ways(self, connection: _Connection) -> None:
        out = asyncio.create_task(self._outward(connection))
        inward = asyncio.create_task(self._inward(connection))
        ended = False
        try:
            await asyncio.wait((out, inward), return_when=asyncio.FIRST_COMPLETED)
            if not (ended := inward.done()):
                with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await self._send(ConnectionEnded(connection.number))
        finally:
            self._connections.pop(connection.number, None)
            for task in (out, inward):
                task.cancel()
            await asyncio.gather(out, inward, return_exceptions=True)
            # After the other end's own end, what it sent is still written; otherwise it is broken off as if reset.
            if ended:
                connection.writer.close()
            else:
                connection.writer.transport.abort()

    async def _outward(self, connection: _Connection) -> None:
        """From the local connection into the tunnel, until it ends."""
        while True:
            while connection.credit_bytes <= 0:
                connection.credited.clear()
                await connection.credited.wait()
            try:
                chunk = await connection.reader.read(min(CHUNK_BYTES, connection.credit_bytes))
            except OSError:
                return
            if not chunk:
                return
            connection.credit_bytes -= len(chunk)
            self.sent_bytes += len(chunk)
            await self._send(BytesCarried(connection.number, chunk))

    async def _inward(self, connection: _Connection) -> None:
        """From the tunnel into the local connection, until the other end closes."""
        taken_bytes = 0
        while True:
            while not connection.arrived:
                connection.wake.clear()
                await connection.wake.wait()
            chunk = connection.arrived.popleft()
            if chunk is None:
                return
            self.received_bytes += len(chunk)
            connection.writer.write(chunk)
            try:
                await connection.writer.drain()
            except OSError:
                return
            taken_bytes += len(chunk)
            if taken_bytes >= WINDOW_BYTES // 4:
                connection.may_come_bytes += taken_bytes
                await self._send(CreditGranted(connection.number, taken_bytes))
                taken_bytes = 0

    def _spawn(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await work

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
