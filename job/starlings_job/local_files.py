"""The few operations on a local disk that a checkpoint rests on, and what each of them makes durable.

All of them are methods of one object, so that a test can count them, let each fail, and work out what a crash leaves.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

# A folder cannot be synced on every file system; there, renames are as durable as they get.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


class NewFile(Protocol):
    def write(self, data: bytes | memoryview, /) -> int: ...


class LocalFiles:
    """Every method raises OSError."""

    def make_folder(self, path: str) -> None:
        """Parents too; harmless when it is there."""
        os.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def new_file(self, path: str) -> Iterator[NewFile]:
        """A file whose bytes, though not its name, are durable when the block ends without an error."""
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        """A file, or a folder to a name that nothing has. Durable after `sync_folder`."""
        os.replace(old, new)

    def remove_file(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """Makes what was created, renamed and removed in a folder durable."""
        flags = getattr(os, "O_DIRECTORY", None)
        if flags is None:  # Windows: no such thing
            return
        handle = os.open(path, os.O_RDONLY | flags)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            os.close(handle)

    def remove_tree(self, path: str) -> None:
        """Harmless when it is not there. A crash may leave a part."""
        try:
            names = sorted(os.listdir(path))
        except FileNotFoundError:
            return
        for name in names:
            inside = os.path.join(path, name)
            if os.path.isdir(inside) and not os.path.islink(inside):
                self.remove_tree(inside)
            else:
                self.remove_file(inside)
        self.remove_folder(path)


LOCAL = LocalFiles()


def sync_folder(path: str | Path) -> None:
    """Makes renames in a folder durable, where the system can. Raises OSError."""
    LOCAL.sync_folder(os.fspath(path))
