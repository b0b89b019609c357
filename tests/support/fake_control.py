"""A coordinator's control port that does what a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

from starlings_protos import channels, control_pb2, control_pb2_grpc, convert
from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import abort
from starlings_protos.identity import COORDINATOR, Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_protos.invite import Address
from starlings_protos.messages import Heartbeat, Hello, Refusal, ToCoordinator, ToWorker, Welcome
from starlings_protos.reach_messages import ReachReport
from starlings_worker.membership import Membership

T = TypeVar("T")


class FakeControl(control_pb2_grpc.ControlServicer):
    """`async with FakeControl() as control:` then `control.join(directory)` makes a member of it."""

    def __init__(self) -> None:
        self.authority = CertificateAuthority.create("fake", time.time())
        self.inbox: asyncio.Queue[ToCoordinator] = asyncio.Queue()
        self.hellos: list[Hello] = []
        self.heartbeats: list[Heartbeat] = []
        self.reach_reports: list[ReachReport] = []
        # Answered to the next Hellos instead of a Welcome.
        self.refusals: list[Refusal] = []
        self.incarnation = 1
        self.heartbeat_interval_s = 0.05
        self.telemetry_interval_s = 0.0
        self.job_json = b"{}"
        self._context: Any = None
        self._hang_up = asyncio.Event()

    async def __aenter__(self) -> FakeControl:
        identity = self.authority.issue_identity(COORDINATOR, time.time())
        self._server = channels.make_server(channels.CONTROL)
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        self.port = channels.bind(self._server, "127.0.0.1", 0, channels.server_credentials(identity))
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def join(self, directory: Path) -> Membership:
        key = new_key()
        peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
        pem = self.authority.issue(key.public_key(), peer, time.time())
        identity = Identity(peer, key_to_pem(key), pem, self.authority.certificate_pem)
        address = Address("127.0.0.1", self.port)
        membership = Membership("fake", identity, (address,), (address,))
        membership.save(directory)
        return membership

    async def Session(self, request_iterator: AsyncIterator[control_pb2.ToCoordinator], context: Any) -> None:
        hello = convert.body_from_proto(await context.read(), ToCoordinator)
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        if self.refusals:
            await abort(context, self.refusals.pop(0), "a test says no")
        self._context, self._hang_up = context, asyncio.Event()
        await self.welcome()
        reading = asyncio.create_task(self._read(context))
        await asyncio.wait(
            {reading, asyncio.create_task(self._hang_up.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        reading.cancel()

    async def _read(self, context: Any) -> None:
        while isinstance(message := await context.read(), control_pb2.ToCoordinator):
            record = convert.body_from_proto(message, ToCoordinator)
            if isinstance(record, Heartbeat):
                self.heartbeats.append(record)
            elif isinstance(record, ReachReport):
                self.reach_reports.append(record)
            else:
                self.inbox.put_nowait(record)

    async def welcome(self) -> None:
        await self.say(
            Welcome(
                1,
                self.incarnation,
                self.job_json,
                "d1",
                self.heartbeat_interval_s,
                b"",
                time.time(),
                b"{}",
                True,
                self.telemetry_interval_s,
            )
        )

    async def say(self, record: ToWorker) -> None:
        envelope = control_pb2.ToWorker()
        convert.body_to_proto(record, envelope)
        await self._context.write(envelope)

    def hang_up(self) -> None:
        self._hang_up.set()

    async def next(self, kind: type[T], within_s: float = 30.0) -> T:
        """The next message, which must be of that kind."""
        message = await asyncio.wait_for(self.inbox.get(), within_s)
        assert isinstance(message, kind), message
        return message
