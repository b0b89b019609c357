"""What a worker says of itself on the bus: pure."""

from __future__ import annotations

import json

import pytest

from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus import payloads
from starlings_protos.bus.payloads import Form
from starlings_protos.bus.topics import Kind, Topic
from starlings_worker import presence
from starlings_worker.bus import bus_of
from starlings_worker.presence import Standing

ALICE = "w" + "a" * 16


def order(**body: object) -> control_pb2.ToWorker:
    return control_pb2.ToWorker(**body)  # type: ignore[arg-type]


WELCOME = order(welcome=control_pb2.Welcome(incarnation=1, probe_now=True))
LATER = order(welcome=control_pb2.Welcome(incarnation=2))
ASSIGNED = order(assignment=control_pb2.Assignment())
OBSERVES = order(assignment=control_pb2.Assignment(observer=True))
STANDBY = order(standby=control_pb2.Standby(reason="a settled swarm"))
LEASE = order(lease_grant=control_pb2.LeaseGrant())
COMMIT = order(step_committed=control_pb2.StepCommitted())
FINISH = order(finish=control_pb2.Finish(reason="done"))


@pytest.mark.parametrize(
    ("orders", "states"),
    [
        ([WELCOME, STANDBY, ASSIGNED, LEASE, COMMIT], "probing standby loading training training"),
        # An observer hears of commits too, and is a holder by the assignment that follows.
        ([WELCOME, OBSERVES, COMMIT, ASSIGNED, LEASE], "probing observing observing training training"),
        ([WELCOME, ASSIGNED, LEASE, LATER], "probing loading training joining"),
        ([WELCOME, ASSIGNED, LEASE, FINISH], "probing loading training leaving"),
    ],
)
def test_the_state_is_read_off_the_coordinators_orders(
    orders: list[control_pb2.ToWorker], states: str
) -> None:
    now, seen = Standing(), []
    for message in orders:
        now = presence.ordered(now, message)
        seen.append(now.state)
    assert " ".join(seen) == states


def test_a_broken_stream_changes_nothing() -> None:
    now = Standing("training", incarnation=2)
    assert presence.ordered(now, LATER) == now


def test_a_reason_is_said_and_bounded() -> None:
    assert presence.ordered(Standing(), STANDBY).reason == "a settled swarm"
    down = control_pb2.ToCoordinator(engine_down=control_pb2.EngineDown(reason="x" * 5000))
    now = presence.reported(Standing("training"), down)
    assert (now.state, len(now.reason)) == ("joining", presence.REASON_LIMIT_CHARACTERS)
    leaving = control_pb2.ToCoordinator(leaving=control_pb2.Leaving(reason="SIGTERM received"))
    assert presence.reported(now, leaving) == Standing("leaving", "SIGTERM received")


@pytest.mark.parametrize("form", Form)
def test_a_status_fits_its_limit_whatever_the_texts(form: Form) -> None:
    wide = "\N{SNOWMAN}" * presence.REASON_LIMIT_CHARACTERS
    status = presence.status(
        Standing("leaving", wide, 2**63), ALICE, bus_pb2.PRESENCE_LOST, 2**64 - 1, 0, 1e9
    )
    payload = payloads.encode(status, form)
    assert payloads.decode(Topic("job", Kind.STATUS, ALICE), payload) == status


def counted(incarnation: int, progress: int) -> control_pb2.Telemetry:
    sample = control_pb2.TelemetrySample(
        wall_time_s=1.7e9 + progress, progress=progress, forward_bytes=2**40, compute_s=1 / 3, wait_s=1e5 / 7
    )
    return control_pb2.Telemetry(worker_id=ALICE, incarnation=incarnation, samples=[sample])


@pytest.mark.parametrize("form", Form)
def test_a_batch_holds_the_newest_samples_that_fit(form: Form) -> None:
    payload = presence.batch([counted(1, n) for n in range(100)], form)
    read = payloads.decode(Topic("job", Kind.TELEMETRY, ALICE), payload)
    assert isinstance(read, control_pb2.Telemetry)
    progress = [sample.progress for sample in read.samples]
    assert progress == list(range(100 - len(progress), 100))
    assert len(progress) >= (10 if form is Form.PROTOBUF else 2)


def test_a_batch_is_of_one_life() -> None:
    payload = presence.batch([counted(1, 8), counted(2, 0), counted(2, 1)], Form.PROTOBUF)
    read = control_pb2.Telemetry.FromString(payload)
    assert (read.incarnation, [s.progress for s in read.samples]) == (2, [0, 1])


def test_where_the_bus_is_comes_with_the_job() -> None:
    found = bus_of(json.dumps({"bus": {"url": "mqtts://b:8883", "payload": "json"}}).encode())
    assert found is not None
    assert (str(found[0]), found[1]) == ("mqtts://b:8883", Form.JSON)


@pytest.mark.parametrize(
    "job",
    [b"{}", b'{"bus": {"url": null}}', b'{"bus": 3}', b"[]", b"\xff", b'{"bus": {"url": "mqtt://far"}}'],
)
def test_a_job_without_a_bus_that_can_be_used_has_none(job: bytes) -> None:
    assert bus_of(job) is None
