"""Joining a job: the invite is checked, the coordinator's certificate is compared with its pin, and only then the
token goes out, over a connection that trusts that certificate alone.

    ensure_membership   what a starting worker calls: joins, renews, or finds that there is nothing to do
    keep_renewed        runs beside a working worker
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import grpc.aio
from cryptography.hazmat.primitives.asymmetric import ec

from starlings_protos import channels, control_pb2, control_pb2_grpc
from starlings_protos.clocks import skew_notice
from starlings_protos.connect import Reached, lost
from starlings_protos.errors import (
    PeerFault,
    RefusedError,
    StarlingsError,
    Unreachable,
    UsageError,
    clean_text,
    refused_error,
)
from starlings_protos.identity import (
    Identity,
    Role,
    is_issued_by,
    key_from_pem,
    key_id,
    key_to_pem,
    make_csr,
    new_key,
    read_certificate,
)
from starlings_protos.invite import Address, Invite, parse_address, spoken_duration, spoken_time
from starlings_protos.messages import Refusal
from starlings_protos.private_files import make_private_directory, write_private
from starlings_protos.renewal import make_renewal
from starlings_protos.version import PROTOCOL_MAX, PROTOCOL_MIN
from starlings_worker.find import find_coordinator
from starlings_worker.membership import ADDRESS_LIMIT, Membership

CALL_TIMEOUT_S = 10.0
RENEWAL_CHECK_S = 300.0
BUS_URL_LIMIT = 300
# As long as the source of a flood needs to be let in again.
PATIENCE_S = 60.0
_NOT_NOW = (Refusal.BUSY, Refusal.LIMIT)

T = TypeVar("T")

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Enrolled:
    """The outcome of joining or renewing."""

    membership: Membership
    # This machine's clock minus the coordinator's, seconds; None when they were not compared.
    skew_s: float | None = None
    # For the person at this machine; None when all is as it should be.
    notice: str | None = None


async def ensure_membership(
    directory: Path,
    invite: Invite | None,
    *,
    role: Role = Role.WORKER,
    wall: Clock = time.time,
    patience_s: float = PATIENCE_S,
) -> Enrolled:
    """Whatever is needed to be a member: nothing, a renewal, or joining with the invite.

    A member of the invite's job stays one whether or not the invite still holds, so that a service may be restarted
    with the same command for ever.

    Args:
        role: WORKER or OBSERVER: what the invite must be for.
        patience_s: how long to go on trying while the coordinator says that it is busy or that too many come from
            here.

    Raises:
        UsageError: no invite and no membership, or the directory belongs to another job, or to another role.
        RefusedError: the coordinator said no. Unreachable: it cannot be reached. ClockSkewed: nor could it be
        trusted. OSError: the directory cannot be written.
    """
    known = await asyncio.to_thread(Membership.load, directory)
    if known is None and invite is None:
        raise UsageError(f"{directory} has not joined a job yet: give an invite.")
    if known is None or (invite is not None and known.job == invite.job and known.pin != invite.pin):
        # Or the job was set up anew under the same name: its new CA knows nobody.
        assert invite is not None
        return await enrol(invite, directory, role=role, wall=wall, patience_s=patience_s)
    if known.identity.peer.role is not role:
        raise UsageError(
            f"{directory} holds the identity of the {known.identity.peer.role.value} {known.worker_id}: "
            "give another --dir."
        )
    if invite is not None and known.job != invite.job:
        raise UsageError(
            f"{directory} belongs to the job {known.job!r}, the invite is for {invite.job!r}: give another --dir."
        )
    if invite is not None and not set(invite.addresses) <= set(known.enrolment_addresses):
        # The coordinator has moved. Renewing there brings its new control addresses too, and uses no token up.
        merged = dict.fromkeys((*invite.addresses, *known.enrolment_addresses))
        known = replace(known, enrolment_addresses=tuple(merged)[:ADDRESS_LIMIT])
    elif not known.identity.is_due(wall()):
        return Enrolled(known)
    try:
        return await renew(known, directory, wall=wall)
    except Unreachable as error:
        if wall() >= known.identity.not_after_s:
            raise
        return Enrolled(known, notice=f"The certificate could not be renewed yet. {error}")


async def enrol(
    invite: Invite,
    directory: Path,
    *,
    role: Role = Role.WORKER,
    wall: Clock = time.time,
    patience_s: float = 0.0,
) -> Enrolled:
    """Joins with an invite and writes the membership to `directory`. The key there is used if there is one, so the
    worker keeps its id.

    Raises:
        RefusedError: INVITE_EXPIRED before anything is sent; otherwise as the coordinator says.
        Unreachable, ClockSkewed, PeerFault, OSError
    """
    now_s = wall()
    if now_s >= invite.expires_s:
        raise RefusedError(
            Refusal.INVITE_EXPIRED,
            f"This invite expired at {spoken_time(invite.expires_s)}, {spoken_duration(now_s - invite.expires_s)} ago "
            "by this machine's clock: ask the owner for a new one (starlings invite create), or set the clock if it is "
            "wrong.",
        )
    reached = await find_coordinator(invite.addresses, invite.pin, now_s)
    # Written before it is used: whatever happens next, the same key is tried again.
    key = await asyncio.to_thread(_load_or_create_key, directory)

    def request(wall_time_s: float) -> control_pb2.EnrolRequest:
        return control_pb2.EnrolRequest(
            token_id=invite.token_id,
            token_secret=invite.secret,
            csr_pem=make_csr(key),
            job=invite.job,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            wall_time_s=wall_time_s,
            role=role.value,
        )

    reply, skew_s = await _patiently(lambda: _call(reached, "Enrol", request, wall), patience_s)
    addresses = _first(reached.address, invite.addresses)
    membership = _accept(reply, key, role, reached, invite.job, addresses)
    await asyncio.to_thread(membership.save, directory)
    return Enrolled(membership, skew_s, skew_notice(skew_s))


async def renew(known: Membership, directory: Path, *, wall: Clock = time.time) -> Enrolled:
    """A new certificate for the same key; the old one may have expired.

    Raises:
        RefusedError: REVOKED, CLOCK, or NOT_YOU. Unreachable, ClockSkewed, PeerFault, OSError
    """
    reached = await find_coordinator(known.enrolment_addresses, known.pin, wall())
    key = key_from_pem(known.identity.key_pem)
    reply, skew_s = await _call(reached, "Renew", lambda now_s: make_renewal(known.identity, now_s), wall)
    addresses = _first(reached.address, known.enrolment_addresses)
    membership = _accept(reply, key, known.identity.peer.role, reached, known.job, addresses)
    if membership.worker_id != known.worker_id:
        raise PeerFault(f"The coordinator renewed {known.worker_id} as {membership.worker_id}.")
    await asyncio.to_thread(membership.save, directory)
    return Enrolled(membership, skew_s, skew_notice(skew_s))


async def keep_renewed(
    membership: Membership,
    directory: Path,
    deliver: Callable[[Membership], None],
    *,
    wall: Clock = time.time,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Renews at two thirds of each certificate's life and delivers the new membership. Runs until cancelled.

    Raises:
        RefusedError: REVOKED. Other failures are reported and tried again at the next look.
    """
    while True:
        await sleep(RENEWAL_CHECK_S)
        if not membership.identity.is_due(wall()):
            continue
        try:
            membership = (await renew(membership, directory, wall=wall)).membership
        except RefusedError as error:
            if error.refusal is Refusal.REVOKED:
                raise
            report(str(error))
        except (StarlingsError, OSError) as error:
            report(f"The certificate could not be renewed yet: {error}")
        else:
            deliver(membership)


