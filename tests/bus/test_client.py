"""BusClient against a real Mosquitto: it publishes, listens, comes back, and is never waited for."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from starlings_protos import bus_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.bus.address import BusAddress, parse_bus_url
from starlings_protos.bus.client import ANSWER_WITHIN_S, SHORT_LIMIT, BusClient
from starlings_protos.bus.outbox import Outgoing
from starlings_protos.bus.payloads import Form, encode
from starlings_protos.bus.topics import Kind, Topic, all_of
from starlings_protos.identity import COORDINATOR, Identity
from support.broker import Broker, Client, broker, needs_mosquitto, new_identity, until

pytestmark = needs_mosquitto


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("broker")) as made:
        yield made


class Speaker:
    """A client that keeps its own status on the broker, and what it heard."""

    def __init__(self, at: Broker, identity: Identity, address: BusAddress | None = None) -> None:
        self.topic = str(Topic(at.job, Kind.STATUS, identity.id))
        self.event = f"starlings/v1/{at.job}/worker/{identity.id}/telemetry"
        self.identity = identity
        self.state = "joining"
        self.sequence = 0
        # Called each time that a word is asked for, which is when everything before it was answered.
        self.before_word: Callable[[], None] = lambda: None
        self.said: list[str] = []
        self.heard: list[tuple[str, bytes, bool]] = []
        self.client = BusClient(
            address or parse_bus_url(at.url),
            f"{at.job}-worker-{identity.id}",
            lambda: identity,
            standing=self.standing,
            will=lambda session: self.word(session, bus_pb2.PRESENCE_LOST),
            subscriptions=[(f"starlings/v1/{at.job}/command", 1)],
            on_message=lambda *message: self.heard.append(message),
            announce=self.said.append,
            seed=1,
        )

    def __enter__(self) -> Speaker:
        self.client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close(self.goodbye)

    def word(self, session: int, presence: bus_pb2.Presence) -> Outgoing:
        status = bus_pb2.BusStatus(
            worker_id=self.identity.id,
            presence=presence,
            session=session,
            sequence=self.sequence,
            state=self.state,
        )
        return Outgoing(self.topic, encode(status, Form.PROTOBUF), 1, retain=True)

    def standing(self, session: int) -> list[Outgoing]:
        self.before_word()
        self.sequence += 1
        return [self.word(session, bus_pb2.PRESENCE_ONLINE)]

    def goodbye(self, session: int) -> list[Outgoing]:
        self.sequence += 1
        return [self.word(session, bus_pb2.PRESENCE_OFFLINE)]

    def connected(self) -> bool:
        return self.client.health().connected


def statuses(listener: Client, topic: str) -> list[bus_pb2.BusStatus]:
    return [bus_pb2.BusStatus.FromString(payload) for payload in listener.of(topic)]


def test_the_present_state_is_kept_for_whoever_comes_later_and_a_goodbye_is_no_loss(running: Broker):
    reader = new_identity(running.authority)
    with Speaker(running, new_identity(running.authority)) as speaker:
        with running.client(reader, subscribe=(all_of("test"),)) as listener:
            until(lambda: statuses(listener, speaker.topic), "the first word")
            speaker.state = "training"
            for _ in range(50):
                speaker.client.refresh()
            until(lambda: statuses(listener, speaker.topic)[-1].state == "training", "the new state")
            # Fifty changes are not fifty messages.
            assert len(statuses(listener, speaker.topic)) < 50
            speaker.client.publish(speaker.event, b"figures")
            until(lambda: listener.of(speaker.event), "telemetry")
        with running.client(reader, subscribe=(all_of("test"),)) as late:
            until(lambda: statuses(late, speaker.topic), "the retained state")
            assert [m.retained for m in late.messages if m.topic == speaker.topic] == [True]
            speaker.client.close(speaker.goodbye)
            until(lambda: len(statuses(late, speaker.topic)) > 1, "the goodbye")
            assert speaker.said == [f"The bus at {running.url} is connected."]
    with running.client(reader, subscribe=(all_of("test"),)) as later:
        until(lambda: statuses(later, speaker.topic), "what is kept")
        assert [s.presence for s in statuses(later, speaker.topic)] == [bus_pb2.PRESENCE_OFFLINE]


def test_the_broker_forgets_what_has_expired(running: Broker):
    identity = new_identity(running.authority)
    topic = str(Topic("test", Kind.STATUS, identity.id))
    client = BusClient(parse_bus_url(running.url), "expiring", lambda: identity)
    client.start()
    until(lambda: client.health().connected, "the connection")
    client.close(lambda session: [Outgoing(topic, b"soon forgotten", 1, retain=True, expires_s=1)])

    def kept() -> list[bytes]:
        with running.client(identity, subscribe=(topic,)) as listener:
            # What is retained comes before the answer to this.
            listener.publish(topic.replace("status", "telemetry"), b"")
            return listener.of(topic)

    assert kept() == [b"soon forgotten"]
    until(lambda: not kept(), "that it is forgotten", 5.0)


def test_the_coordinator_is_heard_everywhere_in_its_job(running: Broker):
    coordinator = running.authority.issue_identity(COORDINATOR, time.time())
    client = BusClient(parse_bus_url(running.url), "test-coordinator", lambda: coordinator)
    with Speaker(running, new_identity(running.authority)) as speaker:
        until(speaker.connected, "the worker")
        client.start()
        client.publish(str(Topic("test", Kind.COMMAND)), b"call", qos=1)
        client.publish(speaker.topic, b"", qos=1, retain=True)
        until(lambda: speaker.heard, "the hint")
        assert speaker.heard == [(str(Topic("test", Kind.COMMAND)), b"call", False)]
        client.close()
        with running.client(coordinator, subscribe=(speaker.topic,)) as late:
            assert not late.of(speaker.topic)


def test_a_will_names_the_session_that_it_ends(running: Broker):
    """The second connection of one client id takes the first one over, whose will then comes."""
    identity = new_identity(running.authority)
    reader = new_identity(running.authority)
    with running.client(reader, subscribe=(all_of("test"),)) as listener:
        first = Speaker(running, identity)
        first.client.start()
        until(lambda: statuses(listener, first.topic), "the first session")
        with running.client(identity, client_id=f"test-worker-{identity.id}"):
            until(lambda: len(statuses(listener, first.topic)) > 1, "the will")
            online, lost = statuses(listener, first.topic)[:2]
            assert (online.presence, lost.presence) == (bus_pb2.PRESENCE_ONLINE, bus_pb2.PRESENCE_LOST)
            assert online.session == lost.session
            until(lambda: len(statuses(listener, first.topic)) > 2, "the next session")
            assert statuses(listener, first.topic)[2].session != online.session
        first.client.close(first.goodbye)


def test_it_survives_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("starlings_protos.bus.client.STEADY_AFTER_S", 0.5)
    with broker(tmp_path) as at, Speaker(at, new_identity(at.authority)) as speaker:
        until(speaker.connected, "the first connection")
        at.stop(kill=True)
        until(lambda: not speaker.connected(), "the loss")
        assert speaker.client.health().reason
        threads = threading.active_count()
        begun_s = time.monotonic()
        for number in range(10_000):
            speaker.client.publish(speaker.event, b"%d" % number)
            speaker.client.refresh()
        assert time.monotonic() - begun_s < 5.0
        until(lambda: speaker.client._link.failures >= 3, "attempts in vain")
        assert threading.active_count() <= threads + 1
        assert 9_900 < speaker.client.health().dropped < 10_000
        speaker.state = "training"
        at.start()
        until(speaker.connected, "the second connection")
        reader = new_identity(at.authority)
        with at.client(reader, subscribe=(all_of("test"),)) as listener:
            until(lambda: statuses(listener, speaker.topic), "the state after the restart")
            assert statuses(listener, speaker.topic)[-1].state == "training"
        until(lambda: len(speaker.said) > 2, "the news that it is back")
        assert len(speaker.said) == 3
        assert speaker.said[1].startswith(f"The bus at {at.url} is away (")
        assert speaker.said[2].startswith(f"The bus at {at.url} is back after ")


@pytest.mark.slow
def test_who_takes_its_client_id_over_again_and_again_is_evaded(tmp_path: Path):
    """The broker knows who says what by certificates, but any member may call itself what it likes."""
    with broker(tmp_path) as at, Speaker(at, new_identity(at.authority)) as speaker:
        rogue = new_identity(at.authority)
        for _ in range(SHORT_LIMIT):
            until(speaker.connected, "the connection", 30.0)
            with at.client(rogue, client_id=f"test-worker-{speaker.identity.id}"):
                until(lambda: not speaker.connected(), "that it is taken over")
        until(speaker.connected, "a connection of another name", 30.0)
        with at.client(rogue, client_id=f"test-worker-{speaker.identity.id}"):
            until(lambda: len(speaker.said) > 2, "that it stays")
            assert "is back after" in speaker.said[2]
            assert speaker.connected()


@pytest.mark.slow
def test_a_broker_that_comes_and_goes_is_told_of_once(tmp_path: Path):
    with broker(tmp_path) as at, Speaker(at, new_identity(at.authority)) as speaker:
        until(speaker.connected, "the first connection")
        for _ in range(4):
            at.stop(kill=True)
            until(lambda: not speaker.connected(), "the loss")
            at.start()
            until(speaker.connected, "the next connection", 30.0)
        assert len(speaker.said) == 2, speaker.said
        until(lambda: len(speaker.said) > 2, "the word that it is back")
        assert "is back after" in speaker.said[2]
        with at.client(new_identity(at.authority), subscribe=(all_of("test"),)) as listener:
            until(lambda: statuses(listener, speaker.topic), "the present state")
            assert statuses(listener, speaker.topic)[-1].presence == bus_pb2.PRESENCE_ONLINE


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no way to freeze a process here")
def test_a_frozen_broker_costs_nobody_time(tmp_path: Path):
    with broker(tmp_path) as at:
        speaker = Speaker(at, new_identity(at.authority))
        with speaker:
            until(speaker.connected, "the connection")
            assert at.process is not None
            os.kill(at.process.pid, signal.SIGSTOP)
            try:
                begun_s = time.monotonic()
                for _ in range(1000):
                    speaker.client.publish(speaker.event, b"x" * 1000)
                    speaker.client.refresh()
                assert time.monotonic() - begun_s < 1.0
                speaker.client.close(speaker.goodbye, within_s=0.5)
                assert time.monotonic() - begun_s < 2.0
            finally:
                os.kill(at.process.pid, signal.SIGCONT)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no way to freeze a process here")
def test_a_broker_that_dies_before_it_answers_is_missed_at_once(tmp_path: Path):
    with broker(tmp_path) as at, Speaker(at, new_identity(at.authority)) as speaker:
        until(speaker.connected, "the connection")
        assert at.process is not None
        pid, frozen = at.process.pid, threading.Event()

        def freeze() -> None:
            os.kill(pid, signal.SIGSTOP)
            frozen.set()

        speaker.before_word = freeze
        speaker.client.refresh()
        until(frozen.is_set, "a word that waits for its answer")
        at.stop(kill=True)
        until(lambda: not speaker.connected(), "the loss", ANSWER_WITHIN_S / 2)


def test_one_that_accepts_and_says_nothing_costs_nobody_time():
    authority = CertificateAuthority.create("test", time.time())
    identity = new_identity(authority)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = BusAddress("127.0.0.1", silent.getsockname()[1], True)
        client = BusClient(address, "test", lambda: identity)
        client.start()
        silent.accept()
        begun_s = time.monotonic()
        client.close(within_s=5.0)
        assert time.monotonic() - begun_s < 1.0


def test_a_broker_of_another_job_is_not_talked_to(tmp_path: Path):
    other = CertificateAuthority.create("test", time.time())
    with broker(tmp_path) as at, Speaker(at, new_identity(other)) as speaker:
        until(lambda: speaker.said, "the refusal")
        assert "certificate verify failed" in speaker.said[0].lower()
        assert "away" in speaker.said[0]


def test_a_broker_under_another_name_is_not_talked_to(running: Broker):
    identity = new_identity(running.authority)
    # Another way to write 127.0.0.1, which the certificate does not name.
    address = BusAddress("127.1", running.port, True)
    with Speaker(running, identity, address) as speaker:
        until(lambda: speaker.said, "the refusal")
        assert "certificate is not valid for" in speaker.said[0]
