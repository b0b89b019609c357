"""Counters of a worker, for people: records that mirror Telemetry in control.proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Seconds between two messages of one worker, when it has settled down. Raising it makes the figures that people see
# older; lowering it costs whoever carries telemetry (the broker, or else the coordinator) workers / interval messages
# each second.
TELEMETRY_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class TelemetrySample:
    wall_time_s: float
    progress: int = 0
    version: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    exchange_bytes: int = 0
    state_bytes: int = 0
    control_bytes: int = 0
    compute_s: float = 0.0
    serialise_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    inner_steps: int = 0
    staleness: float = 0.0
    staleness_most: int = 0
    gradients_stale: int = 0

    def bytes_sent(self) -> Mapping[str, int]:
        """By kind, as people see them."""
        return {
            "forward": self.forward_bytes,
            "backward": self.backward_bytes,
            "exchange": self.exchange_bytes,
            "state": self.state_bytes,
            "control": self.control_bytes,
        }

    def seconds(self) -> Mapping[str, float]:
        """By kind, as people see them."""
        return {
            "compute": self.compute_s,
            "serialise": self.serialise_s,
            "send": self.send_s,
            "wait": self.wait_s,
        }


@dataclass(frozen=True, slots=True)
class Telemetry:
    worker_id: str
    incarnation: int
    samples: tuple[TelemetrySample, ...] = ()
