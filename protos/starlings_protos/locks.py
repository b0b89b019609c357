"""One process per directory: an advisory lock that the system drops when its holder ends, however it ends.

The file also names its holder, so that whoever is refused can say "in use by HOST since TIME", and its own inode: a
copied directory (which no lock can know of) is told from the original by it. A holder that ends in order empties it.
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

import psutil

from starlings_protos.errors import ExitCode, WorldError

# Windows locks byte ranges and forbids others to read them: lock one far behind the text.
_LOCKED_OFFSET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Holder:
    host: str
    process_id: int
    since_wall_s: float
    # Of the lock's file; 0 = not known.
    inode: int = 0

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_wall_s))
        return f"{self.host} (process {self.process_id}) since {since}"


class DirectoryInUse(WorldError):
    """Another process works in the directory, or (`copied`) in the one that this is a copy of."""

    exit_code = ExitCode.IN_USE

    def __init__(self, directory: Path, holder: Holder | None, *, copied: bool = False) -> None:
        self.directory = directory
        self.holder = holder
        self.copied = copied
        if copied:
            super().__init__(
                f"{directory} is a copy of a directory in use by {holder}. Two machines cannot be one worker: "
                f"give this one a new --dir, or, if the other has ended for good, delete {directory / 'lock'}."
            )
        else:
            super().__init__(
                f"{directory} is in use by {holder or 'another process'}: stop that first, or give another --dir."
            )


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
        return Holder(
            str(fields["host"]),
            int(fields["process_id"]),
            float(fields["since_wall_s"]),
            int(fields.get("inode", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # being written right now, or by something else


def _may_live_elsewhere(holder: Holder, inode: int) -> bool:
    """Whether `holder`, found in a lock that nobody holds here, may be at work in another copy of the directory.

    With the file's own inode in it, it is the original, and its holder died. A renamed host does not matter then: a
    container gets a new name at every start.
    """
    if not holder.inode or holder.inode == inode:
        return False
    return holder.host != socket.gethostname() or psutil.pid_exists(holder.process_id)


class DirectoryLock:
    """Held from construction until `release` or the end of the process.

    Args:
        refuse_copies: also refuse a directory whose lock was copied from elsewhere while held there. Not for
            directories that are restored from backups as a matter of course.

    Raises:
        DirectoryInUse: another process holds it.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, *, name: str = "lock", refuse_copies: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / name
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _try_lock(self._descriptor):
            os.close(self._descriptor)
            self._descriptor = None
            raise DirectoryInUse(directory, _read_holder(self.path))
        inode = os.fstat(self._descriptor).st_ino
        before = _read_holder(self.path)
        if refuse_copies and before is not None and _may_live_elsewhere(before, inode):
            os.close(self._descriptor)
            self._descriptor = None
            raise DirectoryInUse(directory, before, copied=True)
        holder = {
            "host": socket.gethostname(),
            "process_id": os.getpid(),
            "since_wall_s": time.time(),
            "inode": inode,
        }
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps(holder).encode())

    def release(self) -> None:
        """The file stays: removing it would let two processes hold locks on two files of one name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
