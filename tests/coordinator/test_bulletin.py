"""The coordinator on a real broker, and without one: a whole job each time; the worker's part is scripted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from starlings_protos import bus_pb2, control_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.bus.payloads import decode
from starlings_protos.bus.topics import all_of, parse
from starlings_protos.identity import OWNER, Role
from starlings_protos.invite import parse_invite
from starlings_worker.enrol import enrol
from support.broker import Broker, Client, broker, free_port, needs_mosquitto
from support.coordinator_harness import ScriptedWorker, childless, coordinator, until
from support.prepared_job import STEPS, write_prepared_job


def job_on(tmp_path: Path, url: str, authority: CertificateAuthority, payload: str) -> Path:
    extra = f'[bus]\nurl = "{url}"\npayload = "{payload}"\n'
    directory = write_prepared_job(tmp_path / "job", extra=extra)
    (directory / "ca").mkdir()
    (directory / "ca" / "ca.key").write_bytes(authority.key_pem)
    (directory / "ca" / "ca.pem").write_bytes(authority.certificate_pem)
    return directory


def heard(listener: Client) -> list[tuple[str, object, bool]]:
    """Kind, message (None: forgotten), whether it had been retained."""
    found = []
    for message in list(listener.messages):
        topic = parse(message.topic)
        assert topic is not None
        content = decode(topic, message.payload) if message.payload else None
        found.append((topic.kind.value, content, message.retained))
    return found


def of(listener: Client, cls: type) -> list[object]:
    return [content for _, content, _ in heard(listener) if isinstance(content, cls)]


def owner_on(at: Broker, name: str = "first") -> Client:
    """Two of one client id would end each other."""
    owner = at.authority.issue_identity(OWNER, time.time())
    return at.client(owner, client_id=name, subscribe=(all_of("test"),))


@needs_mosquitto
async def test_a_job_on_the_bus_from_beginning_to_end(tmp_path: Path) -> None:
    with broker(tmp_path / "broker") as at, owner_on(at) as listener:
        directory = job_on(tmp_path, at.url, at.authority, "json")
        async with coordinator(directory) as running, ScriptedWorker(running) as worker:
            await until(lambda: of(listener, bus_pb2.CommandHint), "the hint that it has started")
            await until(lambda: running.of("announce"), "the word that the bus is there")
            stub, channel = running.owner()
            async with channel:
                reply = await stub.Status(control_pb2.StatusRequest())
            assert (reply.bus.url, reply.bus.connected, reply.bus.reason) == (at.url, True, "")
            identity = worker.identity
            with at.client(identity) as own:
                status = f"starlings/v1/test/worker/{identity.id}/status"
                mine = bus_pb2.BusStatus(worker_id=identity.id, presence=bus_pb2.PRESENCE_ONLINE, session=1)
                assert own.publish(status, mine.SerializeToString(), retain=True) == 0
            worker.hold_at_step = 2
            worker.begin()
            await until(lambda: worker.version == 2, "step 2")
            await until(
                lambda: any(p.phase == "training" for p in of(listener, bus_pb2.PlanNotice)), "a plan"
            )
            with owner_on(at, "late") as late:
                await until(lambda: len(late.messages) >= 2, "what is retained")
                kept = [content for _, content, retained in heard(late) if retained]
                (plan,) = [c for c in kept if isinstance(c, bus_pb2.PlanNotice)]
                assert [h.worker_id for h in plan.holdings] == [identity.id]
                assert mine in kept
                await worker.go_on()
                assert running.task is not None
                assert await asyncio.wait_for(running.task, 60) == 0
                await until(lambda: ("status", None, False) in heard(late), "that the worker is forgotten")
        (hint,) = of(listener, bus_pb2.CommandHint)
        assert hint.kind == "call"
        plans, notices = of(listener, bus_pb2.PlanNotice), of(listener, bus_pb2.EventNotice)
        assert plans[-1].phase == notices[-1].phase == "done"
        assert [point.step for notice in notices for point in notice.losses] == list(range(STEPS))
        sequence = [event.sequence for notice in notices for event in notice.events]
        assert sequence == list(range(1, len(sequence) + 1))
        assert (notices[-1].step, notices[-1].tokens) == (STEPS, notices[-1].tokens_total)
        lines = [told["text"] for told in running.of("announce") if told["kind"] == "bus"]
        assert lines == [f"The bus at {at.url} is connected."]
        with owner_on(at, "late") as later:
            await until(lambda: later.messages, "what is left")
            assert [kind for kind, _, _ in heard(later)] == ["plan"]


async def test_without_its_broker_a_job_trains_and_says_so_once(tmp_path: Path) -> None:
    authority = CertificateAuthority.create("test", time.time())
    url = f"mqtts://localhost:{free_port()}"
    async with (
        coordinator(job_on(tmp_path, url, authority, "protobuf")) as running,
        ScriptedWorker(running) as worker,
    ):
        await until(lambda: running.of("announce"), "the word that there is no broker")
        stub, channel = running.owner()
        async with channel:
            reply = await stub.Status(control_pb2.StatusRequest())
        assert not reply.bus.connected
        assert "refused" in reply.bus.reason.lower()
        worker.begin()
        assert running.task is not None
        assert await asyncio.wait_for(running.task, 60) == 0
    lines = [told["text"] for told in running.of("announce") if told["kind"] == "bus"]
    assert len(lines) == 1
    assert lines[0].startswith(f"The bus at {url} is away (")


async def test_an_observer_is_shut_out_and_has_nothing_to_be_forgotten(tmp_path: Path) -> None:
    authority = CertificateAuthority.create("test", time.time())
    url = f"mqtts://localhost:{free_port()}"
    async with childless(job_on(tmp_path, url, authority, "protobuf")) as running:
        stub, channel = running.owner()
        async with channel:
            made = await stub.CreateInvite(control_pb2.CreateInviteRequest(role="observer"))
            enrolled = await enrol(parse_invite(made.invite), tmp_path / "observer", role=Role.OBSERVER)
            request = control_pb2.RevokeInviteRequest(token_id=made.token_id, workers=True)
            reply = await stub.RevokeInvite(request)
        assert list(reply.worker_ids) == [enrolled.membership.worker_id]
