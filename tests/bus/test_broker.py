"""What a real Mosquitto does with the configuration that `starlings bus config` writes: who may say what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from starlings_coordinator.broker.configuration import access_list
from starlings_protos.authority import CertificateAuthority
from starlings_protos.identity import OWNER, Identity, PeerIdentity, Role, key_to_pem, new_key
from support.broker import Broker, broker, needs_mosquitto, new_identity, until

pytestmark = needs_mosquitto
TOPICS = "starlings/v1/test"
NOT_AUTHORISED = 135


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("broker")) as made:
        yield made


def test_a_worker_is_heard_below_its_own_topic_and_nowhere_else(running: Broker):
    worker, other = new_identity(running.authority), new_identity(running.authority)
    owner = running.authority.issue_identity(OWNER, time.time())
    with running.client(owner, subscribe=(f"{TOPICS}/#",)) as listener, running.client(worker) as speaker:
        for forged in (
            f"{TOPICS}/worker/{other.id}/status",
            f"{TOPICS}/worker/{other.id}/telemetry",
            f"{TOPICS}/plan",
            f"{TOPICS}/event",
            f"{TOPICS}/command",
            "starlings/v1/another/plan",
            f"{TOPICS}/worker/{worker.id}x/status",
            f"{TOPICS}/worker/status",
        ):
            assert speaker.publish(forged, b"forged", retain=True) == NOT_AUTHORISED
        mine = f"{TOPICS}/worker/{worker.id}/telemetry"
        assert speaker.publish(mine, b"mine") == 0
        until(lambda: listener.of(mine), "the worker's own word")
        assert [m.payload for m in listener.messages] == [b"mine"]


def test_a_client_id_of_somebody_else_gives_no_rights(running: Broker):
    worker, other = new_identity(running.authority), new_identity(running.authority)
    with running.client(worker, client_id=f"test-worker-{other.id}") as speaker:
        assert speaker.publish(f"{TOPICS}/worker/{other.id}/status", b"forged") == NOT_AUTHORISED


def test_who_enrolled_as_observer_or_was_shut_out_is_heard_by_nobody(running: Broker):
    observer, gone = new_identity(running.authority, Role.OBSERVER), new_identity(running.authority)
    worker = new_identity(running.authority)
    with running.client(gone) as speaker:
        assert speaker.publish(f"{TOPICS}/worker/{gone.id}/status", b"left behind", retain=True) in (0, 16)
    # The broker reads the list again on a signal: no connection breaks.
    (running.directory / "access").write_text(access_list("test", [observer.id], [gone.id]))
    running.reload()
    with (
        running.client(observer, subscribe=(f"{TOPICS}/#",)) as looking,
        running.client(gone, subscribe=(f"{TOPICS}/#",)) as shut_out,
        running.client(worker) as speaker,
    ):
        for topic in ("plan", "event", "command", f"worker/{worker.id}/status"):
            assert looking.publish(f"{TOPICS}/{topic}", b"forged") == NOT_AUTHORISED
        for silent, name in ((looking, observer.id), (shut_out, gone.id)):
            assert silent.publish(f"{TOPICS}/worker/{name}/status", b"forged", retain=True) == NOT_AUTHORISED
        assert speaker.publish(f"{TOPICS}/worker/{worker.id}/status", b"here") == 0
        until(lambda: looking.messages, "what an observer may read")
        # Nor is anything shown that somebody retained before being shut out.
        assert [m.payload for m in looking.messages] == [b"here"]
        assert shut_out.messages == []
    (running.directory / "access").write_text(access_list("test"))
    running.reload()


def test_strangers_are_refused_in_the_handshake(running: Broker):
    elsewhere = CertificateAuthority.create("test", time.time())
    assert running.client(None).refused, "no certificate"
    assert running.client(new_identity(elsewhere)).refused, "another authority, same job name"
    expired = new_key()
    pem = running.authority.issue(
        expired.public_key(), PeerIdentity("w" + "0" * 16, Role.WORKER), time.time() - 86400, lifetime_s=60
    )
    old = Identity(
        PeerIdentity("w" + "0" * 16, Role.WORKER), key_to_pem(expired), pem, running.authority.certificate_pem
    )
    assert running.client(old).refused, "expired"
    # The broker's own certificate is good for serving alone.
    broker_pem = (running.directory / "broker.pem").read_bytes()
    broker_key = (running.directory / "broker.key").read_bytes()
    as_client = Identity(
        PeerIdentity("w" + "1" * 16, Role.WORKER), broker_key, broker_pem, running.authority.certificate_pem
    )
    assert running.client(as_client).refused, "the broker's certificate"
    refused = running.client(new_identity(running.authority), ca_pem=elsewhere.certificate_pem).refused
    assert "certificate verify failed" in refused, "a client does not take a broker of another authority"


def test_an_oversize_packet_costs_its_sender_the_connection(running: Broker):
    worker = new_identity(running.authority)
    mine = f"{TOPICS}/worker/{worker.id}/telemetry"
    with (
        running.client(new_identity(running.authority), subscribe=(mine,)) as listener,
        running.client(worker) as speaker,
    ):
        assert speaker.publish(mine, bytes(64_000)) == 0
        assert speaker.publish(mine, bytes(66_000)) == -1
        assert speaker.closed.is_set()
        until(lambda: listener.messages, "the small one")
        assert [len(m.payload) for m in listener.messages] == [64_000]


def test_who_subscribes_late_sees_what_is_retained_also_after_a_restart(tmp_path: Path):
    with broker(tmp_path) as running:
        worker, late = new_identity(running.authority), new_identity(running.authority)
        mine = f"{TOPICS}/worker/{worker.id}/status"
        with running.client(worker) as speaker:
            for word in (b"online", b"offline"):
                speaker.publish(mine, word, retain=True)
        with running.client(late, subscribe=(f"{TOPICS}/worker/+/status",)) as listener:
            until(lambda: listener.messages, "the retained state")
            assert [(m.payload, m.retained) for m in listener.messages] == [(b"offline", True)]
        running.stop()
        running.start()
        with running.client(late, subscribe=(f"{TOPICS}/worker/+/status",)) as listener:
            until(lambda: listener.messages, "the retained state after a restart")
            assert listener.of(mine) == [b"offline"]
