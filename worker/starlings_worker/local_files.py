"""How commands of this machine speak with a running worker: small files in its directory, on every system alike.

    running.json   what the worker says of itself, rewritten when something changes (and kept after its end)
    leave.json     a request: leave in order, or at once
    report.json    a request: say that you are alive

A request names the *life* that it is for, a number drawn at each start, so one that an earlier life did not come to see
means nothing to the next. Whoever may write into the directory may ask; all files have mode 0600.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from starlings_protos.private_files import write_private

RUNNING_FILE = "running.json"
LEAVE_FILE = "leave.json"
REPORT_FILE = "report.json"
# How often the worker looks for requests, and writes `running.json` at most.
LOOK_EVERY_S = 1.0
_LIMIT_BYTES = 64 << 10


class Phase(StrEnum):
    """What a worker is about, as far as somebody who looks after a service wants to know."""

    # Joins, starts its engine, looks for the coordinator.
    STARTING = "starting"
    # Welcomed by the coordinator, with an engine: it can work.
    READY = "ready"
    # The stream or the engine is gone; the worker tries again by itself.
    INTERRUPTED = "interrupted"
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Running:
    """One life of a worker, as it says itself."""

    life: str
    process_id: int
    since_wall_s: float
    phase: Phase
    # One sentence for people.
    text: str
    worker_id: str = ""
    # How long leaving in order may take.
    leave_within_s: float = 60.0
    # The newest request that was seen.
    answered: str = ""
    # Of the whole worker, once the phase is ENDED.
    exit_code: int | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Running | None:
        """None when it is nothing that a worker wrote."""
        try:
            fields: Any = json.loads(data)
            code = fields["exit_code"]
            found = cls(
                str(fields["life"]),
                int(fields["process_id"]),
                float(fields["since_wall_s"]),
                Phase(fields["phase"]),
                str(fields["text"]),
                str(fields["worker_id"]),
                float(fields["leave_within_s"]),
                str(fields["answered"]),
                None if code is None else int(code),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        return found if math.isfinite(found.since_wall_s) and math.isfinite(found.leave_within_s) else None


@dataclass(frozen=True, slots=True)
class Request:
    """`leave.json` or `report.json`."""

    # Of the worker that is asked.
    life: str
    id: str
    # Do not finish what is under way.
    now: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Request | None:
        try:
            fields: Any = json.loads(data)
            return cls(str(fields["life"]), str(fields["id"]), fields["now"] is True)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


def read_running(directory: Path) -> Running | None:
    """None when no worker has been at work there, or the file cannot be read."""
    data = _read(directory / RUNNING_FILE)
    return None if data is None else Running.from_json(data)


def write_running(directory: Path, running: Running) -> None:
    """Raises OSError."""
    write_private(directory / RUNNING_FILE, running.to_json())


def new_life(worker_within_s: float) -> Running:
    """Of this process, from now on."""
    return Running(
        secrets.token_hex(8),
        os.getpid(),
        time.time(),
        Phase.STARTING,
        "Starts.",
        leave_within_s=worker_within_s,
    )


def ask_to_leave(directory: Path, running: Running, *, now: bool) -> Request:
    """Raises OSError: no permission, disk full."""
    return _ask(directory / LEAVE_FILE, Request(running.life, secrets.token_hex(8), now))


def ask_to_report(directory: Path, running: Running) -> Request:
    """Raises OSError."""
    return _ask(directory / REPORT_FILE, Request(running.life, secrets.token_hex(8)))


def _ask(path: Path, request: Request) -> Request:
    write_private(path, request.to_json())
    if sys.platform != "win32" and os.geteuid() == 0:
        # An administrator asks a worker that runs as somebody else, who must be able to read it.
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
    return request


def read_request(path: Path) -> Request | None:
    """The request in that file, or None when there is none that can be understood."""
    data = _read(path)
    return None if data is None else Request.from_json(data)


def forget_requests(directory: Path) -> None:
    for name in (LEAVE_FILE, REPORT_FILE):
        with contextlib.suppress(OSError):
            (directory / name).unlink()


def _read(path: Path) -> bytes | None:
    # An absent file is the usual case; on Windows one that is being replaced cannot be opened for a moment.
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_LIMIT_BYTES)
    return None
