"""What a supervisor reports of its own accord: pace and order."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable

import pytest

import starlings_worker.reports
from starlings_protos import control_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.identity import COORDINATOR, Identity
from starlings_worker.bus import WorkerBus
from starlings_worker.meters import Meters
from starlings_worker.reports import Reports, begins_anew, counters_due_s
from support.broker import free_port, new_identity


@pytest.mark.parametrize(
    ("age_s", "heartbeat_s", "telemetry_s", "due_s"),
    [(0, 2, 5, 2), (30, 2, 5, 3), (1000, 2, 5, 5), (0, 40, 5, 5), (1000, 2, 20, 20)],
)
def test_a_short_run_is_seen_and_a_long_one_is_cheap(
    age_s: float, heartbeat_s: float, telemetry_s: float, due_s: float
) -> None:
    assert counters_due_s(age_s, heartbeat_s, telemetry_s) == due_s


def counted(incarnation: int, wait_s: float) -> control_pb2.Telemetry:
    return control_pb2.Telemetry(
        incarnation=incarnation, samples=[control_pb2.TelemetrySample(wait_s=wait_s)]
    )


@pytest.mark.parametrize(
    ("known", "now", "anew"),
    [((1, 0), (1, 0), False), ((1, 0), (2, 0), True), ((1, 0), (1, 0.5), True), ((1, 0.5), (1, 9), False)],
)
def test_a_new_engine_and_the_beginning_of_training_are_news(
    known: tuple[int, float], now: tuple[int, float], anew: bool
) -> None:
    assert begins_anew(counted(*known), counted(*now)) == anew


def test_counters_are_those_of_the_meters() -> None:
    meters = Meters()
    for number, kind in enumerate(("forward", "backward", "exchange", "state", "control"), 1):
        meters.sent(kind, number)
    for number, kind in enumerate(("compute", "serialise", "send", "wait"), 1):
        meters.spent(kind, number / 2)
    sample = meters.sample(1e9, 3, 4)
    assert sample.bytes_sent() == meters.bytes_sent()
    assert sample.seconds() == meters.seconds()
    assert (sample.wall_time_s, sample.progress, sample.version) == (1e9, 3, 4)
    assert sample.forward_bytes == 1
    assert sample.wait_s == 2.0


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_heartbeats_and_counters_are_the_newest_and_go_on_when_a_stream_is_down() -> None:
    sent: list[control_pb2.ToCoordinator] = []
    up = False

    def send(message: control_pb2.ToCoordinator) -> bool:
        if up:
            sent.append(message)
        return up

    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    def of(kind: str) -> list[control_pb2.ToCoordinator]:
        return [m for m in sent if m.WhichOneof("body") == kind]

    nobody = Identity(COORDINATOR, b"", b"", b"")
    bus = WorkerBus(lambda: nobody, lambda: "job", print, lambda: None)
    reports = Reports(send, look, bus, random.Random(1))
    running = asyncio.create_task(reports.run())
    try:
        assert not reports.heard(control_pb2.ToCoordinator(ready=control_pb2.Ready()))
        reports.welcomed(control_pb2.Welcome(heartbeat_interval_s=0.05, telemetry_interval_s=0.1))
        assert reports.heard(control_pb2.ToCoordinator(heartbeat=control_pb2.Heartbeat(progress=3)))
        for progress in (3, 4):
            counters = control_pb2.Telemetry(samples=[control_pb2.TelemetrySample(progress=progress)])
            assert reports.heard(control_pb2.ToCoordinator(telemetry=counters))
        up = True
        await until(lambda: len(of("heartbeat")) > 3 and len(of("telemetry")) > 1)
        assert of("heartbeat")[-1].heartbeat.progress == 3
        assert of("telemetry")[-1].telemetry.samples[0].progress == 4
        assert looks > 3
        # A coordinator that wants none gets none.
        reports.welcomed(control_pb2.Welcome(heartbeat_interval_s=0.05))
        before, beats = len(of("telemetry")), len(of("heartbeat"))
        await until(lambda: len(of("heartbeat")) > beats + 3)
        assert len(of("telemetry")) == before
    finally:
        running.cancel()


async def test_while_the_broker_is_away_the_coordinator_gets_a_summary_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starlings_worker.reports, "SUMMARY_EVERY_S", 1.0)
    authority = CertificateAuthority.create("job", time.time())
    me = new_identity(authority)
    lines: list[str] = []
    sent: list[float] = []

    def send(message: control_pb2.ToCoordinator) -> bool:
        if message.WhichOneof("body") == "telemetry":
            sent.append(time.monotonic())
        return True

    bus = WorkerBus(lambda: me, lambda: "job", lines.append, lambda: None)
    bus.open(json.dumps({"bus": {"url": f"mqtts://localhost:{free_port()}"}}).encode())
    reports = Reports(send, lambda: None, bus, random.Random(1))
    reports.welcomed(control_pb2.Welcome(heartbeat_interval_s=0.01, telemetry_interval_s=0.01))
    counters = control_pb2.Telemetry(worker_id=me.id, samples=[control_pb2.TelemetrySample(progress=3)])
    reports.heard(control_pb2.ToCoordinator(telemetry=counters))
    running = asyncio.create_task(reports.run())
    try:
        await until(lambda: len(sent) >= 3)
        assert all(after - before >= 0.9 for before, after in itertools.pairwise(sent))
        # However often it is tried, people hear of it once.
        assert len(lines) == 1
        assert "away" in lines[0]
    finally:
        running.cancel()
        bus.close()
