"""Signed assignments: what the coordinator says about a worker, for peers to check on every data-plane call.

The claim names the worker by its id, which follows from its key, so a stolen assignment is worth nothing without the
certificate. Times are the coordinator's: a receiver judges them by `CoordinatorClock`, not by its own wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from starlings_protos import control_pb2, convert
from starlings_protos.errors import PeerFault, RefusedError
from starlings_protos.identity import KEEPER, PeerIdentity, Role, public_key_from_der, spki_der
from starlings_protos.messages import AssignmentClaim, Refusal, SignedAssignment

METADATA_KEY = "starlings-assignment-bin"
# Renewed on the control stream well before; see design section 8.
LIFETIME_S = 900.0
# For what is left of two clocks' difference after `CoordinatorClock`, and for the way.
LEEWAY_S = 30.0
_PAYLOAD_LIMIT_BYTES = 4 << 10
_SIGNATURE_LIMIT_BYTES = 80


@dataclass(frozen=True, slots=True)
class CoordinatorClock:
    """The coordinator's wall clock as a distance from this process's monotonic one: local wall jumps do not matter."""

    offset_s: float

    @classmethod
    def learnt(cls, wall_time_s: float, monotonic_s: float) -> CoordinatorClock:
        """From a message (Welcome, HeartbeatAck) that carried `wall_time_s` and came in at `monotonic_s`."""
        return cls(wall_time_s - monotonic_s)

    def wall_s(self, monotonic_s: float) -> float:
        return monotonic_s + self.offset_s


def sign_assignment(key: ec.EllipticCurvePrivateKey, claim: AssignmentClaim) -> SignedAssignment:
    payload = convert.to_proto(claim, control_pb2.AssignmentClaim()).SerializeToString(deterministic=True)
    return SignedAssignment(payload, key.sign(payload, ec.ECDSA(hashes.SHA256())))


def assignment_key_der(key: ec.EllipticCurvePrivateKey) -> bytes:
    """What Welcome and StartKeeper carry as `assignment_key_der`."""
    return spki_der(key.public_key())


def verify_assignment(
    public_key_der: bytes, signed: SignedAssignment, *, worker_id: str, job: str, now_wall_s: float
) -> AssignmentClaim:
    """The claim, if the coordinator signed it for `worker_id` (the caller's certificate id) and it is valid now.

    Whether its incarnation and plan are the newest is for the caller to judge.

    Args:
        now_wall_s: seconds since 1970 by the coordinator's clock.

    Raises:
        RefusedError: ASSIGNMENT, with the reason.
    """
    if len(signed.payload) > _PAYLOAD_LIMIT_BYTES or len(signed.signature) > _SIGNATURE_LIMIT_BYTES:
        raise _refused("it is too long")
    if not _is_signed(public_key_der, signed.payload, signed.signature):
        raise _refused("the coordinator of this job did not sign it")
    try:
        claim = convert.from_proto(control_pb2.AssignmentClaim.FromString(signed.payload), AssignmentClaim)
    except (DecodeError, ValueError):
        raise _refused("it cannot be read") from None
    if claim.job != job:
        raise _refused("it is for another job")
    if claim.worker_id != worker_id:
        raise _refused(f"it names {claim.worker_id}, the certificate {worker_id}")
    try:
        peer = PeerIdentity(claim.worker_id, Role(claim.role))
    except (PeerFault, ValueError):
        raise _refused(f"a {claim.role!r} cannot have the id {claim.worker_id}") from None
    if peer.role is not Role.WORKER and peer != KEEPER:
        raise _refused(f"a {peer.role.value} takes no part in training")
    # Written so that a NaN fails.
    if not claim.not_before_s <= now_wall_s + LEEWAY_S:
        raise _refused("it is not valid yet: do the clocks differ?")
    if not now_wall_s - LEEWAY_S < claim.expires_s:
        raise _refused(f"it expired {now_wall_s - claim.expires_s:.0f} s ago")
    return claim


def _refused(reason: str) -> RefusedError:
    return RefusedError(Refusal.ASSIGNMENT, f"The assignment does not count: {reason}.")


@lru_cache(maxsize=2048)
def _is_signed(public_key_der: bytes, payload: bytes, signature: bytes) -> bool:
    """Cached: peers show the same assignment at every call, and a check costs 0.1 ms."""
    try:
        public_key_from_der(public_key_der).verify(signature, payload, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, PeerFault):
        return False
    return True


def assignment_metadata(signed: SignedAssignment) -> tuple[tuple[str, bytes], ...]:
    """What a caller attaches to a data-plane call."""
    message = control_pb2.SignedAssignment(payload=signed.payload, signature=signed.signature)
    return ((METADATA_KEY, message.SerializeToString()),)


def assignment_from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> SignedAssignment:
    """The assignment that a caller showed (`context.invocation_metadata()`).

    Raises:
        RefusedError: ASSIGNMENT: none, several, or unreadable.
    """
    found = [value for key, value in metadata or () if key == METADATA_KEY]
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise _refused("none was shown" if not found else "several were shown")
    try:
        message = control_pb2.SignedAssignment.FromString(found[0])
    except DecodeError:
        raise _refused("it cannot be read") from None
    return SignedAssignment(message.payload, message.signature)
