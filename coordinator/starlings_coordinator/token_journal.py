"""Where token records are kept: one JSON object per line, appended and synced before anything is answered.

A file of its own beside the CA's key, not the job's log: tokens and the CA live and are backed up together, and the log
may be truncated or moved to another database without touching who may join.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from starlings_coordinator.tokens import TokenCreated, TokenRecord, TokenRedeemed, TokenRevoked, WorkerRevoked
from starlings_protos.errors import UsageError
from starlings_protos.private_files import make_private_directory

_KINDS: dict[str, type[TokenRecord]] = {
    "token_created": TokenCreated,
    "token_redeemed": TokenRedeemed,
    "token_revoked": TokenRevoked,
    "worker_revoked": WorkerRevoked,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}


class TokenJournal(Protocol):
    """What the authority needs of a store."""

    def read(self) -> tuple[TokenRecord, ...]:
        """All records in order."""

    def append(self, records: Sequence[TokenRecord]) -> None:
        """Returns once they are durable; an OSError means that none is."""


class MemoryJournal:
    """For tests and simulations."""

    def __init__(self) -> None:
        self.records: list[TokenRecord] = []

    def read(self) -> tuple[TokenRecord, ...]:
        return tuple(self.records)

    def append(self, records: Sequence[TokenRecord]) -> None:
        self.records.extend(records)


def encode(record: TokenRecord) -> bytes:
    fields = {"kind": _NAMES[type(record)], **dataclasses.asdict(record)}
    return json.dumps(fields, sort_keys=True).encode() + b"\n"


def decode(line: bytes) -> TokenRecord:
    """Raises:
    ValueError: not a record.
    """
    fields: Any = json.loads(line)
    try:
        cls = _KINDS[fields.pop("kind")]
        values = {f.name: fields.pop(f.name) for f in dataclasses.fields(cls)}
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    except (KeyError, AttributeError, TypeError):
        raise ValueError("not a token record") from None
    good: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    if fields or not all(isinstance(v, good[str(kinds[name])]) for name, v in values.items()):
        raise ValueError("not a token record")
    return cls(**values)


class FileJournal:
    """A file with mode 0600; one process at a time (the coordinator holds its directory's lock)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[TokenRecord, ...]:
        """Raises:
        UsageError: the file is damaged elsewhere than in a last line that a crash cut off (which is dropped).
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        complete, _, rest = data.rpartition(b"\n")
        if rest:
            os.truncate(self._path, len(data) - len(rest))
        return self._parse(complete)

    def peek(self) -> tuple[TokenRecord, ...]:
        """The records so far, also while a coordinator appends others: changes nothing.

        Raises:
            UsageError: as `read`.
        """
        try:
            return self._parse(self._path.read_bytes().rpartition(b"\n")[0])
        except FileNotFoundError:
            return ()

    def _parse(self, complete: bytes) -> tuple[TokenRecord, ...]:
        records = []
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                records.append(decode(line))
            except ValueError:
                raise UsageError(
                    f"{self._path} is damaged in line {number}: restore it from a copy, or delete it; then all invites "
                    "are worthless and nobody is revoked any more, but workers that have joined stay."
                ) from None
        return tuple(records)

    def append(self, records: Sequence[TokenRecord]) -> None:
        data = b"".join(encode(record) for record in records)
        if not data:
            return
        make_private_directory(self._path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            length = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, data) != len(data):
                    raise OSError(28, "No space left on device", str(self._path))
                os.fsync(descriptor)
            except OSError:
                # Half a line would spoil the next one.
                os.ftruncate(descriptor, length)
                raise
        finally:
            os.close(descriptor)
