"""`starlings workers` and `why`: what is drawn, and what machines get."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from starlings.views.workers import why_view, worker_records, workers_view
from starlings_protos import control_pb2

Recorded = Callable[[str], control_pb2.StatusReply]


def drawn(view: RenderableType, width: int = 200) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


@pytest.fixture
def reply(recorded: Recorded) -> control_pb2.StatusReply:
    made = recorded("training")
    slow, relayed, away = made.workers[:3]
    slow.pace, slow.slowdown, slow.cause = "red", 2.4, "heat"
    slow.capacity_tokens_per_second, slow.silent_s = 1234.0, 3.0
    slow.state = "training"
    relayed.reach, relayed.uplink_bytes_per_s = "relayed", 1.5e6
    relayed.relays.append("relay")
    away.ClearField("span")
    away.state, away.reason = "evicted", "sent away by the owner: \x1b[2Jtoo loud"
    return made


def test_each_worker_has_a_row_that_says_what_is_wrong_with_it(reply: control_pb2.StatusReply) -> None:
    text = drawn(workers_view(reply, 0.0))
    rows = {w.worker_id: next(r for r in text.splitlines() if w.worker_id in r) for w in reply.workers}
    slow, relayed, away = (rows[w.worker_id] for w in reply.workers[:3])
    assert "training red heat 2.4x" in slow
    assert "1,234" in slow
    assert "3 s" in slow
    assert "relayed by relay" in relayed
    assert "1.5 MB/s" in relayed
    assert "evicted" in away
    assert "\x1b" not in text
    assert "paused" not in text


def test_a_pause_is_said_first(reply: control_pb2.StatusReply) -> None:
    reply.pause.reason, reply.pause.since_s, reply.pause.settling = "lunch", 1000.0, True
    first = drawn(workers_view(reply, 1090.0)).splitlines()[0]
    assert "paused for 1:30: lunch; what was under way is being finished" in first


def test_machines_get_stages_and_everything_else(reply: control_pb2.StatusReply) -> None:
    records = worker_records(reply)
    assert [r["worker_id"] for r in records] == [w.worker_id for w in reply.workers]
    assert records[2]["stages"] == []
    span = reply.workers[0].span
    assert records[0]["stages"] == list(range(span.first_stage, span.last_stage + 1))
    assert records[0]["capacity_tokens_per_second"] == 1234.0


def test_reasons_of_one_topic_become_one_paragraph_and_stay_text() -> None:
    reply = control_pb2.WhyReply(worker_id="w0", state="standby")
    for topic, text in (
        ("state", "Idle."),
        ("waiting", "For a plan."),
        ("waiting", "[bold]For long[/]."),
        ("do", "Wait."),
    ):
        reply.because.add(topic=topic, text=text)
    lines = drawn(why_view(None, reply)).splitlines()
    assert lines[0].startswith("w0 (standby)")
    assert "For a plan. [bold]For long[/]." in lines[2]
    assert lines[3].startswith("what helps")
