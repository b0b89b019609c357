"""Refusals keep their meaning over gRPC and on the way to an exit code."""

from __future__ import annotations

import grpc
import pytest

from starlings_protos import common_pb2
from starlings_protos.errors import (
    MESSAGE_LIMIT_CHARACTERS,
    RULES,
    ExitCode,
    PeerFault,
    RefusedError,
    StarlingsError,
    Unreachable,
    UsageError,
    WorldError,
    abort,
    clean_text,
    exit_code_of,
    refusal_of,
    refused_error,
)
from starlings_protos.messages import Refusal


def test_every_refusal_has_a_rule_and_a_real_status():
    assert set(RULES) == set(Refusal)
    for rule in RULES.values():
        assert rule.status in grpc.StatusCode.__members__
        assert rule.status != "OK"


def test_refusals_are_those_of_the_wire():
    wire = {name.removeprefix("REFUSAL_"): number for name, number in common_pb2.Refusal.items()}
    assert wire == {refusal.name: int(refusal) for refusal in Refusal}


def test_exit_codes_are_those_of_the_sheet():
    assert [code.value for code in ExitCode] == list(range(17))
    expected = {
        Refusal.INVITE_WRONG: 4,
        Refusal.INVITE_EXPIRED: 5,
        Refusal.INVITE_USED_UP: 6,
        Refusal.REVOKED: 7,
        Refusal.VERSION: 8,
        Refusal.JOB_MISMATCH: 8,
        Refusal.NO_ROOM: 13,
        Refusal.CLOCK: 15,
        Refusal.EVICTED: 16,
    }
    assert {refusal: int(exit_code_of(refusal)) for refusal in expected} == expected


def test_codes_that_a_restart_cannot_cure_do_not_restart():
    for refusal in (Refusal.REVOKED, Refusal.VERSION, Refusal.JOB_MISMATCH, Refusal.INVITE_EXPIRED):
        assert not RefusedError(refusal, "no").restart_may_cure
    assert RefusedError(Refusal.BUSY, "later").restart_may_cure


def test_tree():
    assert issubclass(Unreachable, WorldError)
    for cls in (WorldError, UsageError, PeerFault, RefusedError):
        assert issubclass(cls, StarlingsError)
    assert Unreachable("gone").exit_code == 3


class _Context:
    """Stands in for a servicer context and, afterwards, for the client's error."""

    async def abort(self, code, details="", trailing_metadata=()):
        self._code, self._details, self._trailing = code, details, trailing_metadata
        raise RuntimeError("aborted")

    def trailing_metadata(self):
        return self._trailing

    def details(self):
        return self._details


@pytest.mark.parametrize("refusal", list(Refusal))
async def test_round_trip(refusal: Refusal):
    context = _Context()
    with pytest.raises(RuntimeError, match="aborted"):
        await abort(context, refusal, "because")  # type: ignore[arg-type]
    assert context._code is grpc.StatusCode[RULES[refusal].status]
    assert refusal_of(context) is refusal  # type: ignore[arg-type]
    error = refused_error(context)  # type: ignore[arg-type]
    assert error is not None
    assert (error.refusal, str(error), error.exit_code) == (refusal, "because", RULES[refusal].exit_code)


@pytest.mark.parametrize("value", ["", "-1", "99", "four", "1" * 400, b"4", "٤"])
def test_nonsense_in_the_metadata_is_no_refusal(value):
    context = _Context()
    context._trailing, context._details = (("starlings-refusal", value),), "x"
    assert refusal_of(context) is None  # type: ignore[arg-type]
    assert refused_error(context) is None  # type: ignore[arg-type]


def test_a_transport_failure_is_no_refusal():
    assert refusal_of(OSError("gone")) is None
    context = _Context()
    context._trailing, context._details = None, ""
    assert refusal_of(context) is None  # type: ignore[arg-type]


def test_text_from_outside_cannot_drive_a_terminal():
    assert clean_text("a\x1b[2Jb\r\nc\ud800\u202ed") == "a [2Jb c d"
    assert len(clean_text("x" * 10**6)) == MESSAGE_LIMIT_CHARACTERS
