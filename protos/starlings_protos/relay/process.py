"""The relay's process: serves its port and dials back, as the parent's messages say, until the parent's pipe ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import BinaryIO

from starlings_protos import pipes, process_pb2
from starlings_protos.channels import bind, server_credentials
from starlings_protos.errors import PortBusy
from starlings_protos.identity import Identity
from starlings_protos.pacing import ByteRate
from starlings_protos.relay.core import RelayLimits
from starlings_protos.relay.dial_back import dial_back
from starlings_protos.relay.server import RelayServer, make_relay_server

FIGURES_EVERY_S = 5.0
LEAVING_S = 0.5
# Handshakes at once; a whole lab may join in one moment.
DIALS_AT_ONCE = 32
# Of a capped relay: what may pass at once after a pause.
BURST_S = 0.05


class RelayProcess:
    def __init__(self, start: process_pb2.StartRelay, outgoing: BinaryIO) -> None:
        self._start = start
        self._outgoing = outgoing
        self._identity = Identity.from_pem(start.key_pem, start.certificate_pem, start.ca_pem)
        rate = ByteRate(start.bytes_per_s, max(64 << 10, start.bytes_per_s * BURST_S))
        self._service = RelayServer(RelayLimits(rate=rate))
        self._over = asyncio.Event()
        self._dials = asyncio.Semaphore(DIALS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until told to end. Raises PortBusy or UsageError."""
        server = make_relay_server(self._service)
        credentials = server_credentials(lambda: self._identity)
        host = self._start.listen_host or "0.0.0.0"
        try:
            port = bind(server, host, self._start.listen_port, credentials)
        except PortBusy:
            port = bind(server, host, 0, credentials)
        await server.start()
        self._say(process_pb2.FromRelay(started=process_pb2.RelayStarted(port=port)))
        tasks = [asyncio.create_task(self._service.beat()), asyncio.create_task(self._report())]
        try:
            await self._over.wait()
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()
            await server.stop(LEAVING_S)

    def received(self, message: process_pb2.ToRelay | None) -> None:
        """A message of the parent; None when its pipe ended."""
        match message.WhichOneof("body") if message is not None else None:
            case "certificate" if message is not None:
                pem = message.certificate.certificate_pem
                self._identity = Identity.from_pem(self._identity.key_pem, pem, self._identity.ca_pem)
            case "dial_back" if message is not None:
                task = asyncio.get_running_loop().create_task(self._dial_back(message.dial_back))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "shut_out" if message is not None:
                self._service.shut_out(message.shut_out.worker_id)
            case _:
                self._over.set()

    async def _dial_back(self, order: process_pb2.DialBack) -> None:
        async with self._dials:
            reached, failure = await dial_back(order.worker_id, tuple(order.addresses), self._identity)
        answer = process_pb2.DialledBack(worker_id=order.worker_id, reached=reached, failure=failure)
        self._say(process_pb2.FromRelay(dialled_back=answer))

    async def _report(self) -> None:
        last = None
        while True:
            await asyncio.sleep(FIGURES_EVERY_S)
            core = self._service.core
            now = (core.tunnel_count, core.connections, core.carried_bytes)
            if now != last:
                last = now
                figures = process_pb2.RelayFigures(
                    tunnels=now[0],
                    connections=now[1],
                    carried_bytes=now[2],
                    waiting_bytes=core.waiting_bytes,
                    cpu_s=time.process_time(),
                )
                self._say(process_pb2.FromRelay(figures=figures))

    def _say(self, message: process_pb2.FromRelay) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and so are we in a moment
            pipes.write(self._outgoing, message)
            self._outgoing.flush()


async def serve(incoming: BinaryIO, outgoing: BinaryIO) -> int:
    """The process's life after its pipes are claimed. Raises PipeError, StarlingsError."""
    first = await asyncio.to_thread(pipes.read_blocking, incoming, process_pb2.ToRelay)
    if first is None or first.WhichOneof("body") != "start":
        return 0
    relay, loop = RelayProcess(first.start, outgoing), asyncio.get_running_loop()

    def listen() -> None:
        message: process_pb2.ToRelay | None = None
        while True:
            try:
                message = pipes.read_blocking(incoming, process_pb2.ToRelay)
            except (OSError, pipes.PipeError):
                message = None
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(relay.received, message)
            if message is None:
                return

    threading.Thread(target=listen, name="parent", daemon=True).start()
    await relay.run()
    return 0
