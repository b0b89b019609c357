"""Which swarm `starlings watch` means, as whom it looks, and where the bus is.

The owner looks with the owner's certificate, everybody else with an observer's, which is enrolled for once and kept
below `observers_root()`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from starlings.directories import choose_job, is_prepared, jobs_root, local_jobs, observers_root
from starlings.failures import CommandError, ExitCode
from starlings_job.prepared import JOB_FILE
from starlings_job.spec import load_job
from starlings_protos import connect
from starlings_protos.bus.address import BusAddress, parse_bus_url
from starlings_protos.errors import Phase, Unreachable
from starlings_protos.identity import OWNER, Identity, Role
from starlings_protos.invite import Address, Invite, parse_invite
from starlings_worker.enrol import ensure_membership, renew
from starlings_worker.membership import Membership

NO_BUS = (
    "The job {job!r} has no bus: `starlings bus config` makes a broker's configuration and says what to write into the "
    "job file. (`starlings status --watch` asks the coordinator itself.)"
)


@dataclass(frozen=True, slots=True)
class Lookout:
    """From where one job's bus can be seen."""

    job: str
    identity: Identity
    address: BusAddress


async def find_lookout(target: str, invite: str, url: str) -> Lookout:
    """By an invite, by a job's name or directory, or the only job that this machine owns or may look at.

    Args:
        target: a job's name or directory; "" for the only one.
        invite: of role observer; "" for none.
        url: of the broker; "" for what the job says.

    Raises:
        CommandError: no such job, several, or one without a bus. StarlingsError: enrolment failed.
    """
    if invite:
        parsed = parse_invite(invite)
        return await _observer(observers_root() / parsed.job, parsed, url)
    if not target:
        target = str(_only())
    place = Path(target)
    if is_prepared(place) or is_prepared(jobs_root() / target):
        return _owner(choose_job(place), url)
    for directory in (observers_root() / target, place):
        if (directory / "id.pem").is_file():
            return await _observer(directory, None, url)
    raise CommandError(
        f"This machine neither owns the job {target!r} nor may look at it: ask its owner for an invite "
        "(starlings invite create --role observer), then: starlings watch INVITE",
        ExitCode.USAGE,
    )


def _only() -> Path:
    found = [*local_jobs(), *sorted(path.parent for path in observers_root().glob("*/id.pem"))]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CommandError(
            "Which swarm? Give an observer's invite, which the owner makes with `starlings invite create --role "
            "observer`, or the name or directory of a job of yours.",
            ExitCode.USAGE,
        )
    names = ", ".join(path.name for path in found)
    raise CommandError(f"There are several jobs to look at ({names}): say which.", ExitCode.USAGE)


def _owner(directory: Path, url: str) -> Lookout:
    spec = load_job(directory / JOB_FILE)
    job, url = spec.job.name, url or spec.bus.url or ""
    if not url:
        raise CommandError(NO_BUS.format(job=job), ExitCode.USAGE)
    identity = Identity.load(directory / "owner")
    if time.time() >= identity.not_after_s:
        # Written anew by every coordinator; the authority lies beside it.
        from starlings_coordinator.own_identities import OwnIdentities

        identity = OwnIdentities(directory, job, time.time).get(OWNER)
    return Lookout(job, identity, _address(url))


async def _observer(directory: Path, invite: Invite | None, url: str) -> Lookout:
    membership = (await ensure_membership(directory, invite, role=Role.OBSERVER)).membership
    if not url and not membership.bus_url:
        membership = await _ask_again(membership, directory)
    url = url or membership.bus_url
    if not url:
        raise CommandError(NO_BUS.format(job=membership.job), ExitCode.USAGE)
    return Lookout(membership.job, membership.identity, _address(url))


async def _ask_again(membership: Membership, directory: Path) -> Membership:
    """The job may have got a bus since."""
    return (await renew(membership, directory)).membership


_ADVICE = {
    Phase.DNS: "Check the name in [bus] url, and that this machine has a working DNS and network.",
    Phase.TCP: "Check that the broker is running, and that firewalls let its port through.",
    Phase.TLS: "Something else than the job's broker may listen there: check the port in [bus] url.",
}


def _address(url: str) -> BusAddress:
    try:
        return parse_bus_url(url)
    except ValueError as error:
        raise CommandError(f"The bus: {error}.", ExitCode.USAGE) from None


async def broker_trouble(address: BusAddress, reason: str) -> Unreachable:
    """Why the broker cannot be used, by the first phase that fails; `reason` is what the MQTT client said."""
    host, port = address.host, address.port
    if not address.tls:
        return Unreachable(
            f"Cannot reach the broker at {address}: {reason}. {_ADVICE[Phase.TCP]}", host=host, port=port
        )
    try:
        await connect.reach(Address(host, port), advice=_ADVICE)
    except Unreachable as error:
        return error
    return Unreachable(
        f"The broker at {host} port {port} is there, but does not serve us: {reason}. It must have the configuration "
        "that `starlings bus config` writes for this job, and this machine's certificate must not have been revoked.",
        host=host,
        port=port,
        phase=Phase.AUTHORISATION,
    )
