"""The pictures of a job, drawn from recorded replies."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from starlings.output import as_dict
from starlings.views import figures, status
from starlings_protos import control_pb2

Recorded = Callable[[str], control_pb2.StatusReply]


def drawn(view: RenderableType, width: int = 120) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_matrix_shows_every_worker_under_the_stages_it_holds(recorded: Recorded) -> None:
    reply = recorded("training")
    rows = [
        line
        for line in drawn(status.plan_matrix(reply)).splitlines()
        if line.strip().startswith("w") and "worker" not in line
    ]
    assert len(rows) == 4
    assert [row.count("█████") for row in rows] == [3, 1, 1, 1]
    assert [row.count("·") for row in rows] == [0, 2, 2, 2]


def test_panel_names_job_phase_progress_and_events(recorded: Recorded) -> None:
    reply = recorded("training")
    history = status.History()
    assert len(history.add(reply)) == 4
    assert history.add(reply) == []
    text = drawn(status.status_panel(reply, history.losses, history.events))
    for expected in ("demo", "training", "120/300", "492 k/1.23 M", "4,096", "2.713", "step 40 begins anew"):
        assert expected in text


def test_panel_says_who_exchanges_and_who_goes_alone_and_why(recorded: Recorded) -> None:
    reply = recorded("training")
    assert "pairs of stage" not in drawn(status.status_panel(reply, [], []))
    first = reply.exchanges.add(
        stage=0, slot=12, slot_length_s=4.5, warmup=True, rounds_averaged=21, rounds_one_sided=1
    )
    first.replicas.add(worker_id="w1", averaged=21, alone_in_a_row=0)
    silent = first.replicas.add(worker_id="w2", averaged=20, alone=3, alone_in_a_row=2, suspect=True).last
    silent.result = control_pb2.SWAP_RESULT_SOLO
    silent.solo_reason = control_pb2.SOLO_REASON_SILENT
    silent.partner = "w1\x1b[2J"
    reply.exchanges.add(stage=1)
    text = drawn(status.status_panel(reply, [], []), width=160)
    assert "pairs of stage 0 slot 12, 4.5 s each (warm-up); 21 averaged, 1 one-sided; w2 alone 2x" in text
    assert "silent)" in text
    assert "w2 is suspect" in text
    assert "pairs of stage 1 no clock yet" in text
    (alone,) = [replica.last for replica in first.replicas if replica.HasField("last")]
    alone.detail, alone.partner = "its weights\x1b are not finite", "w3"
    assert status.alone_words(alone).startswith("w3: its weights")
    assert "\x1b" not in status.alone_words(alone)
    assert status.alone_words(control_pb2.RoundOutcome()) == ""


def test_history_appends_only_what_is_new(recorded: Recorded) -> None:
    history = status.History()
    history.add(recorded("training"))
    before = list(history.losses)
    later = recorded("training")
    del later.loss_curve[:]
    later.loss_curve.add(step=before[-1][0] + 1, loss=2.0)
    history.add(later)
    assert history.losses == [*before, (before[-1][0] + 1, 2.0)]


def test_history_goes_on_when_a_restarted_coordinator_counts_from_one() -> None:
    history = status.History()
    history.add(
        control_pb2.StatusReply(events=[control_pb2.Event(sequence=n, kind="join") for n in (1, 2, 3)])
    )
    again = control_pb2.StatusReply(events=[control_pb2.Event(sequence=1, kind="restarted")])
    assert [event.kind for event in history.add(again)] == ["restarted"]
    assert history.add(again) == []
    assert len(history.events) == 4


def test_history_notices_a_restart_after_which_as_much_was_said() -> None:
    history = status.History()
    history.add(control_pb2.StatusReply(events=[control_pb2.Event(sequence=1, kind="join", at_s=0.5)]))
    kinds = ("restarted", "rejoin")
    again = [control_pb2.Event(sequence=n, kind=kind, at_s=9.0) for n, kind in enumerate(kinds, 1)]
    assert [event.kind for event in history.add(control_pb2.StatusReply(events=again))] == list(kinds)
    assert history.add(control_pb2.StatusReply(events=again)) == []


def test_a_waiting_job_says_what_for(recorded: Recorded) -> None:
    reply = recorded("gathering")
    assert "needs 3.1 GB more for stages 4-5" in status.status_line(reply)
    text = drawn(status.status_panel(reply, [], []))
    assert "waiting for a worker: needs 3.1 GB more" in text
    assert "standby: the plan waits" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_any_terminal_width_draws(recorded: Recorded, width: int) -> None:
    reply = recorded("training")
    lines = drawn(status.status_panel(reply, [(0, 5.0)], list(reply.events)), width).splitlines()
    assert max(len(line) for line in lines) <= width


def test_an_empty_reply_draws() -> None:
    assert drawn(status.status_panel(control_pb2.StatusReply(), [], []))
    assert status.status_line(control_pb2.StatusReply())


def test_figures_read_well() -> None:
    assert [figures.count(v) for v in (7, 9999, 12_345, 1_234_567, 999_999)] == [
        "7",
        "9,999",
        "12.3 k",
        "1.23 M",
        "1 M",
    ]
    assert [figures.size(v) for v in (12, 1_536_000, 3.1e9)] == ["12 B", "1.54 MB", "3.1 GB"]
    assert [figures.duration(v) for v in (7.9, 750, 11100, -3)] == ["0:07", "12:30", "3:05:00", "0:00"]


def test_sparkline_scales_and_survives_anything() -> None:
    assert figures.sparkline([], 10) == ""
    assert figures.sparkline([math.nan, math.inf], 10) == ""
    assert figures.sparkline([3.0, 3.0], 10) == "▄▄"
    curve = figures.sparkline([float(100 - i) for i in range(1000)], 20)
    assert len(curve) == 20
    assert (curve[0], curve[-1]) == ("█", "▁")


@pytest.mark.parametrize(
    ("bus", "said"),
    [
        (None, "bus off ([bus] url in the job file turns it on)"),
        (
            control_pb2.BusHealth(url="mqtts://b:8883", connected=True, for_s=61),
            "bus mqtts://b:8883: connected for 1:01",
        ),
        (
            control_pb2.BusHealth(url="mqtts://b:8883", for_s=5, reason="Connection\x1b refused", dropped=7),
            "bus mqtts://b:8883: away for 0:05 (Connection refused); training goes on, 7 messages dropped",
        ),
    ],
    ids=["off", "connected", "away"],
)
def test_the_bus_is_shown_also_when_there_is_none(bus: control_pb2.BusHealth | None, said: str) -> None:
    reply = control_pb2.StatusReply(job="x", phase="training", bus=bus)
    (line,) = (line for line in drawn(status.header(reply, [])).splitlines() if "bus" in line)
    assert said in line
    assert (as_dict(reply)["bus"] is None) == (bus is None)
