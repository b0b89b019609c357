"""The keeper's process: reads orders from its standard input, serves its data port, ends when the input ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from starlings_coordinator.clock import suspend_aware_monotonic_s
from starlings_coordinator.keeper.library import StateLibrary
from starlings_coordinator.keeper.pull import Puller
from starlings_coordinator.keeper.saving import BlockSource, SaveFailed, SaveOrder, save
from starlings_coordinator.keeper.service import Admission, KeeperService
from starlings_job.checkpoint_owner import Owner
from starlings_job.prepared import load_profile, weights_url
from starlings_job.spec import JobSpec
from starlings_protos import data_pb2_grpc, pipes, process_pb2
from starlings_protos.assignments import CoordinatorClock
from starlings_protos.channels import DATA, bind, make_server, server_credentials
from starlings_protos.convert import from_proto
from starlings_protos.errors import PortBusy
from starlings_protos.identity import Identity, read_certificate, spki_pin
from starlings_protos.messages import Peer, SignedAssignment
from starlings_protos.peers import DATA_POLICY, RoleGuard
from starlings_protos.reach_messages import Route, Routes

logger = logging.getLogger(__name__)

# Open transfers may end within this time when the keeper leaves.
LEAVING_S = 1.0


class Keeper:
    def __init__(self, start: process_pb2.StartKeeper, outgoing: BinaryIO) -> None:
        """Raises NotPrepared, UsageError or PeerFault when the start message makes no sense."""
        self._start = start
        self._outgoing = outgoing
        self._identity = Identity.from_pem(start.key_pem, start.certificate_pem, start.ca_pem)
        self._assignment = from_proto(start.assignment, SignedAssignment)
        directory = self._directory = Path(start.job_directory)
        self._owner = Owner(start.job, spki_pin(read_certificate(start.ca_pem)))
        self._profile = load_profile(directory)
        self._library = StateLibrary(Path(weights_url(directory)), start.checkpoint_url)
        self._saving: asyncio.Task[None] | None = None
        self._routes: dict[str, Route] = {}
        self._next: process_pb2.SaveCheckpoint | None = None
        self._server = make_server(DATA, [RoleGuard(DATA_POLICY)])
        admission = Admission(start.job, start.assignment_key_der)
        # On the same machine, so that both monotonic clocks are one; learnt a moment late, as by a worker.
        clock = CoordinatorClock.learnt(start.wall_time_s, suspend_aware_monotonic_s())
        service = KeeperService(
            self._library, admission, now_wall_s=lambda: clock.wall_s(suspend_aware_monotonic_s())
        )
        data_pb2_grpc.add_DataServicer_to_server(service, self._server)

    async def open(self) -> None:
        """Opens the port and says where.

        Raises:
            StarlingsError: the address cannot be used.
            JobError: the checkpoints are another job's.
        """
        await asyncio.to_thread(self._owner.refuse_others, self._start.checkpoint_url, self._directory)
        credentials = server_credentials(lambda: self._identity)
        host = self._start.listen_host
        try:
            port = bind(self._server, host, self._start.listen_port, credentials)
        except PortBusy:
            # Peers learn the port from the plan, so any other does; a fixed one only helps firewalls.
            logger.warning("port %d is busy; taking another one", self._start.listen_port)
            port = bind(self._server, host, 0, credentials)
        await self._server.start()
        versions = await asyncio.to_thread(self._library.versions)
        addresses = [f"{host}:{port}" for host in self._start.advertise_hosts]
        self._say(
            process_pb2.FromKeeper(started=process_pb2.KeeperStarted(addresses=addresses, versions=versions))
        )

    def handle(self, message: process_pb2.ToKeeper) -> bool:
        """Carries an order out; False when the keeper shall leave."""
        match message.WhichOneof("body"):
            case "save":
                self._begin_save(message.save)
            case "assignment":
                self._assignment = from_proto(message.assignment, SignedAssignment)
            case "certificate":
                pem = message.certificate.certificate_pem
                self._identity = Identity.from_pem(self._start.key_pem, pem, self._start.ca_pem)
            case "routes":
                for route in from_proto(message.routes, Routes).routes:
                    self._routes[route.worker_id] = route
            case "shutdown":
                return False
            case other:
                logger.error("unexpected message %s", other)
        return True

    async def close(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._saving
        await self._server.stop(LEAVING_S)

    def _begin_save(self, message: process_pb2.SaveCheckpoint) -> None:
        """One at a time. A save that runs is finished first: were it ended by every newer order, a slow storage would
        never get a whole version. Of the orders that come meanwhile the newest follows.
        """
        if self._next is not None:
            self._say_failed(self._next.version, f"version {message.version} is to be saved instead", 1)
        self._next = message
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_in_turn())

    async def _save_in_turn(self) -> None:
        while (message := self._next) is not None:
            self._next = None
            await self._save(message)

    async def _save(self, message: process_pb2.SaveCheckpoint) -> None:
        logger.info("saving version %d", message.version)
        try:
            async with Puller(
                lambda: self._identity, lambda: self._assignment, routes=self._routes.values
            ) as puller:
                written = await save(
                    _order(message, self._owner),
                    puller=puller,
                    library=self._library,
                    profile=self._profile,
                    directory=self._directory,
                    url=self._start.checkpoint_url,
                    keep=self._start.keep,
                )
        except asyncio.CancelledError:
            self._say_failed(message.version, "the keeper left", 1)
            raise
        except SaveFailed as error:
            logger.warning("version %d was not saved: %s", message.version, error)
            self._say_failed(message.version, str(error), error.exit_code)
        except Exception as error:
            logger.exception("version %d was not saved", message.version)
            self._say_failed(message.version, f"a bug in the keeper: {error!r}", 1)
        else:
            logger.info("saved version %d: %d bytes at %s", message.version, written.byte_count, written.path)
            saved = process_pb2.CheckpointSaved(
                version=message.version, path=written.path, byte_count=written.byte_count
            )
            self._say(process_pb2.FromKeeper(saved=saved))

    def _say_failed(self, version: int, reason: str, exit_code: int) -> None:
        failed = process_pb2.CheckpointFailed(version=version, reason=reason, exit_code=exit_code)
        self._say(process_pb2.FromKeeper(failed=failed))

    def _say(self, message: process_pb2.FromKeeper) -> None:
        with contextlib.suppress(BrokenPipeError):  # the end of our input follows
            pipes.write(self._outgoing, message)
            self._outgoing.flush()


def _order(message: process_pb2.SaveCheckpoint, owner: Owner) -> SaveOrder:
    def donors(peers: Sequence[object]) -> tuple[Peer, ...]:
        return tuple(from_proto(peer, Peer) for peer in peers)  # type: ignore[arg-type]

    return SaveOrder(
        message.version,
        message.tokens,
        tuple(BlockSource(d.block, donors(d.peers), d.digest) for d in message.donors),
        owner,
        JobSpec.from_json(message.job_json).digest(),
    )


async def serve(incoming: BinaryIO, outgoing: BinaryIO) -> int:
    """Runs until the input ends. Returns the exit code."""
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[process_pb2.ToKeeper | None] = asyncio.Queue()

    def read() -> None:
        """A thread, because pipes of a parent are not readable by every event loop (Windows)."""
        try:
            while (message := pipes.read_blocking(incoming, process_pb2.ToKeeper)) is not None:
                loop.call_soon_threadsafe(orders.put_nowait, message)
        except (pipes.PipeError, OSError) as error:
            logger.error("the coordinator's pipe: %s", error)
        with contextlib.suppress(RuntimeError):  # the loop has ended before us
            loop.call_soon_threadsafe(orders.put_nowait, None)

    threading.Thread(target=read, name="orders", daemon=True).start()
    first = await orders.get()
    if first is None:
        return 0
    if first.WhichOneof("body") != "start":
        logger.error("the first message was no start")
        return 1
    keeper = Keeper(first.start, outgoing)
    try:
        await keeper.open()
        while (message := await orders.get()) is not None and keeper.handle(message):
            pass
    finally:
        await keeper.close()
    return 0
