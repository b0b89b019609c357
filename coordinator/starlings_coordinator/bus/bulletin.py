"""The coordinator's notices on the bus: an observer of the core, asked for nothing and waited for by nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from starlings_coordinator.bus.notices import Absent, Told, event_payload, plan_payload
from starlings_coordinator.clock import Clock
from starlings_coordinator.core.core import Core
from starlings_coordinator.core.views import headline
from starlings_job.sections import BusSection
from starlings_protos import bus_pb2
from starlings_protos.bus.address import parse_bus_url
from starlings_protos.bus.client import BusClient
from starlings_protos.bus.outbox import Outgoing
from starlings_protos.bus.payloads import Form, encode
from starlings_protos.bus.topics import Kind, Topic, client_id, is_worker_id
from starlings_protos.identity import COORDINATOR, Identity
from starlings_protos.status import BusHealth

logger = logging.getLogger(__name__)

EVERY_S = 1.0
# For the last words at the job's end, when everybody's state is forgotten. A broker that hangs must not keep a service
# manager waiting that only wants to restart us.
CLOSE_WITHIN_S = 10.0
PAUSE_WITHIN_S = 2.0


class Bulletin:
    """Of one job that has a bus."""

    def __init__(
        self,
        core: Core,
        clock: Clock,
        bus: BusSection,
        identity: Callable[[], Identity],
        announce: Callable[[str], None],
    ) -> None:
        """`announce` is told in the event loop's thread that the bus has come, gone, or come back."""
        assert bus.url is not None
        self._core, self._clock = core, clock
        self._job = core.config.job.job.name
        self._form = Form(bus.payload)
        self._url = bus.url
        self._told, self._absent = Told(), Absent()
        self._plan = b""
        loop = asyncio.get_running_loop()

        def heard(line: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(announce, line)

        self._client = BusClient(
            parse_bus_url(bus.url),
            client_id(self._job, COORDINATOR.role, COORDINATOR.id),
            identity,
            standing=self._standing,
            announce=heard,
        )

    def start(self) -> None:
        """To be called when workers can call: they are told so."""
        hint = bus_pb2.CommandHint(
            kind="call", reason="the coordinator has started", wall_time_s=self._clock.now().wall_s
        )
        self._look()
        self._publish(Kind.COMMAND, encode(hint, self._form))
        self._client.start()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self._look()

    def health(self) -> BusHealth:
        health = self._client.health()
        return BusHealth(
            self._url,
            health.connected,
            max(0.0, time.monotonic() - health.since_s),
            health.reason,
            health.dropped,
        )

    def forget(self, worker_id: str) -> None:
        """Nobody shall be shown this worker any more, whatever it last said of itself. Others never said anything."""
        if is_worker_id(worker_id):
            self._client.publish(*_nothing(self._job, worker_id), qos=1, retain=True)

    async def close(self, *, job_is_over: bool) -> None:
        """The last notices. Takes a moment, and not longer than a broker that hangs is worth."""
        self._look()
        known = sorted(self._core.state.incarnations) if job_is_over else []

        def final(session: int) -> Sequence[Outgoing]:
            # Unacknowledged, so that thousands take no time; the goodbye comes behind them on the same connection.
            return [Outgoing(*_nothing(self._job, worker_id), 0, retain=True) for worker_id in known]

        await asyncio.to_thread(self._client.close, final, CLOSE_WITHIN_S if job_is_over else PAUSE_WITHIN_S)

    # ------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._look_at_core()
        except Exception:
            # Nothing that goes wrong here is worth a training run.
            logger.exception("no notice on the bus this time")

    def _look_at_core(self) -> None:
        now, head = self._clock.now(), headline(self._core)
        if self._told.wants_plan(self._core, head, now.monotonic_s):
            self._plan = plan_payload(self._core, head, now.wall_s, self._form)
            self._client.refresh()
        news = self._told.news(self._core, head, now.monotonic_s)
        if news is not None:
            self._publish(Kind.EVENT, event_payload(self._core, head, *news, now.wall_s, self._form))
        if self._client.health().connected:
            for worker_id in self._absent.due(self._core, now.monotonic_s):
                self.forget(worker_id)

    def _standing(self, session: int) -> Sequence[Outgoing]:
        return [Outgoing(str(Topic(self._job, Kind.PLAN)), self._plan, 1, retain=True)]

    def _publish(self, kind: Kind, payload: bytes) -> None:
        self._client.publish(str(Topic(self._job, kind)), payload, qos=1)


def _nothing(job: str, worker_id: str) -> tuple[str, bytes]:
    return str(Topic(job, Kind.STATUS, worker_id)), b""
