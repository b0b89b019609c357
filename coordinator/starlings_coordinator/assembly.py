"""The coordinator's parts, made from a prepared directory and wired together. `run.py` starts and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio

from starlings_coordinator.addresses import advertised_hosts, local_host
from starlings_coordinator.bus.bulletin import Bulletin
from starlings_coordinator.clock import SystemClock
from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.core import Core
from starlings_coordinator.core.effects import JobEnded
from starlings_coordinator.core.events import Event, KeeperLost, KeeperStarted
from starlings_coordinator.core.records import RecordError, record_from_json
from starlings_coordinator.core.views import Headline
from starlings_coordinator.detokenise import detokeniser
from starlings_coordinator.dispatch import Dispatcher
from starlings_coordinator.enrolment import EnrolmentAuthority, EnrolmentService
from starlings_coordinator.journal import Journal
from starlings_coordinator.keeper_link import KeeperLink, KeeperSettings
from starlings_coordinator.loop import CoreLoop
from starlings_coordinator.options import (
    STATUS_EVERY_S,
    CoordinatorOptions,
    Endpoints,
    Observer,
    port_of,
)
from starlings_coordinator.owner import OwnerDesk
from starlings_coordinator.planner_link import PlannerLink
from starlings_coordinator.reach.desk import ReachDesk, RelaySettings
from starlings_coordinator.service import ControlService
from starlings_coordinator.sessions import Ending, SessionTable
from starlings_coordinator.signing import AssignmentSigner
from starlings_coordinator.store import Store, StoreMismatch, sqlite_url
from starlings_job.prepared import JOB_FILE, checkpoint_url, load_prepared, load_profile
from starlings_job.profile import Profile
from starlings_job.records import RecordStore
from starlings_job.source_ranges import SourceRange, read_sources
from starlings_job.spec import JobSpec, load_job
from starlings_protos import control_pb2_grpc
from starlings_protos.channels import (
    CONTROL,
    ENROLMENT,
    bind,
    enrolment_credentials,
    make_server,
    server_credentials,
)
from starlings_protos.errors import PortBusy, refusals
from starlings_protos.identity import COORDINATOR, OWNER
from starlings_protos.peers import CONTROL_POLICY, RoleGuard
from starlings_protos.private_files import write_private

logger = logging.getLogger(__name__)

DATABASE_FILE = "core.sqlite"
ENDPOINTS_FILE = "coordinator.json"
KEEPER_PORT_OFFSET = 3
RELAY_PORT_OFFSET = 4
RENEWALS_EVERY_S = 20.0
# Calls under way may end within this time when the servers stop.
SERVER_GRACE_S = 2.0


@dataclass(frozen=True)
class Job:
    """What lies in the prepared directory, read once."""

    spec: JobSpec
    profile: Profile
    records: RecordStore
    sources: tuple[SourceRange, ...] = ()

    @classmethod
    def load(cls, options: CoordinatorOptions) -> Job:
        given = load_job(options.job_file) if options.job_file is not None else None
        spec = load_prepared(options.directory, given)
        copy = options.directory / JOB_FILE
        if options.job_file is not None and options.job_file.read_bytes() != copy.read_bytes():
            shutil.copyfile(options.job_file, copy)  # a longer job, or other addresses: the next start knows
        profile, records = load_profile(options.directory), RecordStore(options.directory)
        skewed = spec.data.skew is not None
        sources = read_sources(options.directory, records.population) if skewed else ()
        return cls(spec, profile, records, sources)


def open_store(options: CoordinatorOptions, job: JobSpec) -> Store:
    """The job's log. Raises StoreError."""
    database = options.directory / DATABASE_FILE
    if options.store_url is None:
        # SQLite would give it the usual mode; its companions take over the one that the file has.
        os.close(os.open(database, os.O_CREAT | os.O_RDWR, 0o600))
    store = Store(options.store_url or sqlite_url(database))
    try:
        known = store.read_meta("job_digest")
        if known is None:
            store.write_meta("job_digest", job.digest())
            store.write_meta("job_name", job.job.name)
        elif known != job.digest():
            raise StoreMismatch(
                f"The log was written for another version of the job ({known[:12]}, now {job.digest()[:12]}): only "
                "tokens, [swarm], [checkpoint], [network] and [bus] may change. Undo the change, or prepare it as a "
                "new job (--dir)."
            )
    except BaseException:
        store.close()
        raise
    return store


async def restore_core(job: Job, journal: Journal, key_der: bytes) -> Core:
    """The core as the log has it. Raises StoreError."""
    config = CoreConfig(
        job=job.spec,
        profile=job.profile,
        population=job.records.population,
        held_out_count=job.records.held_out_count,
        count_targets=job.records.target_count,
        assignment_key_der=key_der,
        sources=job.sources,
    )
    saved = await journal.load()
    try:
        records = tuple(record_from_json(entry.payload) for entry in saved.entries)
        return Core.restore(config, saved.snapshot, records)
    except RecordError as error:
        raise StoreMismatch(
            f"The coordinator's log cannot be read by this version of Starlings ({error}): use the one that wrote it."
        ) from None


