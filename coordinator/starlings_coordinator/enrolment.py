"""Who may join: the job's CA, its tokens, their limits, and the Enrolment service in front of them.

`EnrolmentAuthority` is thread-safe and blocks (it syncs a file before it answers); `EnrolmentService` calls it off the
event loop. Order of checks: job and protocol, the token, the source's rate, clock and key, revocation and uses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric import ec

from starlings_coordinator import tokens
from starlings_coordinator.own_identities import OwnIdentities
from starlings_coordinator.rates import Rate, SourceLimiter
from starlings_coordinator.token_book import TokenBook, invite_message
from starlings_coordinator.token_journal import FileJournal, TokenJournal
from starlings_coordinator.tokens import Denied
from starlings_protos import control_pb2, control_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.clocks import skew_problem
from starlings_protos.errors import PeerFault, RefusedError, abort, abort_with, clean_text
from starlings_protos.identity import (
    Identity,
    PeerIdentity,
    Role,
    certificate_key,
    identity_of_certificate,
    key_id,
    read_certificate,
    read_csr,
    validity,
)
from starlings_protos.invite import ADDRESS_LIMIT, Address, Invite, parse_address
from starlings_protos.messages import Refusal
from starlings_protos.peers import Context, peer_host
from starlings_protos.renewal import check_renewal
from starlings_protos.version import negotiate, no_common_protocol

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class EnrolmentLimits:
    """How often one source (an IPv4 address, or an IPv6 /64) may do what."""

    # Enrolments and renewals. A lab behind one address may start some hundred workers at once; each costs about 1 ms.
    joins: Rate = field(default=Rate(burst=400, per_s=5))
    # Wrong tokens and renewals without proof; an honest person needs a few tries at most.
    guesses: Rate = field(default=Rate(burst=10, per_s=0.1))
    # Joins and renewals from all sources together: what signing and syncing take stays below a tenth of a core.
    joins_in_all: Rate = field(default=Rate(burst=2000, per_s=50))
    # Refusals told to the event log.
    reports: Rate = field(default=Rate(burst=5, per_s=1 / 60))


DEFAULT_LIMITS = EnrolmentLimits()
# What is said to who means to be something else than the invite is for.
_OTHER_ROLE = {
    Role.WORKER: (
        "This invite is for workers, who come with `starlings join`: ask the owner for one to look on with "
        "(starlings invite create --role observer)."
    ),
    Role.OBSERVER: (
        "This invite is for looking on, with `starlings watch`: ask the owner for a worker's (starlings invite create)."
    ),
}
_EVERYBODY = "all addresses together"
# Calls that wait for the authority's one lock; more are sent away at once, and a worker comes back by itself.
CALLS_AT_ONCE = 256


class EnrolmentAuthority:
    """The CA, the assignment key, the token table and everybody's certificates of one job.

    Args:
        directory: the job's directory; `ca/` and `owner/` are kept in it.
        journal: where token records go; a file in `ca/` by default.
        observe: told of joins and refusals, for the event log: (kind, text). Called on other threads; must not block.

    Raises:
        UsageError: something in `ca/` is damaged.
    """

    def __init__(
        self,
        directory: Path,
        job: str,
        *,
        journal: TokenJournal | None = None,
        limits: EnrolmentLimits = DEFAULT_LIMITS,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        observe: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:
        self.job = job
        self._wall = wall
        self._monotonic = monotonic
        self._observe = observe
        self._joins = SourceLimiter(limits.joins)
        self._joins_in_all = SourceLimiter(limits.joins_in_all, 1)
        self._guesses = SourceLimiter(limits.guesses)
        self._reports = SourceLimiter(limits.reports)
        self._own = OwnIdentities(directory, job, wall)
        self._book = TokenBook(journal or FileJournal(directory / "ca" / "tokens.jsonl"))
        self._enrolment_addresses: tuple[Address, ...] = ()
        self._control_addresses: tuple[str, ...] = ()
        self._bus_url = ""

    @property
    def ca(self) -> CertificateAuthority:
        return self._own.ca

    @property
    def assignment_key(self) -> ec.EllipticCurvePrivateKey:
        """Signs assignments; its public half goes into Welcome."""
        return self._own.assignment_key

    def identity(self, peer: PeerIdentity) -> Identity:
        """The current identity of COORDINATOR, KEEPER or OWNER, renewed when due; OWNER's is also in `owner/`."""
        return self._own.get(peer)

    def renew_own(self) -> tuple[PeerIdentity, ...]:
        """Call once an hour or so. Who got a new certificate; KEEPER's must be passed on to it."""
        return self._own.renew()

    def serve_at(self, enrolment: Sequence[str], control: Sequence[str], bus_url: str = "") -> None:
        """The "host:port" addresses that go into invites, and those that a worker is told when it joins; and the bus.

        Raises:
            ValueError: none, more than an invite can hold, or one that is no address.
        """
        found = tuple(dict.fromkeys(parse_address(text) for text in enrolment))
        if not 1 <= len(found) <= ADDRESS_LIMIT or not 1 <= len(control) <= ADDRESS_LIMIT:
            raise ValueError(f"between one and {ADDRESS_LIMIT} enrolment and control addresses are needed")
        self._enrolment_addresses = found
        self._control_addresses = tuple(str(parse_address(text)) for text in control)
        self._bus_url = bus_url

    # -------------------------------------------------------------- the owner's commands

    def create_invite(
        self, lifetime_s: float = 0.0, uses: int = 0, role: str = "worker"
    ) -> control_pb2.Invite:
        """A new invite, whole only in this reply; see `TokenBook.create`.

        Raises:
            RefusedError, OSError: it does not exist.
        """
        if not self._enrolment_addresses:
            raise RefusedError(Refusal.BUSY, "The coordinator is not listening yet: try again in a moment.")
        token, secret = self._book.create(lifetime_s, uses, role, self._wall())
        created = token.created
        invite = Invite(
            self._enrolment_addresses, self.job, self.ca.pin, created.token_id, secret, int(created.expires_s)
        )
        return invite_message(token, str(invite))

    def list_invites(self) -> control_pb2.InviteList:
        """All tokens by age, without secrets."""
        return control_pb2.InviteList(invites=[invite_message(token) for token in self._book.by_age()])

    def revoke_invite(self, token_id: str, workers: bool = False) -> control_pb2.RevokeInviteReply:
        """See `TokenBook.revoke`. The sessions of those whom the reply names must be closed by the caller."""
        return control_pb2.RevokeInviteReply(worker_ids=self._book.revoke(token_id, workers=workers))

    @property
    def revoked_workers(self) -> frozenset[str]:
        return self._book.table.revoked_workers

    def is_revoked(self, worker_id: str) -> bool:
        return worker_id in self.revoked_workers

    def refuse(self, peer: PeerIdentity) -> RefusedError | None:
        """For `RoleGuard`: shuts out revoked certificates at every call."""
        return RefusedError(Refusal.REVOKED, _shut_out(peer.id)) if self.is_revoked(peer.id) else None

    # -------------------------------------------------------------- joining

    def enrol(self, request: control_pb2.EnrolRequest, source: str) -> control_pb2.EnrolReply:
        """Trades a token for a certificate. `source` is the caller's IP address.

        The same key with the same token gets a certificate again, without using the token up further.

        Raises:
            RefusedError: why not.
            OSError: the join could not be recorded; nothing was granted.
        """
        with self._book.lock:
            try:
                return self._enrol(request, _source_key(source))
            except RefusedError as error:
                self._tell_refused("join", source, error)
                raise

    def _enrol(self, request: control_pb2.EnrolRequest, source: str) -> control_pb2.EnrolReply:
        if request.job != self.job:
            raise RefusedError(
                Refusal.JOB_MISMATCH,
                f"This coordinator serves the job {self.job!r}, the invite is for {clean_text(request.job, 64)!r}: "
                "ask the owner for the invite of the right one.",
            )
        if negotiate(request.protocol_min, request.protocol_max) is None:
            raise RefusedError(
                Refusal.VERSION, no_common_protocol(request.protocol_min, request.protocol_max)
            )
        now_s = self._wall()
        token = tokens.open_token(self._book.table, request.token_id, request.token_secret, now_s)
        if isinstance(token, Denied):
            if token.refusal is Refusal.INVITE_WRONG:
                self._guessed(source)
            raise RefusedError(token.refusal, token.message)
        self._admit(source)
        _check_clock(request.wall_time_s, now_s)
        try:
            public_key = read_csr(request.csr_pem)
        except PeerFault as error:
            raise RefusedError(Refusal.MALFORMED, f"The request cannot be used: {error}.") from None
        role = Role(token.created.role)
        if request.role and request.role != role:
            raise RefusedError(Refusal.INVITE_WRONG, _OTHER_ROLE[role])
        peer = PeerIdentity(key_id(public_key, role), role)
        verdict = tokens.redeem(self._book.table, token, peer.id)
        if isinstance(verdict, Denied):
            raise RefusedError(verdict.refusal, verdict.message)
        if peer.id not in token.workers:
            self._book.record((verdict,))
            what = "joined" if role is Role.WORKER else "may look on,"
            self._observe("join", f"{peer.id} {what} from {source or 'an unknown address'}")
        return self._reply(public_key, peer, now_s)

    def renew(self, request: control_pb2.RenewRequest, source: str) -> control_pb2.EnrolReply:
        """A new certificate for the key of an old one, which may have expired.

        Raises:
            RefusedError: not our certificate, revoked, no proof of the key, or a clock too far off.
        """
        with self._book.lock:
            try:
                return self._renew(request, _source_key(source))
            except RefusedError as error:
                self._tell_refused("renewal", source, error)
                raise

    def _renew(self, request: control_pb2.RenewRequest, source: str) -> control_pb2.EnrolReply:
        now_s = self._wall()
        try:
            # Who issued it first: only then is the rest worth any work.
            if not self.ca.has_issued(read_certificate(request.certificate_pem)):
                self._guessed(source)
                raise RefusedError(
                    Refusal.NOT_YOU,
                    "The certificate to renew is of another job, or of an earlier life of this one: join again with a "
                    "new invite.",
                )
            peer = identity_of_certificate(request.certificate_pem)
            certificate = check_renewal(request)
        except PeerFault as error:
            self._guessed(source)
            raise RefusedError(Refusal.NOT_YOU, f"The renewal does not hold: {error}.") from None
        self._admit(source)
        if peer.role not in (Role.WORKER, Role.OBSERVER):
            raise RefusedError(Refusal.NOT_YOU, f"A {peer.role.value}'s certificate is not renewed here.")
        if self.is_revoked(peer.id):
            raise RefusedError(Refusal.REVOKED, _shut_out(peer.id))
        _check_clock(request.wall_time_s, now_s)
        return self._reply(certificate_key(certificate), peer, now_s)

    def _reply(
        self, public_key: ec.EllipticCurvePublicKey, peer: PeerIdentity, now_s: float
    ) -> control_pb2.EnrolReply:
        certificate_pem = self.ca.issue(public_key, peer, now_s)
        return control_pb2.EnrolReply(
            certificate_pem=certificate_pem,
            ca_pem=self.ca.certificate_pem,
            worker_id=peer.id,
            control_addresses=self._control_addresses,
            not_after_s=validity(read_certificate(certificate_pem))[1],
            wall_time_s=self._wall(),
            bus_url=self._bus_url,
        )

    def _admit(self, source: str) -> None:
        """Who proved to be entitled pays for the signature from its source's bucket."""
        self._take(self._joins, source)
        self._take(self._joins_in_all, _EVERYBODY)

    def _guessed(self, source: str) -> None:
        """Who proved nothing. Only failures are slowed down: many may share an address (a lab, a proxy before the
        coordinator), and one of them must not be able to keep the others out. A secret has 192 random bits, so that an
        answer to every guess would not help either."""
        self._take(self._guesses, source)

    def _take(self, limiter: SourceLimiter, source: str) -> None:
        """Raises:
        RefusedError: LIMIT, with how long to wait.
        """
        now_s = self._monotonic()
        wait_s = limiter.wait_s(source, now_s)
        if wait_s > 0:
            raise RefusedError(
                Refusal.LIMIT,
                f"Too many tries from {source or 'this address'}: wait {math.ceil(wait_s)} s, then try again.",
            )
        limiter.take(source, now_s)

    def _tell_refused(self, what: str, source: str, error: RefusedError) -> None:
        # A flood must not fill the event log as well.
        now_s = self._monotonic()
        if self._reports.wait_s(_source_key(source), now_s) == 0:
            self._reports.take(_source_key(source), now_s)
            self._observe("refused", f"{what} from {source or 'an unknown address'}: {error}")


