"""Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent's starting thread ends; called by the child
    itself.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call.
    if os.getppid() != parent_pid:
        os._exit(1)


def start_options() -> dict[str, Any]:
    """For `subprocess`: the child gets a session of its own, so that Ctrl-C in a terminal reaches only the
    supervisor.
    """
    return {"start_new_session": True}


def stop_signals() -> tuple[signal.Signals, ...]:
    return (signal.SIGINT, signal.SIGTERM)


def machine_id() -> str:
    """The same for every process of this machine or container, and different elsewhere."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text:
            # Containers from one image share the file; their host names differ.
            return f"{text}-{socket.gethostname()}"
    return f"{uuid.getnode():012x}"


def memory_available_bytes() -> int:
    """What could be allocated now, within this process's control group too."""
    return min(psutil.virtual_memory().available, _group_headroom_bytes())


def memory_kills() -> int:
    """How often the kernel's out-of-memory killer struck within this control group, or on the machine; -1
    unknown.
    """
    for path in (_group_directory() / "memory.events", Path("/sys/fs/cgroup/memory/memory.oom_control")):
        count = _counter(path, "oom_kill")
        if count is not None:
            return count
    count = _counter(Path("/proc/vmstat"), "oom_kill")
    return -1 if count is None else count


def _counter(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _group_directory() -> Path:
    """This process's control group (version 2)."""
    try:
        text = Path("/proc/self/cgroup").read_text(encoding="ascii")
    except OSError:
        return Path("/sys/fs/cgroup")
    for line in text.splitlines():
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup") / line[3:].lstrip("/")
    return Path("/sys/fs/cgroup")


def _group_headroom_bytes() -> int:
    """Limit minus use of the narrowest control group above this process; huge without one."""
    headroom = 1 << 62
    directory = _group_directory()
    root = Path("/sys/fs/cgroup")
    while True:
        limit, used = _number(directory / "memory.max"), _number(directory / "memory.current")
        if limit is not None and used is not None:
            # The page cache counts as used there, but gives way.
            cache = _counter(directory / "memory.stat", "inactive_file") or 0
            headroom = min(headroom, max(0, limit - used + cache))
        if directory == root or root not in directory.parents:
            break
        directory = directory.parent
    limit = _number(root / "memory/memory.limit_in_bytes")
    used = _number(root / "memory/memory.usage_in_bytes")
    if limit is not None and used is not None:
        headroom = min(headroom, max(0, limit - used))
    return headroom


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
