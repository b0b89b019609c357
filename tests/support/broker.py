"""A real Mosquitto as `starlings bus config` configures it, and plain MQTT clients of any identity."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import paho.mqtt.client as paho
import pytest

from starlings_coordinator.broker.configuration import BrokerSettings
from starlings_coordinator.broker.files import Access, write_broker_files
from starlings_protos.authority import CertificateAuthority
from starlings_protos.identity import Identity, PeerIdentity, Role, key_id, key_to_pem, new_key

WITHIN_S = 10.0
# Not on everybody's PATH.
MOSQUITTO = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")
needs_mosquitto = pytest.mark.skipif(
    MOSQUITTO is None, reason="no Mosquitto here: apt-get install mosquitto (or brew install mosquitto)"
)


def until(condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    """Waits for a condition with a deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.01)


def new_identity(authority: CertificateAuthority, role: Role = Role.WORKER) -> Identity:
    """A member of the job as enrolment makes them."""
    key = new_key()
    peer = PeerIdentity(key_id(key.public_key(), role), role)
    pem = authority.issue(key.public_key(), peer, time.time())
    return Identity(peer, key_to_pem(key), pem, authority.certificate_pem)


@dataclass
class Broker:
    """One that runs, for the job `job`."""

    job: str
    authority: CertificateAuthority
    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtts://localhost:{self.port}"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text("utf-8")

    def start(self) -> None:
        """Returns once it listens."""
        assert MOSQUITTO is not None
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [MOSQUITTO, "-c", self.directory / "mosquitto.conf"], stdin=subprocess.DEVNULL, stderr=log
            )
        process = self.process

        def listens() -> bool:
            assert process.poll() is None, self.log
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        until(listens, "the broker's port")

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            self.process.wait(WITHIN_S)
            self.process = None

    def reload(self) -> None:
        """Lets it read its access list again."""
        assert self.process is not None
        before = self.log.count("Reloading config")
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.log.count("Reloading config") > before, "the broker to read its files again")

    def client(self, identity: Identity | None, **options: object) -> Client:
        """Connected, or refused (`Client.refused`)."""
        return Client(self, identity, **options)  # type: ignore[arg-type]


def free_port() -> int:
    """Mosquitto cannot choose one itself; the system does not give the same one again at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def broker(
    directory: Path, job: str = "test", *, authority: CertificateAuthority | None = None, **settings: object
) -> Iterator[Broker]:
    """Runs Mosquitto in `directory` until the block ends."""
    made = Broker(job, authority or CertificateAuthority.create(job, time.time()), directory, free_port())
    # Root's Mosquitto would change to an account that cannot read what lies in a test's directory.
    account = (
        "root"
        if sys.platform != "win32" and Path(directory.anchor).owner() == Path("/proc/self").owner()
        else ""
    )
    chosen = BrokerSettings(job, made.port, str(directory.absolute()), account, "localhost", **settings)  # type: ignore[arg-type]
    write_broker_files(
        directory, chosen, made.authority, ["localhost", "127.0.0.1"], Access((), ()), now_s=time.time()
    )
    made.start()
    try:
        yield made
    finally:
        made.stop()


@dataclass
class Message:
    topic: str
    payload: bytes
    retained: bool


class Client:
    """A plain MQTT 5 client: what others make of the bus."""

    def __init__(
        self,
        broker: Broker,
        identity: Identity | None,
        *,
        client_id: str = "",
        ca_pem: bytes | None = None,
        subscribe: tuple[str, ...] = (),
    ) -> None:
        self.id = identity.id if identity else ""
        self.messages: list[Message] = []
        self.refused = ""
        self.closed = threading.Event()
        self._answered = threading.Event()
        self._acknowledged: dict[int, int] = {}
        self._client = paho.Client(
            paho.CallbackAPIVersion.VERSION2,
            client_id or (identity.id if identity else "nobody"),
            protocol=paho.MQTTv5,
        )
        self._client.tls_set_context(_context(broker, identity, ca_pem))
        self._client.on_message = lambda c, u, m: self.messages.append(Message(m.topic, m.payload, m.retain))
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_publish = lambda c, u, mid, reason, p: self._acknowledged.__setitem__(
            mid, reason.value
        )
        self._client.on_subscribe = lambda c, u, mid, reasons, p: self._acknowledged.__setitem__(
            mid, reasons[0].value
        )
        try:
            self._client.connect("localhost", broker.port)
        except OSError as error:
            self.refused = str(error)
            return
        self._client.loop_start()
        until(lambda: self._answered.is_set() or self.closed.is_set(), "the broker's answer")
        if not self._answered.is_set():
            self.refused = self.refused or "the broker closed the connection"
        for topic in subscribe:
            self.subscribe(topic)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _on_connect(
        self, client: object, data: object, flags: object, reason: paho.ReasonCode, p: object
    ) -> None:
        if reason.is_failure:
            self.refused = str(reason)
        self._answered.set()

    def _on_disconnect(self, *_: object) -> None:
        self.closed.set()

    def subscribe(self, topic: str) -> None:
        _, number = self._client.subscribe(topic, qos=1)
        assert number is not None
        until(lambda: number in self._acknowledged, f"the subscription to {topic}")

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> int:
        """MQTT's reason code of the broker's answer: 0 taken, 16 taken but nobody listens, 135 not authorised."""
        number = self._client.publish(topic, payload, qos=1, retain=retain).mid
        until(lambda: number in self._acknowledged or self.closed.is_set(), f"the answer for {topic}")
        return self._acknowledged.get(number, -1)

    def of(self, topic: str) -> list[bytes]:
        return [m.payload for m in list(self.messages) if m.topic == topic]


def _context(broker: Broker, identity: Identity | None, ca_pem: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=(ca_pem or broker.authority.certificate_pem).decode())
    if identity is not None:
        pair = broker.directory / f"{identity.id}.pair"
        pair.write_bytes(identity.key_pem + identity.certificate_pem)
        context.load_cert_chain(pair)
    return context
