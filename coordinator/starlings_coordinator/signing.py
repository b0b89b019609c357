"""Assignments are signed on their way out, and renewed on the stream long before they expire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric import ec

from starlings_protos.assignments import LIFETIME_S, assignment_key_der, sign_assignment
from starlings_protos.identity import Role
from starlings_protos.messages import (
    KEEPER,
    Assignment,
    AssignmentClaim,
    AssignmentRenewed,
    SignedAssignment,
    Span,
    WorkerId,
)

RENEW_AFTER_S = LIFETIME_S * 2 / 3
# For receivers whose clock is a little behind.
_BACKDATED_S = 60.0


@dataclass(frozen=True, slots=True)
class _Signed:
    session: int
    plan_version: int
    span: Span
    signed_at_wall_s: float


class AssignmentSigner:
    """Knows each worker's incarnation (from the Welcome that went out) and its last assignment.

    All times are wall seconds of this process: expiries are checked by peers against the coordinator's clock.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, job: str) -> None:
        self._key = key
        self._job = job
        self._incarnations: dict[WorkerId, int] = {}
        self._signed: dict[WorkerId, _Signed] = {}

    @property
    def key_der(self) -> bytes:
        return assignment_key_der(self._key)

    def welcomed(self, worker_id: WorkerId, incarnation: int) -> None:
        """A Welcome leaves: what is signed from now on is for this life."""
        if self._incarnations.get(worker_id) != incarnation:
            self._signed.pop(worker_id, None)
        self._incarnations[worker_id] = incarnation

    def sign(
        self, assignment: Assignment, worker_id: WorkerId, session: int, now_wall_s: float
    ) -> Assignment:
        self._signed[worker_id] = _Signed(session, assignment.plan_version, assignment.span, now_wall_s)
        claim = self._claim(
            worker_id,
            assignment.plan_version,
            assignment.span,
            self._incarnations.get(worker_id, 0),
            now_wall_s,
        )
        return replace(assignment, signed=sign_assignment(self._key, claim))

    def renewals(self, now_wall_s: float) -> Iterator[tuple[int, WorkerId, AssignmentRenewed]]:
        """(session, worker, message) for each assignment that is due; they count as renewed now."""
        for worker_id, last in list(self._signed.items()):
            # A wall clock that was set back must not stop renewals either.
            if 0 <= now_wall_s - last.signed_at_wall_s < RENEW_AFTER_S:
                continue
            self._signed[worker_id] = replace(last, signed_at_wall_s=now_wall_s)
            claim = self._claim(
                worker_id, last.plan_version, last.span, self._incarnations.get(worker_id, 0), now_wall_s
            )
            yield last.session, worker_id, AssignmentRenewed(sign_assignment(self._key, claim))

    def forget(self, worker_id: WorkerId) -> None:
        """Its session ended or it stands by: nothing is renewed until it is assigned again."""
        self._signed.pop(worker_id, None)

    def sign_keeper(self, now_wall_s: float) -> SignedAssignment:
        """What the keeper shows to donors; its lives are fenced by nothing, there is only one."""
        return sign_assignment(self._key, self._claim(KEEPER, 0, None, 0, now_wall_s))

    def _claim(
        self, worker_id: WorkerId, plan_version: int, span: Span | None, incarnation: int, now_wall_s: float
    ) -> AssignmentClaim:
        return AssignmentClaim(
            job=self._job,
            worker_id=worker_id,
            incarnation=incarnation,
            plan_version=plan_version,
            span=span,
            not_before_s=now_wall_s - _BACKDATED_S,
            expires_s=now_wall_s + LIFETIME_S,
            role=(Role.KEEPER if worker_id == KEEPER else Role.WORKER).value,
        )
