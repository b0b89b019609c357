"""What the owner may choose when starting a coordinator, and who is told what it does."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Workers say goodbye within this time after the job has ended; then the coordinator leaves all the same.
LINGER_S = 20.0
STATUS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Everything left out comes from the job file.

    Attributes:
        directory: the prepared job's directory; the log, the CA and the checkpoints are kept in it.
        job_file: read instead of the copy in `directory`; needed when the directory is not prepared yet.
        listen_host: address of this machine to listen on; "" = all.
        control_port, enrolment_port, keeper_port, relay_port: 0 = any free one. The keeper's default is the control
            port + 3, the relay's + 4.
        advertise: hosts for invites and for the keeper's addresses.
        store_url: `postgresql://...` instead of the SQLite file in `directory`.
        invite_lifetime_s, invite_uses: of the first invite; 0 = a day, any number. `first_invite` False: none is made.
        linger_s: how long to wait for workers to leave after the job has ended.
    """

    directory: Path
    job_file: Path | None = None
    listen_host: str = ""
    control_port: int | None = None
    enrolment_port: int | None = None
    keeper_port: int | None = None
    relay_port: int | None = None
    advertise: tuple[str, ...] = ()
    store_url: str | None = None
    first_invite: bool = True
    invite_lifetime_s: float = 0.0
    invite_uses: int = 0
    linger_s: float = LINGER_S


class Observer(Protocol):
    """Told in the event loop's thread; must not block.

    Kinds and fields: `listening` (job, directory, control, enrolment, pin, and of the first invite: invite, invite_id,
    invite_expires_s); `keeper` (addresses, versions), again after each of its restarts; `announce` (kind, text): a line
    of the event log; `status` (phase, step, steps_total, tokens, tokens_per_second, loss, waiting_for, line), at most
    every `STATUS_EVERY_S` and when it changed; `ending` (reason): a signal came; `ended` (exit_code, reason): the job.
    """

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None: ...


def silent(kind: str, fields: Mapping[str, Any]) -> None:
    """Tells nobody."""


def json_lines(kind: str, fields: Mapping[str, Any]) -> None:
    """One JSON object per line on standard output: {"event": kind, ...}. An announcement's own kind is in "kind"."""
    line = json.dumps({"event": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    print(line, file=sys.stdout, flush=True)


FILE_LIMIT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running coordinator listens. Written to `owner/coordinator.json` for the commands of this machine."""

    # "host:port", the first for commands on this very machine.
    control: tuple[str, ...]
    enrolment: tuple[str, ...]
    process_id: int

    def to_json(self) -> bytes:
        record = {"control": self.control, "enrolment": self.enrolment, "process_id": self.process_id}
        return json.dumps(record, indent=1).encode()

    @classmethod
    def of_killed(cls, file: Path) -> Endpoints | None:
        """Of a coordinator that was killed, and so left its file behind; None when there is none, or it is damaged."""
        try:
            with file.open("rb") as opened:
                record = json.loads(opened.read(FILE_LIMIT_BYTES))
            return cls(tuple(record["control"]), tuple(record["enrolment"]), int(record["process_id"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def port_of(addresses: tuple[str, ...]) -> int:
    """The port of the first address; 0 when there is none."""
    port = addresses[0].rpartition(":")[2] if addresses else ""
    return int(port) if port.isascii() and port.isdigit() and int(port) < 1 << 16 else 0
