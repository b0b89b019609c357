"""Workers on a real broker, seen by a subscriber: what they do, how they go, and that nobody speaks for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import starlings_worker.bus
import starlings_worker.control_stream
import starlings_worker.engine_child
from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus import payloads
from starlings_protos.bus.payloads import Form, encode
from starlings_protos.bus.presence import Present, fold
from starlings_protos.bus.topics import Kind, Topic, all_of
from starlings_protos.identity import COORDINATOR
from starlings_protos.messages import Finish, ProbeReport, Standby, Telemetry
from starlings_worker.device_list import CPU
from starlings_worker.device_worker import DeviceWorker
from starlings_worker.membership import Membership
from starlings_worker.options import WorkerEvent, WorkerOptions
from support.broker import Broker, Client, broker, needs_mosquitto, new_identity
from support.fake_control import FakeControl

pytestmark = needs_mosquitto
TESTS = Path(__file__).resolve().parents[1]
ONLINE, OFFLINE, LOST = bus_pb2.PRESENCE_ONLINE, bus_pb2.PRESENCE_OFFLINE, bus_pb2.PRESENCE_LOST
JOB = "fake"


class Bench:
    """A coordinator that does what a test says, a broker, a subscriber, and one worker."""

    def __init__(self, directory: Path, control: FakeControl, at: Broker) -> None:
        self.directory, self.control, self.broker = directory, control, at
        self.member: Membership = control.join(directory)
        self.topic = Topic(JOB, Kind.STATUS, self.member.worker_id)
        self.events: list[WorkerEvent] = []
        self.task: asyncio.Task[None] | None = None
        self.process: asyncio.subprocess.Process | None = None
        control.job_json = json.dumps({"bus": {"url": at.url}}).encode()
        control.telemetry_interval_s = 0.1

    def start(self) -> None:
        """In this process."""
        options = WorkerOptions(directory=self.directory, on_event=self.events.append)
        self.worker = DeviceWorker(options, None, self.directory, CPU, 0, 1)
        self.task = asyncio.create_task(self.worker.run())

    async def spawn(self) -> None:
        """As a process."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "support.lone_worker",
            str(self.directory),
            stdout=asyncio.subprocess.DEVNULL,
        )

    async def until(self, condition: Callable[[], object], what: str, within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {within_s} s for {what}: {self.events}"
            if self.task is not None and self.task.done():
                await self.task
            await asyncio.sleep(0.01)

    async def seen_by(
        self, client: Client, presence: bus_pb2.Presence.ValueType, within_s: float = 20.0
    ) -> None:
        """Waits until a reader of the status topic comes to that conclusion."""
        await self.until(
            lambda: (known := self.known(client)) is not None and known.status.presence == presence,
            bus_pb2.Presence.Name(presence),
            within_s,
        )

    def statuses(self, client: Client) -> list[bus_pb2.BusStatus]:
        found = []
        for payload in client.of(str(self.topic)):
            message = payloads.decode(self.topic, payload)
            assert isinstance(message, bus_pb2.BusStatus)
            found.append(message)
        return found

    def known(self, client: Client) -> Present | None:
        known = None
        for status in self.statuses(client):
            known = fold(known, status, 0.0)
        return known

    def subscriber(self) -> Client:
        return self.broker.client(new_identity(self.control.authority), subscribe=(all_of(JOB),))

    async def end(self) -> None:
        if self.task is not None and not self.task.done():
            self.worker.abandon()
            await asyncio.gather(self.task, return_exceptions=True)
        if self.process is not None and self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            await self.process.wait()


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(starlings_worker.engine_child, "ENGINE_MODULE", "support.fake_engine")
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *inherited]))
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "fake.log"))
    monkeypatch.delenv("FAKE_ENGINE", raising=False)
    async with FakeControl() as control:
        with broker(tmp_path / "broker", JOB, authority=control.authority) as at:
            bench = Bench(tmp_path / "worker", control, at)
            try:
                yield bench
            finally:
                await bench.end()


async def test_a_worker_is_seen_from_its_welcome_to_its_goodbye(bench: Bench):
    with bench.subscriber() as watcher:
        bench.start()
        await bench.control.next(ProbeReport)
        await bench.control.say(Standby("a settled swarm"))
        await bench.until(
            lambda: any(s.state == "standby" for s in bench.statuses(watcher)), "the state of the worker"
        )
        telemetry = Topic(JOB, Kind.TELEMETRY, bench.member.worker_id)
        await bench.until(lambda: watcher.of(str(telemetry)), "telemetry")
        counters = payloads.decode(telemetry, watcher.of(str(telemetry))[0])
        assert isinstance(counters, control_pb2.Telemetry)
        assert counters.samples[0].forward_bytes == 7
        await bench.control.say(Finish(True, "all steps are trained"))
        await bench.seen_by(watcher, OFFLINE)
        assert bench.task is not None
        await bench.task
        seen = bench.statuses(watcher)
        assert len({s.session for s in seen}) == 1
        assert [s.sequence for s in seen] == sorted({s.sequence for s in seen})
        assert (seen[-1].device, seen[-1].reason) == ("a fake", "all steps are trained")
        # A connection of it lives no longer than it, and its will was not published.
        assert LOST not in {s.presence for s in seen}
        # The coordinator has heard none of the counters.
        assert not any(isinstance(m, Telemetry) for m in list(bench.control.inbox._queue))  # type: ignore[attr-defined]
        assert [e.kind for e in bench.events].count("bus") == 1
    with bench.subscriber() as late:
        await bench.seen_by(late, OFFLINE)
        assert all(m.retained for m in late.messages)


