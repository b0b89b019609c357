"""Bytes sent and seconds spent, by kind: what telemetry reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlings_protos.telemetry import TelemetrySample

# In the order of TelemetrySample.
_KINDS_OF_BYTES = ("forward", "backward", "exchange", "state", "control")
_KINDS_OF_SECONDS = ("compute", "serialise", "send", "wait")


class Meters:
    """Counted from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = dict.fromkeys(_KINDS_OF_BYTES, 0)
        self._seconds: dict[str, float] = dict.fromkeys(_KINDS_OF_SECONDS, 0.0)
        self._working_since_s: float | None = None

    def sent(self, kind: str, byte_count: int) -> None:
        with self._lock:
            self._bytes[kind] = self._bytes.get(kind, 0) + byte_count

    def spent(self, kind: str, seconds: float) -> None:
        with self._lock:
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent(kind, time.monotonic() - begin)

    def training_began(self) -> None:
        """From now on, time in which the device has nothing to do counts as "wait"."""
        with self._lock:
            if self._working_since_s is None:
                self._working_since_s = time.monotonic()

    def bytes_sent(self) -> dict[str, int]:
        with self._lock:
            return dict(self._bytes)

    def seconds(self) -> dict[str, float]:
        """How long each took; "wait" is what is left of the time since training began after computing and
        serialising.
        """
        with self._lock:
            seconds = dict(self._seconds)
            if self._working_since_s is not None:
                elapsed_s = time.monotonic() - self._working_since_s
                seconds["wait"] = max(0.0, elapsed_s - seconds["compute"] - seconds["serialise"])
            return seconds

    def sample(self, wall_time_s: float, progress: int, version: int) -> TelemetrySample:
        sent, spent = self.bytes_sent(), self.seconds()
        return TelemetrySample(
            wall_time_s,
            progress,
            version,
            *(sent[kind] for kind in _KINDS_OF_BYTES),
            *(spent[kind] for kind in _KINDS_OF_SECONDS),
        )
