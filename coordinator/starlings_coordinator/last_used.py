"""A job's directory that was copied while its coordinator runs elsewhere: no lock can know, so the other one is asked.

`last_used.json` says where a coordinator is, or was when it was killed; an orderly end takes it away.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from starlings_protos import channels, control_pb2, control_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import ExitCode, WorldError
from starlings_protos.identity import OWNER
from starlings_protos.invite import spoken_time
from starlings_protos.private_files import write_private

FILE = "last_used.json"
ASK_WITHIN_S = 5.0
_ADDRESSES_LIMIT = 16
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class CopyInUse(WorldError):
    """The coordinator of which this directory is a copy still answers."""

    exit_code = ExitCode.IN_USE


@dataclass(frozen=True, slots=True)
class LastUsed:
    host: str
    since_wall_s: float
    # Of the directory, on that host's file system: a copy has another.
    inode: int
    control: tuple[str, ...]


def note_use(directory: Path, control: tuple[str, ...]) -> None:
    """Raises OSError."""
    used = LastUsed(socket.gethostname(), time.time(), os.stat(directory).st_ino, control)
    write_private(directory / FILE, json.dumps(asdict(used)).encode())


def forget_use(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


def read_use(directory: Path) -> LastUsed | None:
    """None when there is none, or nothing that a coordinator wrote."""
    try:
        fields: Any = json.loads((directory / FILE).read_bytes())
        addresses = tuple(str(address) for address in fields["control"])[:_ADDRESSES_LIMIT]
        return LastUsed(str(fields["host"]), float(fields["since_wall_s"]), int(fields["inode"]), addresses)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


async def refuse_copy(directory: Path, job: str) -> str | None:
    """To be called before anything listens. Returns what was assumed, for people, if it was used elsewhere.

    Raises:
        CopyInUse: a coordinator of this very job (by its CA) answers at an address of the last use.
    """
    used = read_use(directory)
    if used is None or (used.host == socket.gethostname() and used.inode == os.stat(directory).st_ino):
        return None  # killed right here: whoever held the lock is gone
    since = spoken_time(used.since_wall_s)
    identity = CertificateAuthority.load_or_create(directory / "ca", job, time.time()).issue_identity(
        OWNER, time.time()
    )

    async def answers(address: str) -> bool:
        try:
            async with channels.control_channel(address, identity) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                await stub.Status(control_pb2.StatusRequest(), timeout=ASK_WITHIN_S)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _UNANSWERED
        except ValueError:
            return False
        return True

    found = await asyncio.gather(*(answers(address) for address in used.control))
    for address, answered in zip(used.control, found, strict=True):
        if answered:
            raise CopyInUse(
                f"{directory} is a copy of a directory in use by {used.host} since {since}, whose coordinator answers "
                f"at {address}. Two coordinators cannot serve one job: stop that one first, then start this again."
            )
    return (
        f"This directory was last used by {used.host} since {since}; no coordinator of this job answers at "
        f"{', '.join(used.control)}, so that one is taken to have ended."
    )
