"""Whatever bytes a worker sends become a bounded, clean record or a coded refusal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_coordinator import intake
from starlings_coordinator.intake import received
from starlings_protos import control_pb2
from starlings_protos.convert import body_to_proto
from starlings_protos.errors import RefusedError
from starlings_protos.messages import (
    EngineDown,
    Heartbeat,
    Hello,
    Hop,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    MicrobatchKey,
    PeerUnreachable,
    ProbeReport,
    Refusal,
    StateReport,
    ToCoordinator,
    WorkerId,
)
from starlings_protos.telemetry import Telemetry, TelemetrySample

WORKER = WorkerId("w" + "0" * 16)


def _through(record: ToCoordinator) -> Any:
    return received(body_to_proto(record, control_pb2.ToCoordinator()))  # type: ignore[arg-type]


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_a_record_or_a_refusal(data: bytes) -> None:
    try:
        message = control_pb2.ToCoordinator.FromString(data)
    except DecodeError:
        return  # gRPC ends the stream by itself
    refusal = None
    try:
        assert dataclasses.is_dataclass(received(message))
    except RefusedError as error:
        refusal = error.refusal
    assert refusal in (None, Refusal.MALFORMED, Refusal.LIMIT)


def test_honest_messages_pass_unchanged() -> None:
    key = MicrobatchKey(LeaseKind.TRAIN, 1, 0, 2)
    for record in (
        Hello(WORKER, 1, 1, "0.1", device="cpu (emulating rtx3060)", numeric_class="cpu:avx2:2.13"),
        Heartbeat(3, 4),
        Telemetry(WORKER, 1, (TelemetrySample(1e9, 3, 4, 12, wait_s=0.5),)),
        ProbeReport({"layer": 0.1}, {"layer": 0.2}, 1 << 30, ("10.0.0.1:7710", "::1:7710")),
        MicrobatchDone(key, (Hop(WORKER, 0, 1),), 3.5, 64),
        StateReport(3, {f"layers.{i}": "ab" * 32 for i in range(200)}),
        LeaseRequest(7),
    ):
        assert _through(record) == record


def test_texts_for_people_lose_what_could_move_a_cursor() -> None:
    down = _through(EngineDown("\x1b[2J" + "x" * 10_000, True))
    assert down.reason.isprintable()
    assert len(down.reason) <= intake.TEXT_LIMIT_CHARACTERS
    hello = _through(Hello(WORKER, 1, 1, "v", device="a\nb\x07"))
    assert hello.device == "a b"
    assert list(_through(StateReport(1, {"\x1bkind": "ab"})).block_digests) == ["kind"]


def test_losses_may_diverge_and_other_numbers_may_not() -> None:
    key = MicrobatchKey(LeaseKind.TRAIN, 0, 0, 0)
    assert math.isnan(_through(MicrobatchDone(key, (), math.nan, 1)).loss_sum)
    for record in (
        Telemetry(WORKER, 1, (TelemetrySample(1e9, wait_s=math.nan),)),
        ProbeReport({"layer": math.inf}, {}, 1, ("h:1",)),
        ProbeReport({}, {}, 1, ("h:1",), uplink_bytes_per_s=-math.inf),
    ):
        with pytest.raises(RefusedError, match="not finite") as refused:
            _through(record)
        assert refused.value.refusal is Refusal.MALFORMED


def test_counts_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "ENTRIES_LIMIT", 10)
    key = MicrobatchKey(LeaseKind.TRAIN, 0, 0, 0)
    for record in (
        MicrobatchDone(key, (Hop(WORKER, 0, 0),) * 11, 1.0, 1),
        StateReport(1, {str(i): "" for i in range(11)}),
        ProbeReport({}, {}, 1, ("h:1",) * 17),
    ):
        with pytest.raises(RefusedError) as refused:
            _through(record)
        assert refused.value.refusal is Refusal.LIMIT


@pytest.mark.parametrize("address", ["", "nowhere", "host:0", "host:99999", "ho st:1"])
def test_what_peers_would_dial_must_be_an_address(address: str) -> None:
    with pytest.raises(RefusedError) as refused:
        _through(ProbeReport({}, {}, 1, (address,)))
    assert refused.value.refusal is Refusal.MALFORMED


def test_accused_peer_must_have_an_id() -> None:
    _through(PeerUnreachable(WorkerId("keeper"), "gone"))
    _through(PeerUnreachable(WORKER, "gone"))
    with pytest.raises(RefusedError):
        _through(PeerUnreachable(WorkerId("w" + "0" * 400), "gone"))
