"""One process per directory: an advisory lock that the system drops when its holder ends, however it ends.

The file also names its holder, so that whoever is refused can say "in use by HOST since TIME".
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Windows locks byte ranges and forbids others to read them: lock one far behind the text.
_LOCKED_OFFSET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Holder:
    host: str
    process_id: int
    since_wall_s: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_wall_s))
        return f"{self.host} (process {self.process_id}) since {since}"


class DirectoryInUse(Exception):
    """Another process works in the directory."""

    def __init__(self, directory: Path, holder: Holder | None) -> None:
        self.directory = directory
        self.holder = holder
        super().__init__(f"{directory} is in use by {holder or 'another process'}")


def _try_lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _LOCKED_OFFSET_BYTES, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    else:
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _read_holder(path: Path) -> Holder | None:
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
        return Holder(str(fields["host"]), int(fields["process_id"]), float(fields["since_wall_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # being written right now, or by something else


class DirectoryLock:
    """Held from construction until `release` or the end of the process.

    Raises:
        DirectoryInUse: another process holds it.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, *, name: str = "lock") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / name
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _try_lock(self._descriptor):
            os.close(self._descriptor)
            self._descriptor = None
            raise DirectoryInUse(directory, _read_holder(self.path))
        holder = {"host": socket.gethostname(), "process_id": os.getpid(), "since_wall_s": time.time()}
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps(holder).encode())

    def release(self) -> None:
        """The file stays: removing it would let two processes hold locks on two files of one name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
