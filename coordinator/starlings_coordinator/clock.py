"""The one place where the coordinator's process reads a clock."""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path
from typing import Protocol

from starlings_coordinator.core.events import Now

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    def now(self) -> Now: ...


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
    def __init__(self) -> None:
        self._boot_id = _boot_id()

    def now(self) -> Now:
        return Now(monotonic_s=suspend_aware_monotonic_s(), wall_s=time.time(), boot_id=self._boot_id)
