"""Files that only their owner may read, replaced in one piece: a crash leaves the old bytes or the new ones."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def make_private_directory(directory: Path) -> Path:
    """Creates `directory` (and parents) if absent; a new one is closed to others where the system knows modes."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory


def write_private(path: Path, data: bytes) -> None:
    """Writes `data` to `path` with mode 0600, durably and atomically; the directory must exist.

    Raises:
        OSError: no space, no permission; the previous file is untouched then.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # O_EXCL: never through a link or into a file that somebody prepared.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes a rename last; not every system can open a directory, and those that cannot do it by themselves."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
