"""What can go wrong with a job, by whose fault it is. `exit_code` follows the sheet of exit codes."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator


class JobError(Exception):
    """Something about a job, its data or its files that the owner can put right; the text says how."""

    exit_code = 2


class JobFileError(JobError):
    """The job file (or the model configuration it points to) says something that cannot be done."""


class NoDataMatched(JobError):
    """`[data] source` names no text, or too little of it."""

    exit_code = 12


class DiskFull(JobError):
    """A file could not be written for lack of space; nothing half-written is left."""

    exit_code = 9


class NotPrepared(JobError):
    """The directory was not written by `starlings prepare`, or for another model or other data."""


class CheckpointError(JobError):
    """A checkpoint is absent, incomplete, or its bytes do not match their hashes."""


class ExportError(JobError):
    """An export cannot be written or read."""


@contextlib.contextmanager
def disk_full_explained(what: str, where: object) -> Iterator[None]:
    """Turns the operating system's "no space left" within the block into `DiskFull`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"The disk is full while writing {what} to {where}: "
                "free some space there or choose another place."
            ) from error
        raise
