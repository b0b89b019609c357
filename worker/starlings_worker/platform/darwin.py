"""macOS, and other systems with POSIX signals."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from typing import Any

import psutil

_LOOK_EVERY_S = 2.0


def die_with_parent(parent_pid: int) -> None:
    """End this process soon after its parent; there is no such order to the kernel here, so a thread
    looks.
    """

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent_pid:
            never.wait(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def start_options() -> dict[str, Any]:
    """For `subprocess`: the child gets a session of its own, so that Ctrl-C in a terminal reaches only the
    supervisor.
    """
    return {"start_new_session": True}


def stop_signals() -> tuple[signal.Signals, ...]:
    return (signal.SIGINT, signal.SIGTERM)


def machine_id() -> str:
    """The same for every process of this machine, and different elsewhere."""
    return f"{uuid.getnode():012x}"


def memory_available_bytes() -> int:
    """What could be allocated now."""
    return int(psutil.virtual_memory().available)


def memory_kills() -> int:
    """How often the kernel killed for want of memory; -1 because this system does not say."""
    return -1
