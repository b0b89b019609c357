"""Windows."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from typing import Any

import psutil

_LOOK_EVERY_S = 2.0


def die_with_parent(parent_pid: int) -> None:
    """End this process soon after its parent: a thread looks (a process id may be reused, so the start time
    counts).
    """
    try:
        parent = psutil.Process(parent_pid)
    except psutil.NoSuchProcess:
        os._exit(1)

    def watch() -> None:
        never = threading.Event()
        while parent.is_running():
            never.wait(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def start_options() -> dict[str, Any]:
    """For `subprocess`: a process group of its own, so that Ctrl-C in a console reaches only the
    supervisor.
    """
    if sys.platform == "win32":
        import subprocess

        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {}


def stop_signals() -> tuple[signal.Signals, ...]:
    if sys.platform == "win32":
        return (signal.SIGINT, signal.SIGBREAK)
    return (signal.SIGINT,)


def machine_id() -> str:
    """The same for every process of this machine, and different elsewhere."""
    return f"{uuid.getnode():012x}"


def memory_available_bytes() -> int:
    """What could be allocated now."""
    return int(psutil.virtual_memory().available)


def memory_kills() -> int:
    """How often the kernel killed for want of memory; -1 because this system does not say."""
    return -1
