"""What the device was at when its engine ended: a few bytes that outlive the process, however it ended.

The engine notes each microbatch before it is computed, in memory that is mapped from a file: no system call, and what
was written stays when the process is killed. The supervisor reads it afterwards. So a microbatch that brings engines
down is told from bad luck.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from starlings_protos.messages import LeaseKind, MicrobatchKey

FILE = "device_at"
# Whether it counts, kind, step, attempt, index.
_FORMAT = struct.Struct("<BBQII")


class BlackBox:
    """The engine's side. Without a file, or with a full disk, nothing is noted."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                path.write_bytes(bytes(_FORMAT.size))
                with path.open("r+b") as file:
                    self._map = mmap.mmap(file.fileno(), _FORMAT.size)

    @contextlib.contextmanager
    def at(self, key: MicrobatchKey) -> Iterator[None]:
        if self._map is None:
            yield
            return
        # The first byte last: what is there is whole, or does not count.
        note = _FORMAT.pack(1, int(key.kind), key.step, key.attempt, key.index)
        self._map[1:] = note[1:]
        self._map[0] = 1
        try:
            yield
        finally:
            self._map[0] = 0


def take(path: Path) -> MicrobatchKey | None:
    """The supervisor's side, when the engine has ended: the training microbatch that it was at, once."""
    with contextlib.suppress(OSError, struct.error, ValueError):
        counts, kind, step, attempt, index = _FORMAT.unpack(path.read_bytes())
        path.write_bytes(bytes(_FORMAT.size))
        if counts and kind == LeaseKind.TRAIN:
            return MicrobatchKey(LeaseKind(kind), step, attempt, index)
    return None
