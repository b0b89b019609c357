"""What can end a worker, with the exit code of the sheet and one sentence that says whose fault it is and
the fix.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    DONE = 0
    BUG = 1
    USAGE = 2
    UNREACHABLE = 3
    INVITE_WRONG = 4
    EXPIRED = 5
    USED_UP = 6
    REVOKED = 7
    VERSION = 8
    DISK_FULL = 9
    PORT_BUSY = 10
    DIRECTORY_IN_USE = 11
    NO_DATA = 12
    NO_DEVICE = 13
    CAP_REACHED = 14
    CLOCK = 15


class WorkerError(Exception):
    """Ends the worker with `exit_code`; the text is for people and names the fix."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineFault(Exception):
    """An effect could not be carried out, but the engine lives on; the core is told."""
