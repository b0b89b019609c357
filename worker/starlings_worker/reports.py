"""What a supervisor says of its own accord: heartbeats for the coordinator, and counters for people.

Both are the engine's last ones, passed on at the pace that the coordinator asks for. Where the job has a bus, counters
go there, several samples in a message, and none to the coordinator; while the broker is away, it gets the newest ones
once a minute, so that an outage of the broker does not become a load for the coordinator.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from starlings_protos import control_pb2
from starlings_worker.bus import WorkerBus

# However rare heartbeats are in a large swarm, the engine is looked after this often.
LOOK_EVERY_S = 5.0
# Counters are this fraction of the training's age old, until their interval is reached: a short run is seen too.
AGE_SHARE = 0.1
# While the broker is away.
SUMMARY_EVERY_S = 60.0


def counters_due_s(age_s: float, heartbeat_s: float, telemetry_s: float) -> float:
    """From one report of counters to the next, for an engine that began anew that long ago."""
    return min(telemetry_s, max(heartbeat_s, AGE_SHARE * age_s))


def begins_anew(known: control_pb2.Telemetry, now: control_pb2.Telemetry) -> bool:
    """Whether the engine is another one, or has just begun to train: waiting is counted from then on."""
    waited = [any(sample.wait_s > 0 for sample in said.samples) for said in (known, now)]
    return known.incarnation != now.incarnation or waited == [False, True]


class Reports:
    """All methods are called on the event loop."""

    def __init__(
        self,
        send: Callable[[control_pb2.ToCoordinator], bool],
        look_after: Callable[[], None],
        bus: WorkerBus,
        rng: random.Random,
    ) -> None:
        """
        Args:
            send: puts a message on the control stream; false when that is down.
            look_after: called often, to see whether the engine still does anything.
        """
        self._bus = bus
        # At random, so that not a whole swarm speaks up at once.
        self._summary_at_s = time.monotonic() + SUMMARY_EVERY_S * rng.random()
        self._send = send
        self._look_after = look_after
        self._heartbeat = control_pb2.ToCoordinator(heartbeat=control_pb2.Heartbeat())
        self._heartbeat_interval_s = 2.0
        self._counters: control_pb2.ToCoordinator | None = None
        self._counters_since_s = 0.0
        # 0 = the coordinator wants none.
        self._telemetry_interval_s = 0.0

    def heard(self, message: control_pb2.ToCoordinator) -> bool:
        """A message of the engine; whether it was a report, which is not passed on at once."""
        match message.WhichOneof("body"):
            case "heartbeat":
                self._heartbeat = message
            case "telemetry":
                known = self._counters
                if known is None or begins_anew(known.telemetry, message.telemetry):
                    self._counters_since_s = time.monotonic()
                self._counters = message
                self._bus.sampled(message.telemetry)
            case _:
                return False
        return True

    def keep_pace(self, heartbeat_interval_s: float) -> None:
        """From the next heartbeat on. 0 = nothing was said of it."""
        if heartbeat_interval_s > 0:
            self._heartbeat_interval_s = heartbeat_interval_s

    def welcomed(self, welcome: control_pb2.Welcome) -> None:
        self.keep_pace(welcome.heartbeat_interval_s)
        self._telemetry_interval_s = welcome.telemetry_interval_s

    async def run(self) -> None:
        """On schedule, until cancelled: the coordinator learns of a dead host, and of a hung engine by its progress."""
        beaten_at_s = counted_at_s = time.monotonic() - 1e9
        while True:
            now_s = time.monotonic()
            if now_s - beaten_at_s >= self._heartbeat_interval_s:
                beaten_at_s = now_s
                self._send(self._heartbeat)
            if now_s - counted_at_s >= self._counters_interval_s(now_s):
                counted_at_s = now_s
                self._report_counters(now_s)
            self._look_after()
            due_at_s = min(
                beaten_at_s + self._heartbeat_interval_s, counted_at_s + self._counters_interval_s(now_s)
            )
            await asyncio.sleep(min(max(0.05, due_at_s - time.monotonic()), LOOK_EVERY_S))

    def _counters_interval_s(self, now_s: float) -> float:
        if self._telemetry_interval_s <= 0 or self._counters is None:
            return float("inf")
        return counters_due_s(
            now_s - self._counters_since_s, self._heartbeat_interval_s, self._telemetry_interval_s
        )

    def _report_counters(self, now_s: float) -> None:
        if self._bus.configured:
            self._bus.publish_samples()
            if self._bus.connected or now_s < self._summary_at_s:
                return
            self._summary_at_s = now_s + SUMMARY_EVERY_S
        if self._counters is not None:
            self._send(self._counters)
