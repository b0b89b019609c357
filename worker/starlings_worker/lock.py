"""A worker's directory holds its key, so it belongs to one process on one machine at a time."""

from __future__ import annotations

from pathlib import Path

from starlings_protos.locks import DirectoryInUse, DirectoryLock

__all__ = ["DirectoryInUse", "lock_directory"]


def lock_directory(directory: Path) -> DirectoryLock:
    """Takes the directory until `release()` or the end of the process; it is created when absent.

    Raises:
        DirectoryInUse: exit code 11; "in use by HOST since TIME", also in a copy that was made on another
        machine. OSError: the directory cannot be written.
    """
    return DirectoryLock(directory, refuse_copies=True)
