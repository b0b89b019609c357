"""The relay's port: tunnels as gRPC streams around `core.RelayCore`. One task reads a tunnel and one writes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from starlings_protos import channels, convert, relay_pb2, relay_pb2_grpc
from starlings_protos.errors import RefusedError, abort_with
from starlings_protos.identity import PeerIdentity
from starlings_protos.messages import Refusal
from starlings_protos.peers import RELAY_POLICY, RoleGuard, peer_identity
from starlings_protos.relay.core import RelayCore, RelayFull, RelayLimits, TunnelFault
from starlings_protos.relay.frames import BEAT_S, SILENT_S, TunnelFrame, TunnelOpened

Context = grpc.aio.ServicerContext[Any, Any]


def frame_of(message: relay_pb2.TunnelFrame) -> TunnelFrame:
    """Raises:
    TunnelFault: it is none.
    """
    try:
        frame: TunnelFrame = convert.body_from_proto(message, TunnelFrame)
    except ValueError as error:
        raise TunnelFault(f"a malformed frame: {error}") from None
    return frame


def message_of(frame: TunnelFrame) -> relay_pb2.TunnelFrame:
    message = relay_pb2.TunnelFrame()
    convert.body_to_proto(frame, message)
    return message


class RelayServer(relay_pb2_grpc.RelayServicer):
    """Use `make_relay_server` to give it a port."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.core = RelayCore(limits or RelayLimits(), time.monotonic())
        self._awake: dict[int, asyncio.Event] = {}
        self._ended: dict[int, asyncio.Event] = {}
        self._shut_out: set[str] = set()

    def refuse(self, peer: PeerIdentity) -> RefusedError | None:
        """For the guard: who may not call although the certificate is good."""
        if peer.id in self._shut_out:
            return RefusedError(Refusal.REVOKED, f"{peer.id} was shut out of this job.")
        return None

    def shut_out(self, worker_id: str) -> None:
        self._shut_out.add(worker_id)
        for number in self.core.detach_worker(worker_id):
            self._end(number)
        self._wake()

    async def beat(self) -> None:
        """Runs beside the server: beats, and an end to tunnels that are silent."""
        while True:
            await asyncio.sleep(BEAT_S)
            for number in self.core.tick(time.monotonic()):
                self._end(number)
            self._wake()

    async def Tunnel(  # type: ignore[override]
        self, request_iterator: AsyncIterator[relay_pb2.TunnelFrame], context: Context
    ) -> None:
        try:
            number = await self._attach(context)
        except RefusedError as refused:
            await abort_with(context, refused)
        self._awake[number], self._ended[number] = asyncio.Event(), asyncio.Event()
        self._awake[number].set()
        tasks = [
            asyncio.create_task(self._read(number, context)),
            asyncio.create_task(self._write(number, context)),
            asyncio.create_task(self._over(number)),
        ]
        fault = ""
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if isinstance(error := task.exception(), TunnelFault):
                    fault = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.core.detach(number)
            del self._awake[number], self._ended[number]
            self._wake()
        if fault:
            await abort_with(context, RefusedError(Refusal.MALFORMED, f"The tunnel is closed: {fault}."))

    async def _attach(self, context: Context) -> int:
        peer = peer_identity(context)
        try:
            async with asyncio.timeout(SILENT_S):
                first = await context.read()
        except TimeoutError:
            raise RefusedError(Refusal.MALFORMED, "Nothing was said in the tunnel.") from None
        try:
            if not isinstance(first, relay_pb2.TunnelFrame) or not isinstance(
                opened := frame_of(first), TunnelOpened
            ):
                raise TunnelFault("the first frame must open it")
            return self.core.attach(peer.id, opened, time.monotonic())
        except TunnelFault as error:
            raise RefusedError(Refusal.MALFORMED, f"The tunnel is closed: {error}.") from None
        except RelayFull as error:
            raise RefusedError(Refusal.BUSY, f"The relay has no room: {error}.") from None

    async def _read(self, number: int, context: Context) -> None:
        while isinstance(message := await context.read(), relay_pb2.TunnelFrame):
            self.core.received(number, frame_of(message), time.monotonic())
            self._wake()

    async def _write(self, number: int, context: Context) -> None:
        awake = self._awake[number]
        while True:
            awake.clear()
            while (frame := self.core.next_frame(number, time.monotonic())) is not None:
                self._wake()
                await context.write(message_of(frame))
            pause_s = self.core.pause_s(time.monotonic())
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            else:
                await awake.wait()

    async def _over(self, number: int) -> None:
        await self._ended[number].wait()

    def _end(self, number: int) -> None:
        if number in self._ended:
            self._ended[number].set()

    def _wake(self) -> None:
        for number in self.core.take_awake():
            if number in self._awake:
                self._awake[number].set()


def make_relay_server(service: RelayServer) -> grpc.aio.Server:
    """A server without a port; see `channels.bind`."""
    server = channels.make_server(channels.TUNNEL, [RoleGuard(RELAY_POLICY, service.refuse)])
    relay_pb2_grpc.add_RelayServicer_to_server(service, server)
    return server
