"""The picture of a swarm as the bus tells it: what is folded, what is drawn."""

from __future__ import annotations

import io
import json
import re
from typing import Any

from rich.console import Console, RenderableType

from starlings.views.bus import picture_line, picture_panel
from starlings.views.bus_json import change_record, picture_record
from starlings.views.bus_picture import BusPicture, Change, Rates
from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus.payloads import Form, encode
from starlings_protos.bus.topics import Kind, Topic

NOW = 1_800_000_000.0
JOB = "flock"
FIRST, SECOND = "w" + "1" * 16, "w" + "2" * 16


def drawn(view: RenderableType, width: int = 120) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def said(picture: BusPicture, kind: Kind, message: Any, form: Form = Form.PROTOBUF) -> Change | None:
    return picture.hear(str(Topic(JOB, kind, getattr(message, "worker_id", ""))), encode(message, form), NOW)


def status(worker: str, presence: bus_pb2.Presence = bus_pb2.PRESENCE_ONLINE, **fields) -> bus_pb2.BusStatus:
    return bus_pb2.BusStatus(
        worker_id=worker, presence=presence, **({"session": 1, "sequence": 1, "state": "training"} | fields)
    )


def telemetry(worker: str, *samples: tuple[float, int, float, float]) -> control_pb2.Telemetry:
    return control_pb2.Telemetry(
        worker_id=worker,
        samples=[
            control_pb2.TelemetrySample(
                wall_time_s=NOW + at, forward_bytes=sent, compute_s=compute, wait_s=wait
            )
            for at, sent, compute, wait in samples
        ],
    )


def notice(*sequences: int, step: int = 7, losses: tuple[tuple[int, float], ...] = ()) -> bus_pb2.EventNotice:
    return bus_pb2.EventNotice(
        events=[control_pb2.Event(sequence=n, at_s=n, kind="join", text=f"event {n}") for n in sequences],
        losses=[control_pb2.LossPoint(step=s, loss=loss) for s, loss in losses],
        phase="training",
        step=step,
        steps_total=30,
        tokens=1000,
        tokens_total=4000,
        tokens_per_second=123.0,
        wall_time_s=NOW,
    )


def whole() -> BusPicture:
    picture = BusPicture(JOB)
    said(picture, Kind.STATUS, status(FIRST, device_class="rtx3060", wall_time_s=NOW))
    said(picture, Kind.STATUS, status(SECOND, state="standby", reason="no plan yet", wall_time_s=NOW - 90))
    said(picture, Kind.TELEMETRY, telemetry(FIRST, (0, 0, 0, 0), (5, 5_000_000, 4.0, 0.5)))
    plan = bus_pb2.PlanNotice(plan_version=3, phase="training", wall_time_s=NOW - 1)
    plan.holdings.add(worker_id=FIRST).span.last_stage = 2
    said(picture, Kind.PLAN, plan)
    said(picture, Kind.EVENT, notice(1, 2, losses=((5, 4.0), (6, 3.25))))
    return picture


def test_everything_that_was_heard_is_in_the_picture():
    picture = whole()
    text = drawn(picture_panel(picture, NOW))
    for expected in (
        "flock",
        "training",
        "7/30",
        "1,000/4,000",
        "123",
        "3.250",
        "rtx3060",
        "0-2",
        "80%",
        "10%",
        "1 MB",
        "1:30",
        "no plan yet",
        "event 2",
    ):
        assert expected in text, (expected, text)
    assert picture_line(picture) == "training step 7/30 tokens 1,000/4,000 at 123/s loss 3.250 (2 online)"
    assert picture_line(BusPicture(JOB)) == "nothing heard of the coordinator (no workers)"
    assert "nothing comes" in drawn(picture_panel(BusPicture(JOB), NOW, "nothing comes"))


def test_both_forms_of_a_payload_say_the_same():
    first, second = BusPicture(JOB), BusPicture(JOB)
    for picture, form in ((first, Form.PROTOBUF), (second, Form.JSON)):
        said(picture, Kind.STATUS, status(FIRST, wall_time_s=NOW), form)
        said(picture, Kind.EVENT, notice(1, losses=((5, 4.0),)), form)
    assert drawn(picture_panel(first, NOW)) == drawn(picture_panel(second, NOW))


def test_the_lost_come_first_and_the_table_is_bounded():
    picture = BusPicture(JOB)
    for number in range(100):
        said(picture, Kind.STATUS, status(f"w{number:016x}"))
    said(picture, Kind.STATUS, status("w" + "f" * 16))
    will = status("w" + "f" * 16, bus_pb2.PRESENCE_LOST, sequence=0)
    assert said(picture, Kind.STATUS, will) is not None
    lines = drawn(picture_panel(picture, NOW)).splitlines()
    rows = [line for line in lines if re.match(r"│\s+w[0-9a-f]{6} ", line)]
    assert len(rows) == 40
    assert "wffffff" in rows[0]
    assert "lost" in rows[0]
    assert any("and 61 more; in all 1 lost, 100 online" in line for line in lines)


