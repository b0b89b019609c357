"""`starlings watch` against a real broker, as the owner and as a machine that has nothing but an observer's invite."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from starlings.main import app
from starlings_coordinator.own_identities import OwnIdentities
from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus.payloads import Form, encode
from starlings_protos.bus.topics import Kind, Topic
from starlings_protos.identity import COORDINATOR, OWNER, Identity
from support.broker import WITHIN_S, Broker, broker, free_port, needs_mosquitto, new_identity
from support.enrolment_server import enrolment_world
from support.prepared_job import write_prepared_job

pytestmark = needs_mosquitto
JOB = "test"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("broker"), JOB) as made:
        yield made


@pytest.fixture(scope="module")
def job(running: Broker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of this machine whose coordinator is not there: `watch` must do without."""
    extra = f'[bus]\nurl = "{running.url}"\n'
    directory = write_prepared_job(tmp_path_factory.mktemp("jobs") / "job", name=JOB, extra=extra)
    (directory / "ca").mkdir()
    (directory / "ca" / "ca.key").write_bytes(running.authority.key_pem)
    (directory / "ca" / "ca.pem").write_bytes(running.authority.certificate_pem)
    OwnIdentities(directory, JOB, time.time).get(OWNER)
    return directory


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without jobs and memberships."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("STARLINGS_INVITE", raising=False)
    return tmp_path


def watch(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["watch", *map(str, arguments)])
    return done.exit_code, done.output


def say(running: Broker, identity: Identity, kind: Kind, message: Any, *, retain: bool = True) -> None:
    with running.client(identity) as speaker:
        topic = Topic(JOB, kind, getattr(message, "worker_id", ""))
        assert 0 <= speaker.publish(str(topic), encode(message, Form.PROTOBUF), retain=retain) < 128


def online(identity: Identity, **fields: Any) -> bus_pb2.BusStatus:
    words = {"presence": bus_pb2.PRESENCE_ONLINE, "session": 1, "sequence": 1, "state": "training"}
    return bus_pb2.BusStatus(worker_id=identity.id, **(words | fields))


def plan(phase: str) -> bus_pb2.PlanNotice:
    return bus_pb2.PlanNotice(plan_version=4, phase=phase, step=7, steps_total=30, wall_time_s=time.time())


def test_the_owner_sees_once_what_the_bus_has(running: Broker, job: Path):
    here, gone = new_identity(running.authority), new_identity(running.authority)
    say(running, here, Kind.STATUS, online(here, device_class="rtx3060"))
    say(running, gone, Kind.STATUS, online(gone, presence=bus_pb2.PRESENCE_LOST))
    say(running, running.authority.issue_identity(COORDINATOR, time.time()), Kind.PLAN, plan("training"))
    code, told = watch(job, "--once", "--json")
    assert code == 0, told
    picture = json.loads(told)
    assert (picture["job"], picture["phase"], picture["step"], picture["plan_version"]) == (
        JOB,
        "training",
        7,
        4,
    )
    presences = {w["worker_id"]: w["presence"] for w in picture["workers"]}
    assert (presences[here.id], presences[gone.id]) == ("online", "lost")
    code, told = watch(job, "--once")
    assert code == 0, told
    for expected in ("rtx3060", here.id[:7], gone.id[:7], "lost", "7/30"):
        assert expected in told


def test_changes_come_one_by_one_until_the_job_has_ended(running: Broker, job: Path):
    worker, coordinator = (
        new_identity(running.authority),
        running.authority.issue_identity(COORDINATOR, time.time()),
    )
    say(running, coordinator, Kind.PLAN, plan("training"))
    command = [sys.executable, "-m", "starlings", "watch", str(job), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    try:

        def next_of(event: str, **fields: Any) -> dict[str, Any]:
            for line in process.stdout or ():
                change: dict[str, Any] = json.loads(line)
                if change["event"] == event and fields.items() <= change.items():
                    return change
            raise AssertionError(f"watch ended with {process.wait()} before {event}")

        assert next_of("plan")["phase"] == "training"
        say(running, worker, Kind.STATUS, online(worker))
        assert next_of("status", worker_id=worker.id)["presence"] == "online"
        samples = [control_pb2.TelemetrySample(wall_time_s=1e9 + 5 * n, compute_s=4.0 * n) for n in range(2)]
        say(
            running,
            worker,
            Kind.TELEMETRY,
            control_pb2.Telemetry(worker_id=worker.id, samples=samples),
            retain=False,
        )
        assert next_of("telemetry", worker_id=worker.id)["rates"]["compute"] == 0.8
        with running.client(worker) as speaker:
            speaker.publish(str(Topic(JOB, Kind.STATUS, worker.id)), b"", retain=True)
        assert next_of("status", worker_id=worker.id)["presence"] == "forgotten"
        say(running, coordinator, Kind.PLAN, plan("done"))
        assert next_of("plan", phase="done")
        assert process.wait(WITHIN_S) == 0
    finally:
        process.kill()
        process.wait()


async def test_an_observer_needs_the_invite_once_and_no_coordinator_after(elsewhere: Path):
    async with enrolment_world(elsewhere / "job", job=JOB) as world:
        with broker(elsewhere, JOB, authority=world.authority.ca) as running:
            world.authority.serve_at([f"127.0.0.1:{world.port}"], ["127.0.0.1:7700"], running.url)
            worker = new_identity(running.authority)
            say(running, worker, Kind.STATUS, online(worker))
            invite, wrong = str(world.invite(role="observer", uses=1)), str(world.invite())
            code, told = await asyncio.to_thread(watch, wrong, "--once", "--json")
            assert (code, "--role observer" in told) == (4, True), told
            code, told = await asyncio.to_thread(watch, invite, "--once", "--json")
            assert code == 0, told
            assert [w["worker_id"] for w in json.loads(told)["workers"]] == [worker.id]
            kept = elsewhere / "data" / "starlings" / "observers" / JOB
            identity = Identity.load(kept)
            assert identity.id.startswith("o")
            # The coordinator has gone, the invite is used up: the certificate is enough.
            world.authority.serve_at(["127.0.0.1:1"], ["127.0.0.1:1"])
            for again in ((invite,), (JOB,), ()):
                code, told = await asyncio.to_thread(watch, *again, "--once", "--json")
                assert (code, len(json.loads(told)["workers"])) == (0, 1), told
            assert Identity.load(kept) == identity


def test_what_is_wrong_is_said_with_the_fix_and_a_code(running: Broker, job: Path, elsewhere: Path):
    busless = write_prepared_job(elsewhere / "busless", name="busless")
    for arguments, expected, words in (
        ((), 2, "--role observer"),
        (("nobody",), 2, "neither owns"),
        ((busless,), 2, "bus config"),
        ((job, "--url", "http://x"), 2, "mqtts://"),
        ((job, "--url", f"mqtts://localhost:{free_port()}"), 3, "TCP failed"),
        ((job, "--url", "mqtts://nowhere.invalid:8883"), 3, "DNS failed"),
        (("starlings://broken",), 4, "invite"),
    ):
        code, told = watch(*arguments, "--once")
        assert (code, words in told) == (expected, True), (arguments, code, told)
    # A broker of another job: it is there, and TLS says no.
    with broker(elsewhere, JOB) as foreign:
        code, told = watch(job, "--url", foreign.url, "--once")
        assert (code, "does not serve us" in told) == (3, True), told
    assert "coordinator" not in told
