"""A peer believes an assignment only if the coordinator signed it, for that very certificate, for now."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from starlings_protos.assignments import (
    LEEWAY_S,
    LIFETIME_S,
    METADATA_KEY,
    CoordinatorClock,
    assignment_from_metadata,
    assignment_key_der,
    assignment_metadata,
    sign_assignment,
    verify_assignment,
)
from starlings_protos.errors import RefusedError
from starlings_protos.identity import new_key
from starlings_protos.messages import AssignmentClaim, Refusal, SignedAssignment, Span, WorkerId

NOW = 1_800_000_000.0
WORKER = WorkerId("w" + "1" * 16)
KEY = new_key()
KEY_DER = assignment_key_der(KEY)
CLAIM = AssignmentClaim(
    job="job",
    worker_id=WORKER,
    incarnation=3,
    plan_version=7,
    span=Span(1, 2),
    not_before_s=NOW - 60,
    expires_s=NOW + LIFETIME_S,
    role="worker",
)


def _verify(signed: SignedAssignment, **changed) -> AssignmentClaim:
    arguments = {"worker_id": WORKER, "job": "job", "now_wall_s": NOW} | changed
    return verify_assignment(
        changed.pop("key", KEY_DER), signed, **{k: v for k, v in arguments.items() if k != "key"}
    )


def _refused(signed: SignedAssignment, says: str, **changed) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        _verify(signed, **changed)
    assert refused.value.refusal is Refusal.ASSIGNMENT


def test_what_was_signed_comes_back():
    assert _verify(sign_assignment(KEY, CLAIM)) == CLAIM
    keeper = replace(CLAIM, worker_id=WorkerId("keeper"), role="keeper", span=None)
    assert _verify(sign_assignment(KEY, keeper), worker_id="keeper") == keeper


def test_forged_or_changed():
    signed = sign_assignment(KEY, CLAIM)
    _refused(sign_assignment(new_key(), CLAIM), "did not sign")
    _refused(replace(signed, payload=signed.payload + b"\x08\x01"), "did not sign")
    _refused(replace(signed, signature=b""), "did not sign")
    _refused(signed, "did not sign", key=assignment_key_der(new_key()))
    _refused(signed, "did not sign", key=b"no key")


def test_stolen():
    _refused(sign_assignment(KEY, CLAIM), "names w1111111111111111", worker_id="w" + "2" * 16)
    _refused(sign_assignment(KEY, CLAIM), "another job", job="other")


@pytest.mark.parametrize(
    ("worker_id", "role"),
    [
        ("keeper", "worker"),
        (WORKER, "keeper"),
        ("owner", "owner"),
        (WORKER, "owner"),
        (WORKER, ""),
        ("x", "worker"),
    ],
)
def test_roles_that_cannot_be(worker_id: str, role: str):
    claim = replace(CLAIM, worker_id=WorkerId(worker_id), role=role)
    _refused(sign_assignment(KEY, claim), "cannot have the id|takes no part", worker_id=worker_id)


def test_time():
    signed = sign_assignment(KEY, CLAIM)
    assert _verify(signed, now_wall_s=CLAIM.expires_s + LEEWAY_S - 1)
    _refused(signed, "expired 40 s ago", now_wall_s=CLAIM.expires_s + 40)
    _refused(signed, "not valid yet", now_wall_s=CLAIM.not_before_s - LEEWAY_S - 1)
    for claim in (replace(CLAIM, expires_s=math.nan), replace(CLAIM, not_before_s=math.nan)):
        with pytest.raises(RefusedError):
            _verify(sign_assignment(KEY, claim))


def test_long_ones_are_refused_before_any_arithmetic():
    _refused(SignedAssignment(b"x" * 5000, b"x"), "too long")
    _refused(SignedAssignment(b"x", b"x" * 81), "too long")


def test_random_bytes_even_when_signed():
    rng = random.Random(5)
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    for turn in range(10_000):
        payload = rng.randbytes(rng.randrange(40))
        signature = rng.randbytes(rng.randrange(80))
        if turn % 20 == 0:
            signature = KEY.sign(payload, ec.ECDSA(hashes.SHA256()))
        with pytest.raises(RefusedError):
            _verify(SignedAssignment(payload, signature))


def test_metadata_round_trip():
    signed = sign_assignment(KEY, CLAIM)
    assert assignment_from_metadata((("user-agent", "x"), *assignment_metadata(signed))) == signed


def test_metadata_that_is_none():
    signed = assignment_metadata(sign_assignment(KEY, CLAIM))
    for metadata, says in (
        (None, "none was shown"),
        ((), "none was shown"),
        (signed * 2, "several"),
        (((METADATA_KEY, b"\xff\xff"),), "cannot be read"),
    ):
        with pytest.raises(RefusedError, match=says):
            assignment_from_metadata(metadata)


def test_random_metadata():
    rng = random.Random(6)
    for _ in range(10_000):
        try:
            signed = assignment_from_metadata(((METADATA_KEY, rng.randbytes(rng.randrange(30))),))
        except RefusedError:
            continue
        with pytest.raises(RefusedError):
            _verify(signed)


def test_the_coordinators_clock_does_not_jump_with_ours():
    clock = CoordinatorClock.learnt(wall_time_s=NOW, monotonic_s=50.0)
    assert clock.wall_s(60.0) == NOW + 10