async def test_a_killed_worker_is_lost_and_a_new_life_is_online(bench: Bench):
    with bench.subscriber() as watcher:
        await bench.spawn()
        await bench.seen_by(watcher, ONLINE)
        assert bench.process is not None
        bench.process.kill()
        await bench.process.wait()
        await bench.seen_by(watcher, LOST)
        await bench.spawn()
        await bench.seen_by(watcher, ONLINE)
        bench.process.terminate()
        await bench.seen_by(watcher, OFFLINE)
        assert await asyncio.wait_for(bench.process.wait(), 20) == 0
        assert len({s.session for s in bench.statuses(watcher)}) == 2


@pytest.mark.slow
async def test_a_frozen_worker_is_lost_and_comes_back(bench: Bench):
    with bench.subscriber() as watcher:
        await bench.spawn()
        await bench.seen_by(watcher, ONLINE)
        assert bench.process is not None
        bench.process.send_signal(signal.SIGSTOP)
        await bench.seen_by(watcher, LOST, within_s=60)
        bench.process.send_signal(signal.SIGCONT)
        await bench.seen_by(watcher, ONLINE, within_s=60)


async def test_nobody_elses_word_stays_where_the_workers_should_be(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """A will of an earlier session that lands late, an empty payload, and nonsense."""
    monkeypatch.setattr(starlings_worker.bus, "REPAIR_EVERY_S", 0.2)
    me = bench.member.identity
    with bench.subscriber() as watcher, bench.broker.client(me, client_id="a copy") as copy:
        bench.start()
        await bench.seen_by(watcher, ONLINE)
        old_will = bus_pb2.BusStatus(worker_id=me.id, presence=LOST, session=77)
        for payload in (encode(old_will, Form.PROTOBUF), b"", b"\xff\xff"):
            before = len(watcher.of(str(bench.topic)))
            assert copy.publish(str(bench.topic), payload, retain=True) == 0
            await bench.until(
                lambda b=before: len(watcher.of(str(bench.topic))) > b + 1, "the worker's own word"
            )
            with bench.subscriber() as late:
                await bench.until(lambda c=late: c.of(str(bench.topic)), "what the broker keeps")
                kept = payloads.decode(bench.topic, late.of(str(bench.topic))[0])
                assert isinstance(kept, bus_pb2.BusStatus)
                assert kept.presence == ONLINE


async def test_a_second_connection_with_its_name_takes_the_bus_and_nothing_else(bench: Bench):
    with bench.subscriber() as watcher:
        bench.start()
        await bench.seen_by(watcher, ONLINE)
        with bench.broker.client(bench.member.identity, client_id=f"{JOB}-worker-{bench.member.worker_id}"):
            await bench.until(lambda: LOST in {s.presence for s in bench.statuses(watcher)}, "its will")
        await bench.until(lambda: len({s.session for s in bench.statuses(watcher)}) > 1, "a new session")
        await bench.seen_by(watcher, ONLINE)
        assert len(bench.control.hellos) == 1


async def test_a_hint_ends_a_long_pause_and_many_hints_only_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(starlings_worker.control_stream, "PAUSE_FIRST_S", 60.0)
    monkeypatch.setattr(starlings_worker.control_stream, "PAUSE_MOST_S", 60.0)
    monkeypatch.setattr(starlings_worker.control_stream, "HURRY_WITHIN_S", 0.05)
    coordinator = bench.control.authority.issue_identity(COORDINATOR, time.time())
    call = encode(bus_pb2.CommandHint(kind="call", reason="started again"), Form.JSON)
    with bench.subscriber() as watcher, bench.broker.client(coordinator) as speaker:
        bench.start()
        await bench.seen_by(watcher, ONLINE)
        for hellos in (1, 2):
            assert len(bench.control.hellos) == hellos
            bench.control.hang_up()
            await bench.until(
                lambda h=hellos: [e.kind for e in bench.events].count("reconnecting") == h, "the pause"
            )
            for _ in range(20):
                speaker.publish(str(Topic(JOB, Kind.COMMAND)), call)
            if hellos == 1:
                await bench.until(lambda: len(bench.control.hellos) == 2, "the early call")
        # What is said to everybody all the time moves nobody.
        await asyncio.sleep(0.5)
        assert len(bench.control.hellos) == 2


async def test_a_broker_that_dies_and_comes_back_is_no_business_of_the_control_stream(bench: Bench):
    with bench.subscriber() as watcher:
        bench.start()
        await bench.seen_by(watcher, ONLINE)
        (session,) = {s.session for s in bench.statuses(watcher)}
    bench.broker.stop(kill=True)
    await bench.until(
        lambda: [e.kind for e in bench.events].count("bus") == 2, "the news that the bus is away"
    )
    beats = len(bench.control.heartbeats)
    await bench.until(lambda: len(bench.control.heartbeats) > beats + 10, "heartbeats without a bus")
    bench.broker.start()
    with bench.subscriber() as watcher:
        await bench.until(
            lambda: (known := bench.known(watcher)) is not None and known.status.session != session,
            "its return",
        )
        await bench.seen_by(watcher, ONLINE)
    assert len(bench.control.hellos) == 1
    told = [e.text for e in bench.events if e.kind == "bus"]
    assert "connected" in told[0]
    assert "away" in told[1]
