"""What is drawn of a job without a barrier: in `status`, in one line, on the bus, and for machines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from starlings.output import as_dict
from starlings.views import bus, status, streaming
from starlings.views.bus_json import picture_record
from starlings.views.bus_picture import BusPicture
from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus.payloads import Form, encode
from starlings_protos.bus.topics import Kind, Topic

Recorded = Callable[[str], control_pb2.StatusReply]


def drawn(view: RenderableType, width: int = 170) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


@pytest.fixture
def reply(recorded: Recorded) -> control_pb2.StatusReply:
    """Of four workers two have stepped: w1 in time, w2 late at times."""
    made = recorded("training")
    made.samples_trained, made.samples_repeated, made.samples_unmerged = 12_345, 8, 16
    first, second = made.workers[:2]
    first.inner_steps, first.staleness, first.staleness_most = 1_200, 0.26, 3
    second.inner_steps, second.staleness, second.staleness_most, second.gradients_stale = 310, 2.5, 11, 7
    for number in range(2):
        stage = made.exchanges.add(stage=number, slot=9, slot_length_s=4.0, rounds_averaged=20)
        stage.replicas.add(worker_id=first.worker_id, averaged=20, alone=1)
        stage.replicas.add(worker_id=second.worker_id, averaged=2, alone=9)
    return made


def test_each_worker_has_its_steps_their_age_and_its_meetings(reply: control_pb2.StatusReply) -> None:
    text = drawn(status.plan_matrix(reply))
    rows = text.splitlines()
    assert all(name in text for name in ("steps", "stale", "pairs"))
    row = {
        worker.worker_id: line for line in rows for worker in reply.workers if worker.worker_id[:7] in line
    }
    first, second = (row[worker.worker_id] for worker in reply.workers[:2])
    assert "1,200" in first
    assert "0.3, most 3" in first
    assert "40 of 42" in first
    assert "skipped" not in first
    assert "2.5, most 11, 7 skipped" in second
    assert "4 of 22" in second
    assert not any(word in row[reply.workers[2].worker_id] for word in ("most", " of "))


def test_a_round_that_averaged_a_part_or_went_without_somebody_says_so(
    reply: control_pb2.StatusReply,
) -> None:
    stage = reply.exchanges[0]
    for replica in stage.replicas:
        replica.last.slot, replica.last.fraction = 8, 1.0
        replica.last.result = control_pb2.SWAP_RESULT_COMMITTED
    assert " %" not in drawn(status.exchange_lines(reply.exchanges))
    last = stage.replicas[0].last
    last.fraction = 0.9996
    last.dropped.add(worker_id="w3", reason="its contribution did not come in time")
    text = drawn(status.exchange_lines(reply.exchanges))
    # Rounded down: what lacks something is never whole.
    assert "slot 8 averaged 99.9 %" in text
    assert "slot 8 went without w3 (its contribution did not come in time)" in text
    # An older round is not the newest.
    stage.replicas[1].last.slot = 9
    assert " %" not in drawn(status.exchange_lines(reply.exchanges))
    assert (
        stage.replicas[0].last.fraction == as_dict(reply)["exchanges"][0]["replicas"][0]["last"]["fraction"]
    )


def test_what_is_trained_twice_or_lost_is_said(reply: control_pb2.StatusReply) -> None:
    said = "samples 12.3 k trained; 8 more than once, at most; 16 gone with lost replicas"
    assert said in drawn(status.status_panel(reply, [], []))
    # Also that there is nothing.
    reply.samples_repeated = reply.samples_unmerged = 0
    assert "0 more than once, at most; 0 gone with" in drawn(status.status_panel(reply, [], []))


def test_the_newest_evaluation_on_the_way_is_shown(reply: control_pb2.StatusReply) -> None:
    assert "held-out" not in drawn(status.status_panel(reply, [], []))
    reply.evaluations.add(step=10, loss=5.5)
    reply.evaluations.add(step=40, loss=3.25, average_loss=3.125, has_average=True)
    text = drawn(status.status_panel(reply, [], []))
    assert (
        "held-out 3.250 with one replica's weights at step 40, 3.125 with those of the last average" in text
    )
    reply.evaluations[-1].has_average = False
    assert "average" not in drawn(streaming.evaluation_line(reply) or "")
    # What was evaluated at the end counts from then on.
    reply.has_validation_loss = True
    assert "held-out" not in drawn(status.status_panel(reply, [], []))


def test_a_line_of_a_log_has_the_mean_age(reply: control_pb2.StatusReply) -> None:
    assert status.status_line(reply).endswith(" staleness 1.4 (7 skipped)")
    reply.workers[1].gradients_stale = 0
    assert status.status_line(reply).endswith(" staleness 1.4")


def test_a_job_with_a_barrier_shows_none_of_it(recorded: Recorded) -> None:
    plain = recorded("training")
    assert not streaming.streams(plain)
    text = drawn(status.status_panel(plain, [], []))
    assert not any(word in text for word in ("stale", "pairs", "samples"))
    assert "staleness" not in status.status_line(plain)


def test_machines_get_all_of_it(reply: control_pb2.StatusReply) -> None:
    record = json.loads(json.dumps(as_dict(reply)))
    assert (record["samples_repeated"], record["samples_unmerged"]) == (8, 16)
    second = record["workers"][1]
    found = {key: second[key] for key in ("inner_steps", "staleness", "staleness_most", "gradients_stale")}
    assert found == {"inner_steps": 310, "staleness": 2.5, "staleness_most": 11, "gradients_stale": 7}
    replicas = record["exchanges"][0]["replicas"]
    assert [(r["averaged"], r["alone"]) for r in replicas] == [(20, 1), (2, 9)]


@pytest.mark.parametrize("width", [60, 100])
def test_narrow_terminals_draw_it(reply: control_pb2.StatusReply, width: int) -> None:
    lines = drawn(status.status_panel(reply, [], []), width).splitlines()
    assert max(map(len, lines)) <= width


def heard(*samples: control_pb2.TelemetrySample) -> BusPicture:
    picture, worker = BusPicture("flock"), "w" + "1" * 16
    message = control_pb2.Telemetry(worker_id=worker, samples=samples)
    picture.hear(str(Topic("flock", Kind.TELEMETRY, worker)), encode(message, Form.PROTOBUF), 1.8e9)
    online = bus_pb2.BusStatus(worker_id=worker, presence=bus_pb2.PRESENCE_ONLINE, session=1, sequence=1)
    picture.hear(str(Topic("flock", Kind.STATUS, worker)), encode(online, Form.PROTOBUF), 1.8e9)
    return picture


def test_the_bus_tells_ages_too() -> None:
    picture = heard(
        control_pb2.TelemetrySample(wall_time_s=1.8e9, inner_steps=1),
        control_pb2.TelemetrySample(
            wall_time_s=1.8e9 + 5, inner_steps=50, staleness=1.5, staleness_most=4, gradients_stale=2
        ),
    )
    text = drawn(bus.picture_panel(picture, 1.8e9))
    assert "50" in text
    assert "1.5, most 4, 2 skipped" in text
    (worker,) = picture_record(picture)["workers"]
    assert worker["ages"] == {"inner_steps": 50, "staleness": 1.5, "staleness_most": 4, "gradients_stale": 2}
    plain = heard(control_pb2.TelemetrySample(wall_time_s=1.8e9, compute_s=1.0))
    assert "stale" not in drawn(bus.picture_panel(plain, 1.8e9))
    assert picture_record(plain)["workers"][0]["ages"] is None


def test_a_suspect_and_a_straggler_are_told_apart(reply: control_pb2.StatusReply) -> None:
    first, second = reply.workers[:2]
    first.state = second.state = "training"
    first.suspect, first.reason = True, "nothing was heard of it for 5 s"
    second.pace, second.reason = "red", "2.4x slower than planned: its device is too hot"
    text = drawn(status.plan_matrix(reply), 400)
    assert "suspect: nothing was heard of it for 5 s" in text
    assert "training: 2.4x slower than planned: its device is too hot" in text
    assert (status.state_text(first).style, status.state_text(second).style) == ("red", "red")
    second.pace = "yellow"
    assert status.state_text(second).style == "yellow"
