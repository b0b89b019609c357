"""The one place where the coordinator's process reads a clock."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from starlings_coordinator.core.events import Now

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    def now(self) -> Now: ...

    def monotonic_s(self) -> float:
        """`now().monotonic_s` alone."""


def _boot_id() -> str:
    """Equal for all processes between two boots, so that monotonic times of different processes can be compared.

    Where the system tells none, a fresh one per process: then nothing from before a restart is compared at all.
    """
    try:
        return _BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return str(uuid.uuid4())


def suspend_aware_monotonic_s() -> float:
    """Seconds since boot, counting the time the machine slept: a lease does not outlive a closed lid."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SystemClock:
    """Its wall time is that of the process's start, carried on by the monotonic clock: whoever sets the machine's clock
    by a month must not make every assignment of the swarm expired, or not yet valid, until all have heard of new ones.
    Certificates, which other machines judge by their own clocks, follow `time.time` instead.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = suspend_aware_monotonic_s,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._boot_id = _boot_id()
        self.monotonic_s = monotonic
        self._wall_offset_s = wall() - monotonic()

    def now(self) -> Now:
        monotonic_s = self.monotonic_s()
        return Now(monotonic_s, monotonic_s + self._wall_offset_s, self._boot_id)
