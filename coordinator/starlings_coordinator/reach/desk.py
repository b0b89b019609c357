"""The reach book's shell: workers' sessions, the relay's child process, and the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from starlings_coordinator.children import Child, ChildSpec
from starlings_coordinator.reach.book import Dial, Publish, ReachBook, ReachEffect, Tell
from starlings_coordinator.sessions import WorkerSession
from starlings_protos import control_pb2, process_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.convert import body_to_proto, to_proto
from starlings_protos.identity import RELAY, Identity, key_from_pem
from starlings_protos.messages import WorkerId
from starlings_protos.reach_messages import ReachReport, Routes

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """What the relay is told at its start; see StartRelay in process.proto."""

    listen_host: str
    # 0 = any.
    listen_port: int
    advertise_hosts: tuple[str, ...]


class ReachDesk:
    """All methods are called on the event loop."""

    def __init__(
        self,
        settings: RelaySettings,
        *,
        authority: CertificateAuthority,
        revoked: Callable[[], Iterable[str]],
        log_path: Path,
        tell_keeper: Callable[[Routes], None],
        announce: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            revoked: who is shut out of the job by now.
            tell_keeper: told of routes like every worker.
            announce: told when the relay ends, for people.
        """
        self.book = ReachBook()
        self._settings = settings
        self._authority = authority
        self._revoked = revoked
        self._tell_keeper = tell_keeper
        self._announce = announce
        self._monotonic, self._wall = monotonic, wall
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._identity: Identity | None = None
        self._port = settings.listen_port
        self._shut_out: set[str] = set()
        # As of the relay's last word.
        self.figures = process_pb2.RelayFigures()
        self.child: Child[process_pb2.ToRelay, process_pb2.FromRelay] = Child(
            ChildSpec("relay", "starlings_protos.relay", process_pb2.FromRelay, log_path, disposable=True),
            on_start=self._started,
            on_message=self._said,
            on_end=announce,
        )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._carry_out(self.book.tick(self._monotonic()))
            self._renew()
            for worker_id in set(self._revoked()) - self._shut_out:
                order = process_pb2.ShutOut(worker_id=worker_id)
                if self.child.send(process_pb2.ToRelay(shut_out=order)):
                    self._shut_out.add(worker_id)

    # ---------------------------------------------------------------- workers

    def reported(self, session: WorkerSession, seen_host: str, report: ReachReport) -> None:
        worker_id = WorkerId(session.worker_id)
        if self._sessions.get(worker_id) is not session:
            self._sessions[worker_id] = session
            if (routes := self.book.routes()).routes:
                session.send(_envelope(routes))
        self._carry_out(self.book.reported(worker_id, seen_host, report, self._monotonic()))

    def doubted(self, worker_id: WorkerId) -> None:
        """A peer could not reach it."""
        self._carry_out(self.book.doubted(worker_id, self._monotonic()))

    def closed(self, session: WorkerSession) -> None:
        worker_id = WorkerId(session.worker_id)
        if self._sessions.get(worker_id) is session:
            del self._sessions[worker_id]
            self._carry_out(self.book.gone(worker_id))

    def _carry_out(self, effects: list[ReachEffect]) -> None:
        for effect in effects:
            match effect:
                case Dial():
                    order = process_pb2.DialBack(worker_id=effect.worker_id, addresses=effect.addresses)
                    self.child.send(process_pb2.ToRelay(dial_back=order))
                case Tell():
                    if (session := self._sessions.get(effect.worker_id)) is not None:
                        session.send(_envelope(effect.order))
                case Publish():
                    message = _envelope(effect.routes)
                    for session in self._sessions.values():
                        session.send(message)
                    self._tell_keeper(effect.routes)

    # ---------------------------------------------------------------- the relay's process

    def _started(self) -> None:
        self._identity = self._authority.issue_identity(RELAY, self._wall())
        self._shut_out.clear()
        start = process_pb2.StartRelay(
            key_pem=self._identity.key_pem,
            certificate_pem=self._identity.certificate_pem,
            ca_pem=self._identity.ca_pem,
            listen_host=self._settings.listen_host,
            listen_port=self._port,
        )
        self.child.send(process_pb2.ToRelay(start=start))

    def _said(self, message: process_pb2.FromRelay) -> None:
        match message.WhichOneof("body"):
            case "started":
                self._port = message.started.port
                hosts = self._settings.advertise_hosts
                addresses = tuple(f"{host}:{self._port}" for host in hosts)
                self._carry_out(self.book.relay_started(addresses, self._monotonic()))
            case "dialled_back":
                said = message.dialled_back
                self._carry_out(
                    self.book.answered(
                        WorkerId(said.worker_id), tuple(said.reached), said.failure, self._monotonic()
                    )
                )
            case "figures":
                self.figures = message.figures
            case "failed":
                self._announce(message.failed.message)

    def _renew(self) -> None:
        if self._identity is not None and self._identity.is_due(self._wall()):
            key = key_from_pem(self._identity.key_pem)
            pem = self._authority.issue(key.public_key(), RELAY, self._wall())
            self._identity = Identity.from_pem(self._identity.key_pem, pem, self._identity.ca_pem)
            renewed = process_pb2.RenewedCertificate(certificate_pem=pem)
            self.child.send(process_pb2.ToRelay(certificate=renewed))


def _envelope(record: object) -> control_pb2.ToWorker:
    filled = control_pb2.ToWorker()
    body_to_proto(record, filled)
    return filled


def routes_message(routes: Routes) -> control_pb2.Routes:
    """For the keeper."""
    message = control_pb2.Routes()
    to_proto(routes, message)
    return message