def _check_clock(wall_time_s: float, now_s: float) -> None:
    if not math.isfinite(wall_time_s):
        raise RefusedError(Refusal.MALFORMED, "The request's clock is no number.")
    problem = skew_problem(wall_time_s - now_s)
    if problem:
        raise RefusedError(Refusal.CLOCK, problem)


def _source_key(source: str) -> str:
    """An IPv6 host owns a whole /64: it counts as one source."""
    try:
        address = ipaddress.ip_address(source)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _shut_out(worker_id: str) -> str:
    return f"The owner has shut out {worker_id} from this job."


class EnrolmentService(control_pb2_grpc.EnrolmentServicer):
    """The gRPC face. Serve it with `channels.enrolment_credentials(authority.ca)`, without a role guard."""

    def __init__(self, authority: EnrolmentAuthority) -> None:
        self._authority = authority
        self._calls = 0

    async def Enrol(self, request: control_pb2.EnrolRequest, context: Context) -> control_pb2.EnrolReply:
        return await self._answer(self._authority.enrol, request, context)

    async def Renew(self, request: control_pb2.RenewRequest, context: Context) -> control_pb2.EnrolReply:
        return await self._answer(self._authority.renew, request, context)

    async def _answer(
        self, method: Callable[[R, str], control_pb2.EnrolReply], request: R, context: Context
    ) -> control_pb2.EnrolReply:
        if self._calls >= CALLS_AT_ONCE:
            await abort(context, Refusal.BUSY, "Very many join at this moment: try again in a few seconds.")
        self._calls += 1
        try:
            return await asyncio.to_thread(method, request, peer_host(context))
        except RefusedError as error:
            refused = error
        except OSError as error:
            refused = RefusedError(
                Refusal.BUSY,
                f"The coordinator cannot record this join ({error.strerror}): tell the owner, then try again.",
            )
        finally:
            self._calls -= 1
        await abort_with(context, refused)