class Coordinator:
    """Everything that runs, wired together."""

    def __init__(
        self,
        options: CoordinatorOptions,
        observer: Observer,
        job: Job,
        core: Core,
        journal: Journal,
        authority: EnrolmentAuthority,
        clock: SystemClock,
    ) -> None:
        self.options, self.observer, self.job, self.authority = options, observer, job, authority
        self.ended: asyncio.Future[JobEnded] = asyncio.get_running_loop().create_future()
        self.sessions = SessionTable()
        self.loop = CoreLoop(core, journal, clock, self._execute)
        self.signer = AssignmentSigner(authority.assignment_key, job.spec.job.name)
        self.hosts = advertised_hosts(options.advertise, job.spec.network.host, options.listen_host)
        logs = options.directory / "logs"
        planner = PlannerLink(
            profile_json=job.profile.to_json(), log_path=logs / "planner.log", post=self.loop.post_soon
        )
        keeper = KeeperLink(
            self._keeper_settings(),
            authority=authority.ca,
            signer=self.signer,
            clock=clock,
            log_path=logs / "keeper.log",
            post=self._post_keeper,
        )
        self.reach = ReachDesk(
            RelaySettings(options.listen_host, self._ports()[3], self.hosts),
            authority=authority.ca,
            revoked=lambda: authority.revoked_workers,
            log_path=logs / "relay.log",
            tell_keeper=keeper.reroute,
            announce=self._heard_of_relay,
        )
        keeper.routes = self.reach.book.routes
        self.children = (planner.child, keeper.child, self.reach.child)
        self.dispatcher = Dispatcher(
            sessions=self.sessions,
            signer=self.signer,
            records=job.records,
            planner=planner,
            keeper=keeper,
            clock=clock,
            on_announce=lambda kind, text: observer("announce", {"kind": kind, "text": text}),
            on_job_ended=self._job_ended,
            on_answer=lambda answer: self.owner.answered(answer),
        )
        self.bulletin: Bulletin | None = None
        if job.spec.bus.url is not None:
            own = lambda: authority.identity(COORDINATOR)  # noqa: E731
            self.bulletin = Bulletin(core, clock, job.spec.bus, own, self._heard_of_bus)
        detokenise = detokeniser(job.records.meta.tokenizer, options.directory)
        self.owner = OwnerDesk(
            core,
            self.loop,
            authority,
            clock,
            job.records,
            detokenise,
            self.bulletin,
            self.reach.book,
            planner.advise,
        )
        self.control = make_server(CONTROL, [RoleGuard(CONTROL_POLICY, authority.refuse)])
        service = ControlService(
            self.loop,
            self.sessions,
            self.owner,
            clock,
            lambda: core.membership.heartbeat_interval_s,
            self.reach,
        )
        control_pb2_grpc.add_ControlServicer_to_server(service, self.control)
        self.enrolment = make_server(ENROLMENT)
        control_pb2_grpc.add_EnrolmentServicer_to_server(EnrolmentService(authority), self.enrolment)

    def _execute(self, effect: Any) -> None:
        self.dispatcher(effect)

    def _job_ended(self, effect: JobEnded) -> None:
        if not self.ended.done():
            self.ended.set_result(effect)

    def _post_keeper(self, event: Event) -> None:
        if isinstance(event, KeeperLost):
            logger.warning("keeper: %s", event.reason)
            self.observer("announce", {"kind": "keeper", "text": event.reason})
        if isinstance(event, KeeperStarted):
            self.observer("keeper", {"addresses": list(event.addresses), "versions": list(event.versions)})
        self.loop.post_soon(event)

    def _heard_of_bus(self, line: str) -> None:
        logger.info("%s", line)
        self.observer("announce", {"kind": "bus", "text": line})

    def _heard_of_relay(self, text: str) -> None:
        logger.warning("relay: %s", text)
        self.observer("announce", {"kind": "relay", "text": text})

    def _ports(self) -> tuple[int, int, int, int]:
        """Control, enrolment, keeper, relay; 0 = any."""
        chosen, ports = self.options, self.job.spec.network.ports
        control = ports.control if chosen.control_port is None else chosen.control_port
        enrolment = ports.enrolment if chosen.enrolment_port is None else chosen.enrolment_port
        keeper = chosen.keeper_port
        if keeper is None:
            keeper = min(control + KEEPER_PORT_OFFSET, 65535) if control else 0
        relay = chosen.relay_port
        if relay is None:
            relay = min(control + RELAY_PORT_OFFSET, 65535) if control else 0
        return control, enrolment, keeper, relay

    def _keeper_settings(self) -> KeeperSettings:
        spec, options = self.job.spec, self.options
        return KeeperSettings(
            job=spec.job.name,
            job_json=spec.to_json(),
            job_directory=options.directory.absolute(),
            listen_host=options.listen_host,
            listen_port=self._ports()[2],
            advertise_hosts=self.hosts,
            checkpoint_url=checkpoint_url(options.directory, spec),
            keep=spec.checkpoint.keep,
            tensor_limit_bytes=self.job.profile.tensor_limit_bytes(spec.train.microbatch),
        )

    def open_ports(self) -> Endpoints:
        """Raises PortBusy or UsageError."""
        host, (control, enrolment, *_) = self.options.listen_host, self._ports()
        credentials = server_credentials(lambda: self.authority.identity(COORDINATOR))
        killed = Endpoints.of_killed(self.options.directory / "owner" / ENDPOINTS_FILE)
        before = (port_of(killed.control), port_of(killed.enrolment)) if killed is not None else (0, 0)
        control = _bind(self.control, host, control, before[0], credentials)
        enrolment = _bind(
            self.enrolment, host, enrolment, before[1], enrolment_credentials(self.authority.ca)
        )
        hosts = [f"{h}:{control}" for h in self.hosts]
        local = f"{local_host(host)}:{control}"
        bus_url = self.job.spec.bus.url or ""
        self.authority.serve_at([f"{h}:{enrolment}" for h in self.hosts], hosts, bus_url)
        self.authority.identity(OWNER)  # written to owner/
        found = Endpoints(
            tuple(dict.fromkeys([local, *hosts])), tuple(f"{h}:{enrolment}" for h in self.hosts), os.getpid()
        )
        write_private(self.options.directory / "owner" / ENDPOINTS_FILE, found.to_json())
        return found

    async def listen(self, endpoints: Endpoints) -> None:
        await self.control.start()
        await self.enrolment.start()
        fields: dict[str, Any] = {
            "job": self.job.spec.job.name,
            "directory": str(self.options.directory.absolute()),
            "control": list(endpoints.control),
            "enrolment": list(endpoints.enrolment),
            "pin": self.authority.ca.pin,
        }
        if self.options.first_invite:
            made = await asyncio.to_thread(
                self.authority.create_invite, self.options.invite_lifetime_s, self.options.invite_uses
            )
            fields |= {"invite": made.invite, "invite_id": made.token_id, "invite_expires_s": made.expires_s}
        self.observer("listening", fields)
        if self.bulletin is not None:
            self.bulletin.start()

    async def renew(self) -> None:
        """Certificates and signed assignments, long before they expire; and what was refused goes to the log."""
        told = 0
        while True:
            await asyncio.sleep(RENEWALS_EVERY_S)
            self.dispatcher.renew()
            if refusals.total() != told:
                told = refusals.total()
                counts = ", ".join(f"{r.name.lower()} {n}" for r, n in refusals.most_common())
                logger.info("refused so far: %s", counts)
            try:
                await asyncio.to_thread(self.authority.renew_own)
            except OSError as error:  # a full disk: the old ones are good for days
                logger.warning("certificates could not be renewed: %s", error)

    async def report(self) -> None:
        """The state now and then, for whoever watches this process."""
        last: Headline | None = None
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            now = self.owner.headline()
            if now != last:
                last = now
                self.observer("status", {**asdict(now), "line": _line(now)})

    async def leave(self, reason: str) -> None:
        """Ends streams, calls and children in order."""
        self.loop.ended.set()
        self.sessions.end_all(Ending(None, reason, leaving=True))
        await self.sessions.wait_empty(SERVER_GRACE_S)
        await asyncio.gather(self.control.stop(SERVER_GRACE_S), self.enrolment.stop(SERVER_GRACE_S))
        await asyncio.gather(*(child.stop() for child in self.children))
        if self.bulletin is not None:
            # After the workers' goodbyes, which stand for themselves until here.
            await self.bulletin.close(job_is_over=self.ended.done())
        with contextlib.suppress(FileNotFoundError):
            (self.options.directory / "owner" / ENDPOINTS_FILE).unlink()


def _bind(
    server: grpc.aio.Server, host: str, port: int, before: int, credentials: grpc.ServerCredentials
) -> int:
    """Opens `port`. With 0 the port of `before` is tried first: workers look for a killed coordinator there."""
    if port == 0 and before:
        with contextlib.suppress(PortBusy):
            return bind(server, host, before, credentials)
    return bind(server, host, port, credentials)


def _line(status: Headline) -> str:
    """The state of the job in one line."""
    if status.waiting_for:
        return f"{status.phase}: {status.waiting_for}"
    rate = f"{status.tokens_per_second:,.0f} tokens/s"
    return f"{status.phase}: step {status.step} of {status.steps_total}, loss {status.loss:.3f}, {rate}"
