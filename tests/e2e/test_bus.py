"""A swarm with a bus: its broker is killed in the middle of the training and started again, and nobody cares."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from starlings_protos import bus_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.bus import payloads
from starlings_protos.bus.presence import Present, fold
from starlings_protos.bus.topics import Kind, all_of, parse
from starlings_protos.identity import Role
from support.broker import Client, broker, needs_mosquitto, new_identity, until
from swarms import LiveSwarm, job_text, prepared_job, starlings

pytestmark = needs_mosquitto

STEPS = 5000


class Follower:
    """Whoever follows the swarm over the bus alone."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def said(self, kind: Kind) -> list[payloads.BusMessage]:
        found = []
        for message in list(self.client.messages):
            topic = parse(message.topic)
            assert topic is not None, message.topic
            if topic.kind is kind and message.payload:
                found.append(payloads.decode(topic, message.payload))
        return found

    def workers(self) -> dict[str, Present]:
        known: dict[str, Present] = {}
        for message in list(self.client.messages):
            topic = parse(message.topic)
            if topic is None or topic.kind is not Kind.STATUS:
                continue
            status = payloads.decode(topic, message.payload) if message.payload else None
            assert status is None or isinstance(status, bus_pb2.BusStatus)
            present = fold(known.pop(topic.worker_id, None), status, 0.0)
            if present is not None:
                known[topic.worker_id] = present
        return known

    def sessions(self) -> set[int]:
        return {present.status.session for present in self.workers().values()}

    def online(self) -> set[str]:
        return {w for w, p in self.workers().items() if p.status.presence == bus_pb2.PRESENCE_ONLINE}


@pytest.mark.slow
def test_a_broker_that_dies_and_comes_back_disturbs_nobody(tmp_path: Path) -> None:
    authority = CertificateAuthority.load_or_create(tmp_path / "ca", "test", time.time())
    me = new_identity(authority, Role.OBSERVER)
    with broker(tmp_path / "broker", "test", authority=authority) as at:
        text = job_text(STEPS * 8 * 32, swarm={"min_workers": 2, "settle_s": 0.2}, bus={"url": at.url})
        job = prepared_job(tmp_path, text)
        shutil.copytree(tmp_path / "ca", job / "ca", dirs_exist_ok=True)
        with LiveSwarm.of(job, tmp_path) as swarm:
            swarm.join()
            swarm.join()
            before = swarm.wait(lambda r: r.phase == "training" and r.step >= 3 and r.bus.connected, 60)
            with at.client(me, subscribe=(all_of("test"),)) as client:
                early = Follower(client)
                until(lambda: len(early.online()) == 2, "both workers")
                until(lambda: early.said(Kind.TELEMETRY), "telemetry")
                until(
                    lambda: any(notice.losses for notice in early.said(Kind.EVENT)),  # type: ignore[union-attr]
                    "losses",
                )
                assert all(not worker.bytes_sent for worker in before.workers), (
                    "the coordinator is told nothing"
                )

            at.stop(kill=True)
            away = swarm.wait(lambda r: not r.bus.connected, 30)
            assert away.bus.reason
            swarm.wait(lambda r: r.step >= away.step + 20, 60)
            at.start()
            swarm.wait(lambda r: r.bus.connected, 30)
            with at.client(me, subscribe=(all_of("test"),)) as client:
                late = Follower(client)
                # The same two processes, on other connections: what the broker has saved says `online` as well.
                until(
                    lambda: late.online() == early.online() and late.sessions().isdisjoint(early.sessions()),
                    "both workers again",
                    40.0,
                )
                until(lambda: late.said(Kind.PLAN), "the plan, which the broker keeps")
                (plan, *_) = late.said(Kind.PLAN)
                assert isinstance(plan, bus_pb2.PlanNotice)
                assert {h.worker_id for h in plan.holdings} == early.online()
                done = starlings("stop", "--job", job, cwd=tmp_path)
                assert done.code == 0, done.err
                reply = swarm.finish(60)
                until(lambda: not late.workers(), "everybody to be forgotten")
    assert (reply.samples_lost, reply.samples_trained) == (0, reply.step * 8)
    assert [point.step for point in swarm.history.points] == list(range(reply.step))
    kinds = {event.kind for event in swarm.history.events}
    assert not {"lost", "step_restarted", "rejoin", "engine_down", "gathering"} & kinds
    log = (job / "logs" / "coordinator.log").read_text("utf-8")
    lines = [line for line in log.splitlines() if "The bus at" in line]
    # Connected, away, and back, if that lasted for the five seconds after which it is said: however often it was tried.
    assert len(lines) in (2, 3), lines
