"""The keeper's child process, as the loop sees it: orders go in, events come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlings_coordinator.children import Child, ChildSpec
from starlings_coordinator.clock import Clock
from starlings_coordinator.core.effects import SaveCheckpoint
from starlings_coordinator.core.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    KeeperLost,
    KeeperStarted,
)
from starlings_coordinator.signing import RENEW_AFTER_S, AssignmentSigner
from starlings_protos import control_pb2, process_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.convert import to_proto
from starlings_protos.identity import KEEPER, Identity, key_from_pem
from starlings_protos.invite import parse_address
from starlings_protos.reach_messages import Routes


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What the keeper is told at its start; see StartKeeper in process.proto."""

    job: str
    job_json: bytes
    job_directory: Path
    listen_host: str
    # 0 = any.
    listen_port: int
    advertise_hosts: tuple[str, ...]
    checkpoint_url: str
    keep: int
    tensor_limit_bytes: int


class KeeperLink:
    def __init__(
        self,
        settings: KeeperSettings,
        *,
        authority: CertificateAuthority,
        signer: AssignmentSigner,
        clock: Clock,
        log_path: Path,
        post: Callable[[Event], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._wall = wall
        self._settings = settings
        self._authority = authority
        self._signer = signer
        self._clock = clock
        self._post = post
        self._identity: Identity | None = None
        self._signed_at_wall_s = 0.0
        self._saving: int | None = None
        # All that is known of how workers are reached: for a keeper that starts.
        self.routes: Callable[[], Routes] = Routes
        # A restarted keeper takes the port that workers were told, if it can.
        self._port = settings.listen_port
        self.child: Child[process_pb2.ToKeeper, process_pb2.FromKeeper] = Child(
            ChildSpec("keeper", "starlings_coordinator.keeper", process_pb2.FromKeeper, log_path),
            on_start=self._started,
            on_message=self._said,
            on_end=self._ended,
        )

    def save(self, effect: SaveCheckpoint) -> None:
        message = process_pb2.SaveCheckpoint(
            version=effect.version, tokens=effect.tokens, job_json=self._settings.job_json
        )
        for block, peers, digest in effect.donors:
            donor = message.donors.add(block=block, digest=digest)
            for peer in peers:
                to_proto(peer, donor.peers.add())
        if self.child.send(process_pb2.ToKeeper(save=message)):
            self._saving = effect.version
        else:
            self._post(CheckpointFailed(effect.version, "the keeper is not running"))

    def reroute(self, routes: Routes) -> None:
        """How some workers are reached now."""
        message = process_pb2.ToKeeper()
        to_proto(routes, message.routes)
        self.child.send(message)

    def renew(self) -> None:
        """Called now and then: keeps the keeper's claim and certificate ahead of their expiry."""
        now_wall_s = self._clock.now().wall_s
        if self._identity is None:
            return
        if not 0 <= now_wall_s - self._signed_at_wall_s < RENEW_AFTER_S:
            self._signed_at_wall_s = now_wall_s
            message = process_pb2.ToKeeper()
            to_proto(self._signer.sign_keeper(now_wall_s), message.assignment)
            self.child.send(message)
        if self._identity.is_due(self._wall()):
            identity = self._identity
            key = key_from_pem(identity.key_pem).public_key()
            pem = self._authority.issue(key, KEEPER, self._wall())
            self._identity = Identity.from_pem(identity.key_pem, pem, identity.ca_pem)
            renewed = process_pb2.RenewedCertificate(certificate_pem=pem)
            self.child.send(process_pb2.ToKeeper(certificate=renewed))

    def _started(self) -> None:
        now_wall_s, settings = self._clock.now().wall_s, self._settings
        self._identity = self._authority.issue_identity(KEEPER, self._wall())
        self._signed_at_wall_s = now_wall_s
        signed = self._signer.sign_keeper(now_wall_s)
        start = process_pb2.StartKeeper(
            key_pem=self._identity.key_pem,
            certificate_pem=self._identity.certificate_pem,
            ca_pem=self._identity.ca_pem,
            assignment_key_der=self._signer.key_der,
            assignment=control_pb2.SignedAssignment(payload=signed.payload, signature=signed.signature),
            job_directory=str(settings.job_directory),
            listen_host=settings.listen_host,
            listen_port=self._port,
            advertise_hosts=settings.advertise_hosts,
            checkpoint_url=settings.checkpoint_url,
            keep=settings.keep,
            job=settings.job,
            tensor_limit_bytes=settings.tensor_limit_bytes,
            wall_time_s=now_wall_s,
        )
        self.child.send(process_pb2.ToKeeper(start=start))
        if (known := self.routes()).routes:
            self.reroute(known)

    def _said(self, message: process_pb2.FromKeeper) -> None:
        match message.WhichOneof("body"):
            case "started":
                if message.started.addresses:
                    self._port = parse_address(message.started.addresses[0]).port
                self._post(KeeperStarted(tuple(message.started.addresses), tuple(message.started.versions)))
            case "saved":
                self._finished(message.saved.version)
                saved = message.saved
                self._post(CheckpointSaved(saved.version, saved.path, saved.byte_count))
            case "failed":
                failed = message.failed
                self._finished(failed.version)
                self._post(CheckpointFailed(failed.version, failed.reason, failed.exit_code or 1))

    def _finished(self, version: int) -> None:
        if self._saving == version:
            self._saving = None

    def _ended(self, reason: str) -> None:
        self._identity = None
        self._post(KeeperLost(reason))
        if self._saving is not None:
            version, self._saving = self._saving, None
            self._post(CheckpointFailed(version, reason))
