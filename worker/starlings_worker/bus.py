"""A worker on the MQTT bus: its status, its telemetry, and hints that it hears. Nothing here is waited for.

The bus may say anything: whoever has a certificate of the job can be wrong or lie. So presence is for people, and a
hint only makes this worker ask its coordinator sooner.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus import payloads
from starlings_protos.bus.address import BusAddress, parse_bus_url
from starlings_protos.bus.client import BusClient
from starlings_protos.bus.outbox import Outgoing
from starlings_protos.bus.payloads import Form, MalformedPayload
from starlings_protos.bus.presence import contradicts
from starlings_protos.bus.topics import Kind, Topic, client_id, parse
from starlings_protos.identity import Identity, Role
from starlings_protos.messages import Hello
from starlings_worker import presence
from starlings_worker.presence import Standing

# However many hints come, one early call in this time: forged ones cost no more.
HINT_EVERY_S = 10.0
# However often somebody else's word stands where this worker's should: it is set right again at this pace.
REPAIR_EVERY_S = 10.0
# The broker forgets who went after this long, where no coordinator is there to clear it.
GONE_FOR_S = 86_400
# Samples between two messages; an engine gives one with each of its heartbeats.
SAMPLES_KEPT = 16


def bus_of(job_json: bytes) -> tuple[BusAddress, Form] | None:
    """Where the bus of a job is, from its Welcome; None when it has none, or none that can be used."""
    try:
        section: Any = json.loads(job_json).get("bus") or {}
        url = section.get("url")
        return (parse_bus_url(url), Form(section.get("payload", Form.PROTOBUF))) if url else None
    except (ValueError, AttributeError, TypeError):
        return None


class WorkerBus:
    """One worker's place on the bus. Methods are called on the worker's event loop; `_on_...` on the bus's thread."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        job: Callable[[], str],
        announce: Callable[[str], None],
        on_hint: Callable[[], None],
    ) -> None:
        """
        Args:
            announce: gets a line when the bus has come, gone, or come back; on the bus's thread.
            on_hint: the coordinator may want to be called now; on the bus's thread.
        """
        self._identity = identity
        self._job = job
        self._announce = announce
        self._on_hint = on_hint
        self._place: tuple[BusAddress, Form] | None = None
        self._client: BusClient | None = None
        self._standing = Standing()
        self._samples: deque[control_pb2.Telemetry] = deque(maxlen=SAMPLES_KEPT)
        self._sequence = itertools.count(1)
        # What follows is shared with the bus's thread.
        self._lock = threading.Lock()
        self._said: bus_pb2.BusStatus | None = None
        self._repaired_at_s = self._hinted_at_s = time.monotonic() - 1e9
        self._contradicted = False

    @property
    def configured(self) -> bool:
        return self._client is not None

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.health().connected

    def open(self, job_json: bytes) -> None:
        """As the Welcome says; called again with each, and a job may have got another bus since."""
        place = bus_of(job_json)
        if place == self._place:
            return
        old, self._client, self._place = self._client, None, place
        if old is not None:
            # Its goodbye may take a while.
            threading.Thread(target=old.close, args=(self._goodbye,), daemon=True).start()
        if place is None:
            return
        worker_id, job = self._identity().id, self._job()
        self._client = BusClient(
            place[0],
            client_id(job, Role.WORKER, worker_id),
            self._identity,
            standing=self._now,
            will=self._will,
            subscriptions=[(str(Topic(job, Kind.STATUS, worker_id)), 1), (str(Topic(job, Kind.COMMAND)), 1)],
            on_message=self._on_message,
            announce=self._announce,
        )
        self._client.start()

    def describe(self, hello: Hello) -> None:
        """What the worker says of itself to the coordinator is no secret."""
        self._stand(
            replace(
                self._standing,
                device=hello.device,
                device_class=hello.device_class,
                version=hello.version,
            )
        )

    def ordered(self, message: control_pb2.ToWorker) -> None:
        """A message of the coordinator."""
        self._stand(presence.ordered(self._standing, message))

    def reported(self, message: control_pb2.ToCoordinator) -> None:
        """A message of the worker."""
        self._stand(presence.reported(self._standing, message))

    def leaving(self, reason: str) -> None:
        self._stand(presence.leaving(self._standing, reason))

    def _stand(self, standing: Standing) -> None:
        """From now on this is said of the worker."""
        if standing != self._standing:
            self._standing = standing
            if self._client is not None:
                self._client.refresh()

    def sampled(self, telemetry: control_pb2.Telemetry) -> None:
        self._samples.append(telemetry)

    def publish_samples(self) -> None:
        """What came since the last call, as one message; and a status that others have overwritten is set right."""
        if self._client is None or self._place is None:
            return
        with self._lock:
            due = self._contradicted and self._may_repair(time.monotonic())
        if due:
            self._client.refresh()
        if self._samples:
            payload = presence.batch(tuple(self._samples), self._place[1])
            self._samples.clear()
            self._client.publish(str(Topic(self._job(), Kind.TELEMETRY, self._identity().id)), payload)

    def close(self) -> None:
        """Says goodbye where the broker is there. Blocks for a few seconds at most."""
        if self._client is not None:
            self._client.close(self._goodbye)

    # ------------------------------------------------------------------ on the bus's thread

    def _word(
        self, state: bus_pb2.Presence.ValueType, session: int, sequence: int
    ) -> tuple[bus_pb2.BusStatus, Outgoing]:
        place = self._place
        worker_id = self._identity().id
        status = presence.status(self._standing, worker_id, state, session, sequence, time.time())
        payload = payloads.encode(status, place[1] if place is not None else Form.PROTOBUF)
        expires_s = 0 if state == bus_pb2.PRESENCE_ONLINE else GONE_FOR_S
        topic = str(Topic(self._job(), Kind.STATUS, worker_id))
        return status, Outgoing(topic, payload, 1, retain=True, expires_s=expires_s)

    def _now(self, session: int) -> tuple[Outgoing, ...]:
        status, word = self._word(bus_pb2.PRESENCE_ONLINE, session, next(self._sequence))
        with self._lock:
            self._said, self._contradicted = status, False
        return (word,)

    def _goodbye(self, session: int) -> tuple[Outgoing, ...]:
        with self._lock:
            self._said = None
        return (self._word(bus_pb2.PRESENCE_OFFLINE, session, next(self._sequence))[1],)

    def _will(self, session: int) -> Outgoing:
        with self._lock:
            # Of an earlier session: what the broker kept of it is about to be replaced anyway.
            self._said = None
        return self._word(bus_pb2.PRESENCE_LOST, session, 0)[1]

    def _on_message(self, name: str, payload: bytes, retained: bool) -> None:
        topic = parse(name)
        if topic is None:
            return
        with contextlib.suppress(MalformedPayload):
            if topic.kind is Kind.STATUS:
                self._on_own_status(payload and payloads.decode(topic, payload))
            elif topic.kind is Kind.COMMAND:
                hint = payloads.decode(topic, payload)
                if isinstance(hint, bus_pb2.CommandHint):
                    self._on_command(hint)
            return
        if topic.kind is Kind.STATUS:
            # Nobody can read what stands there.
            self._on_own_status(None)

    def _on_own_status(self, heard: object) -> None:
        """What the broker keeps of this worker now."""
        kept = heard if isinstance(heard, bus_pb2.BusStatus) else None
        with self._lock:
            if self._said is None or not contradicts(self._said, kept):
                return
            self._contradicted = True
            due = self._may_repair(time.monotonic())
        if due and self._client is not None:
            self._client.refresh()

    def _may_repair(self, now_s: float) -> bool:
        if now_s - self._repaired_at_s < REPAIR_EVERY_S:
            return False
        self._repaired_at_s = now_s
        return True

    def _on_command(self, hint: bus_pb2.CommandHint) -> None:
        if hint.kind != "call" or hint.worker_id not in ("", self._identity().id):
            return
        now_s = time.monotonic()
        if now_s - self._hinted_at_s >= HINT_EVERY_S:
            self._hinted_at_s = now_s
            self._on_hint()
