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
_TRIES = 5
_TRY_AGAIN_S = 0.02


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


class CannotLock(WorldError):
    """The file system of the directory knows no locks, so nobody could know whether another process works there."""

    exit_code = ExitCode.USAGE

    def __init__(self, directory: Path, cause: OSError) -> None:
        super().__init__(
            f"{directory} lies on a file system without file locks ({cause.strerror}): give a --dir on a local disk."
        )


def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Raises OSError: this file system has no locks."""
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
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _lock_soon(descriptor: int) -> bool:
    """`holder_of` of another process may have the lock for a moment: worth a few tries."""
    for _ in range(_TRIES - 1):
        if _try_lock(descriptor):
            return True
        time.sleep(_TRY_AGAIN_S)
    return _try_lock(descriptor)


def holder_of(directory: Path, *, name: str = "lock") -> Holder | None:
    """Who has the directory's lock right now; None when nobody has. Changes nothing.

    On Linux the answer is right across containers too: a lock belongs to the file, whoever looks at it.

    Raises:
        OSError: the lock may not be read.
    """
    path = directory / name
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if _try_lock(descriptor, shared=True):
            _unlock(descriptor)
            return None
    except OSError:
        return None  # no locks here: nobody can hold one
    finally:
        os.close(descriptor)
    return _read_holder(path) or Holder("another process", 0, time.time())


def _unlock(descriptor: int) -> None:
    """Closing alone would do, but on Windows some time later."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _LOCKED_OFFSET_BYTES, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)


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
        CannotLock: its file system has no locks.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, *, name: str = "lock", refuse_copies: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / name
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            locked = _lock_soon(self._descriptor)
        except OSError as error:
            self._give_up()
            raise CannotLock(directory, error) from None
        if not locked:
            self._give_up()
            raise DirectoryInUse(directory, _read_holder(self.path))
        inode = os.fstat(self._descriptor).st_ino
        before = _read_holder(self.path)
        if refuse_copies and before is not None and _may_live_elsewhere(before, inode):
            self._give_up()
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

    def _give_up(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """The file stays: removing it would let two processes hold locks on two files of one name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self._give_up()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
