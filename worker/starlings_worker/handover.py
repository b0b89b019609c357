"""The process that outlives a leaving engine: `python -m starlings_worker.handover PARENT_PID`, without torch.

Serves what the engine wrote to the disk (left_behind.py) on the engine's port, as the engine would have, until its
supervisor ends it. Speaks `ToHandover` and `FromHandover` over standard input and output.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import grpc.aio

from starlings_protos import channels, data_pb2, data_pb2_grpc, pipes, process_pb2
from starlings_protos.assignments import CoordinatorClock
from starlings_protos.errors import RefusedError, StarlingsError, abort
from starlings_protos.identity import Identity
from starlings_protos.messages import Refusal
from starlings_protos.peers import DATA_POLICY, RoleGuard
from starlings_worker.callers import Callers
from starlings_worker.left_behind import DiskShelf
from starlings_worker.platform import die_with_parent
from starlings_worker.serving import StateServer

Context = grpc.aio.ServicerContext[Any, Any]
# The engine has just left the port; the system may need a moment to notice.
_PORT_WITHIN_S = 5.0
_PORT_AGAIN_S = 0.05


class _Service(data_pb2_grpc.DataServicer):
    def __init__(self, start: process_pb2.StartHandover, outgoing: BinaryIO) -> None:
        self._start = start
        self._outgoing = outgoing
        self._shelf = DiskShelf(Path(start.directory), start.version)
        self._state = StateServer(lambda _: None)
        self._callers = Callers()
        self._clock = CoordinatorClock.learnt(start.wall_time_s, time.monotonic())

    async def FetchState(  # type: ignore[override]
        self, request: data_pb2.StateRequest, context: Context
    ) -> None:
        try:
            self._check(context)
            await self._state.serve(request, self._shelf, context)
        except RefusedError as error:
            await abort(context, error.refusal, str(error))
        for block in request.blocks:
            self.say(process_pb2.FromHandover(fetched=process_pb2.Fetched(block=block)))

    async def Forward(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await self._gone(context)

    async def Backward(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await self._gone(context)

    async def Contribute(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await self._gone(context)

    async def Aggregate(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await self._gone(context)

    async def Pair(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await self._gone(context)

    async def Group(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await self._gone(context)

    async def TellPair(self, request: object, context: Context) -> data_pb2.Receipt:
        return await self._gone(context)

    async def _gone(self, context: Context) -> data_pb2.Receipt:
        try:
            self._check(context)
        except RefusedError as error:
            await abort(context, error.refusal, str(error))
        await abort(context, Refusal.NOT_HELD, "this worker leaves: it only hands its state over")

    def _check(self, context: Context) -> None:
        self._callers.check(
            context,
            assignment_key_der=self._start.assignment_key_der,
            job=self._start.job,
            now_wall_s=self._clock.wall_s(time.monotonic()),
        )

    def say(self, message: process_pb2.FromHandover) -> None:
        pipes.write(self._outgoing, message)
        self._outgoing.flush()


async def _run(start: process_pb2.StartHandover, incoming: BinaryIO, outgoing: BinaryIO) -> int:
    identity = Identity.from_pem(start.key_pem, start.certificate_pem, start.ca_pem)
    service = _Service(start, outgoing)
    server = channels.make_server(channels.DATA, [RoleGuard(DATA_POLICY)])
    data_pb2_grpc.add_DataServicer_to_server(service, server)
    over = asyncio.Event()
    _read_orders(incoming, over)
    try:
        port = await _bind(server, start, identity)
    except StarlingsError as error:
        service.say(
            process_pb2.FromHandover(
                failed=process_pb2.EngineFailed(exit_code=int(error.exit_code), message=str(error))
            )
        )
        return int(error.exit_code)
    await server.start()
    service.say(process_pb2.FromHandover(serving=process_pb2.Serving(port=port)))
    await over.wait()
    await server.stop(grace=0.2)
    return 0


async def _bind(server: grpc.aio.Server, start: process_pb2.StartHandover, identity: Identity) -> int:
    credentials = channels.server_credentials(lambda: identity)
    deadline_s = time.monotonic() + _PORT_WITHIN_S
    while True:
        try:
            return channels.bind(server, start.listen_host or "0.0.0.0", start.listen_port, credentials)
        except StarlingsError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(_PORT_AGAIN_S)


def _read_orders(incoming: BinaryIO, over: asyncio.Event) -> None:
    """Until Shutdown, or until the supervisor is gone."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            while (message := pipes.read_blocking(incoming, process_pb2.ToHandover)) is not None:
                if message.WhichOneof("body") == "shutdown":
                    break
        except (pipes.PipeError, OSError):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(over.set)

    threading.Thread(target=read, name="pipe-reader", daemon=True).start()


def main() -> int:
    # Ctrl-C is for the supervisor.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(sys.argv) > 1:
        die_with_parent(int(sys.argv[1]))
    incoming, outgoing = pipes.claim_stdio()
    first = pipes.read_blocking(incoming, process_pb2.ToHandover)
    if first is None or first.WhichOneof("body") != "start":
        return 1
    return asyncio.run(_run(first.start, incoming, outgoing))


if __name__ == "__main__":
    sys.exit(main())