def test_a_stale_will_and_a_repeated_word_change_nothing():
    picture = BusPicture(JOB)
    said(picture, Kind.STATUS, status(FIRST, session=1))
    assert said(picture, Kind.STATUS, status(FIRST, session=2)) is not None
    assert said(picture, Kind.STATUS, status(FIRST, bus_pb2.PRESENCE_LOST, session=1, sequence=0)) is None
    assert said(picture, Kind.STATUS, status(FIRST, session=2)) is None
    assert picture.counts() == {"online": 1}


def test_a_cleared_status_forgets_the_worker():
    picture = whole()
    topic = str(Topic(JOB, Kind.STATUS, FIRST))
    change = picture.hear(topic, b"", NOW)
    assert (change.kind, change.worker_id, change.message) == (Kind.STATUS, FIRST, None)
    assert picture.hear(topic, b"", NOW) is None
    assert set(picture.members) == {SECOND}


def test_rates_follow_the_last_samples_and_begin_anew_with_the_engine():
    picture = BusPicture(JOB)
    member = lambda: picture.members[FIRST]  # noqa: E731
    said(picture, Kind.TELEMETRY, telemetry(FIRST, (0, 0, 0.0, 0.0)))
    assert member().rates is None
    said(
        picture,
        Kind.TELEMETRY,
        telemetry(FIRST, (5, 100, 5.0, 0.0), (10, 100, 5.0, 5.0), (20, 1100, 10.0, 10.0)),
    )
    assert member().rates == Rates(100.0, 0.5, 0.5)
    said(picture, Kind.TELEMETRY, telemetry(FIRST, (25, 50, 0.5, 0.0)))
    assert member().rates is None
    said(picture, Kind.TELEMETRY, telemetry(FIRST, (30, 550, 3.0, 1.0)))
    assert member().rates == Rates(100.0, 0.5, 0.2)
    # Two samples of one moment, or a clock that went back, give no rate and no failure.
    said(picture, Kind.TELEMETRY, telemetry(FIRST, *[(30, 550, 3.0, 1.0)] * 20))
    assert member().rates is None


def test_events_once_each_and_points_of_repeated_steps_replaced():
    picture = BusPicture(JOB)
    said(picture, Kind.EVENT, notice(1, 2, 3, losses=((1, 5.0), (2, 4.0), (3, 3.0))))
    said(picture, Kind.EVENT, notice(2, 3, 4, losses=((2, 4.5),)))
    assert [e.sequence for e in picture.events] == [1, 2, 3, 4]
    assert [(p.step, p.loss) for p in picture.losses] == [(1, 5.0), (2, 4.5)]
    said(picture, Kind.EVENT, notice(1, 2))
    assert [e.sequence for e in picture.events] == [1, 2, 3, 4, 1, 2], "a coordinator that was started again"


def test_what_is_none_of_ours_is_dropped_and_counted():
    picture = whole()
    before = drawn(picture_panel(picture, NOW))
    observer = "starlings/v1/flock/worker/o1111111111111111/status"
    for topic in (
        observer,
        "starlings/v1/other/plan",
        "starlings/v1/flock/worker/w1/status",
        "x",
        "starlings/v1/flock/weather",
    ):
        assert picture.hear(topic, encode(status(FIRST, session=9), Form.PROTOBUF), NOW) is None
    assert drawn(picture_panel(picture, NOW)) == before
    assert picture.malformed == 0
    for payload in (b"\xff" * 50, b"{nonsense", bytes(10_000), encode(status(SECOND), Form.PROTOBUF)):
        assert picture.hear(str(Topic(JOB, Kind.STATUS, FIRST)), payload, NOW) is None
    assert picture.malformed == 4
    assert "4 messages could not be read" in drawn(picture_panel(picture, NOW))


def test_what_others_wrote_cannot_move_the_cursor():
    picture = BusPicture(JOB)
    said(
        picture,
        Kind.STATUS,
        status(FIRST, state="\x1b[2Jgone", reason="\x07" + "x" * 4000, device="\x1b]0;t\x07"),
    )
    loud = notice(1)
    loud.events[0].text = "\x1b[31mred"
    said(picture, Kind.EVENT, loud)
    text = drawn(picture_panel(picture, NOW))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "red" in text


def test_machines_get_each_change_and_the_whole():
    picture = whole()
    change = said(picture, Kind.STATUS, status(FIRST, bus_pb2.PRESENCE_OFFLINE, sequence=2))
    record = change_record(change, picture)
    assert (record["event"], record["worker_id"], record["presence"]) == ("status", FIRST, "offline")
    change = said(picture, Kind.TELEMETRY, telemetry(FIRST, (10, 10_000_000, 8.0, 1.0)))
    assert change_record(change, picture)["rates"] == {"sent_bytes_per_s": 1e6, "compute": 0.8, "wait": 0.1}
    change = said(picture, Kind.EVENT, notice(3))
    assert change_record(change, picture)["events"][0]["text"] == "event 3"
    record = picture_record(picture)
    assert json.loads(json.dumps(record)) == record
    assert (record["phase"], record["step"], record["loss"], record["plan_version"]) == (
        "training",
        7,
        3.25,
        3,
    )
    assert [(w["worker_id"], w["presence"], w["stages"]) for w in record["workers"]] == [
        (FIRST, "offline", "0-2"),
        (SECOND, "online", None),
    ]
    assert picture_record(BusPicture(JOB))["workers"] == []