# ------------------------------------------------------------------ the call


async def _patiently(call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Waits, ever longer and with jitter, while the answer is "not now": a whole lab may start at once."""
    deadline_s, pause_s = time.monotonic() + patience_s, 0.5
    while True:
        try:
            return await call()
        except RefusedError as error:
            pause_s = min(pause_s * 2, 20.0)
            jittered_s = pause_s * random.uniform(0.5, 1.0)
            if error.refusal not in _NOT_NOW or time.monotonic() + jittered_s > deadline_s:
                raise
        await asyncio.sleep(jittered_s)


async def _call(
    reached: Reached,
    method: str,
    request: Callable[[float], control_pb2.EnrolRequest | control_pb2.RenewRequest],
    wall: Clock,
) -> tuple[control_pb2.EnrolReply, float]:
    """The reply, and how far this clock is ahead. The channel trusts the certificate of `reached` and nothing
    else.
    """
    async with channels.enrolment_channel(str(reached.dialled), reached.certificate_pem) as channel:
        stub = control_pb2_grpc.EnrolmentStub(channel)
        sent_s, started_s = wall(), time.monotonic()
        try:
            reply: control_pb2.EnrolReply = await getattr(stub, method)(
                request(sent_s), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            refused = refused_error(error)
            if refused is not None:
                raise refused from None
            raise lost(reached, f"{error.code().name}: {clean_text(error.details() or '', 300)}") from None
        middle_s = sent_s + (time.monotonic() - started_s) / 2
    return reply, middle_s - reply.wall_time_s


def _accept(
    reply: control_pb2.EnrolReply,
    key: ec.EllipticCurvePrivateKey,
    role: Role,
    reached: Reached,
    job: str,
    enrolment_addresses: tuple[Address, ...],
) -> Membership:
    """Takes nothing from the reply on trust: the CA is the pinned one, the certificate its work, for our key and id.

    Raises:
        PeerFault: which part is not so.
    """
    ca_pem = reached.certificate_pem
    certificate = read_certificate(reply.certificate_pem)
    if not is_issued_by(certificate, read_certificate(ca_pem)):
        raise PeerFault("The coordinator sent a certificate that its own CA did not sign.")
    try:
        identity = Identity.from_pem(key_to_pem(key), reply.certificate_pem, ca_pem)
    except UsageError as error:
        raise PeerFault(f"The coordinator sent a certificate that does not fit: {error}.") from None
    if identity.peer.role is not role:
        raise PeerFault(f"The coordinator sent a certificate of another role: {identity.peer.role.value}.")
    if identity.id != reply.worker_id or identity.id != key_id(key.public_key(), role):
        raise PeerFault("The coordinator sent a certificate for another id.")
    if not 1 <= len(reply.control_addresses) <= ADDRESS_LIMIT:
        raise PeerFault(f"The coordinator names {len(reply.control_addresses)} control addresses.")
    try:
        control = tuple(dict.fromkeys(parse_address(text) for text in reply.control_addresses))
    except ValueError as error:
        raise PeerFault(f"The coordinator names a control address that is none: {error}.") from None
    # The host that just worked most likely works again.
    control = tuple(sorted(control, key=lambda a: a.host != reached.address.host))
    return Membership(job, identity, enrolment_addresses, control, reply.bus_url[:BUS_URL_LIMIT])


def _first(best: Address, addresses: tuple[Address, ...]) -> tuple[Address, ...]:
    return (best, *(a for a in addresses if a != best))


def _load_or_create_key(directory: Path) -> ec.EllipticCurvePrivateKey:
    path = directory / "id.key"
    if path.exists():
        try:
            return key_from_pem(path.read_bytes())
        except UsageError as error:
            raise UsageError(f"{path} is damaged ({error}): delete it, a new one is made then.") from None
    make_private_directory(directory)
    key = new_key()
    write_private(path, key_to_pem(key))
    return key
