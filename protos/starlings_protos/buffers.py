"""Memory for large messages. Touching fresh pages costs more than encoding into them: so buffers of a few megabytes are
used again, and larger ones lie in huge pages where the system has any, as touching them costs a third then.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from collections import deque

# Below, allocators reuse what they have.
_MAPPED_BYTES = 256 << 10
_HUGE_BYTES = 4 << 20
# Lengths are rounded up to a multiple, so that parts of almost one size share buffers.
_STEP_BYTES = 64 << 10
# What is kept in all while nobody uses it: a process that trains has better uses for more.
KEPT_BYTES = 16 << 20

# Not in use, the latest last. Changed by finalizers, which run in any thread at any moment: atomic operations only.
_kept: deque[mmap.mmap] = deque()


def fresh(length: int) -> memoryview:
    """Writable memory with anything in it. On Linux it is taken from the system as it is touched, so that a promise of
    many bytes costs nothing yet. It is given back, or used again, when nobody refers to it any more.
    """
    if sys.platform != "linux" or length < _MAPPED_BYTES:
        return memoryview(bytearray(length))
    size = -(-length // _STEP_BYTES) * _STEP_BYTES
    mapped = _again(size) or _mapped(size)
    # Views refer to this array, and it dies with the last of them.
    whole = (ctypes.c_ubyte * length).from_buffer(mapped)
    weakref.finalize(whole, _give_back, mapped).atexit = False
    return memoryview(whole).cast("B")


class Arriving:
    """A number of bytes that come piece by piece; memory is taken as they come."""

    def __init__(self, length: int) -> None:
        self.missing_bytes = length
        self._length = length
        self._whole: memoryview | None = None
        # Where memory that nobody has touched yet would cost as much as any other.
        self._grown = bytearray()

    def add(self, piece: memoryview) -> int:
        """Takes as much of the piece as is missing; returns how many bytes that is."""
        piece = piece[: self.missing_bytes]
        if self._whole is None and sys.platform == "linux" and not self._grown:
            with contextlib.suppress(OSError):  # no room for all of it; perhaps it never comes
                self._whole = fresh(self._length)
        if self._whole is None:
            self._grown += piece
        else:
            start = self._length - self.missing_bytes
            self._whole[start : start + len(piece)] = piece
        self.missing_bytes -= len(piece)
        return len(piece)

    def view(self) -> memoryview:
        """All of it. Nothing may be missing."""
        assert not self.missing_bytes, f"{self.missing_bytes} bytes have not come yet"
        return memoryview(self._grown) if self._whole is None else self._whole


def _mapped(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        raise AssertionError("elsewhere memory is taken otherwise")
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_BYTES:
        with contextlib.suppress(OSError, AttributeError):  # a system without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _again(size: int) -> mmap.mmap | None:
    for mapped in reversed(tuple(_kept)):
        if len(mapped) == size:
            with contextlib.suppress(ValueError):  # another thread was faster
                _kept.remove(mapped)
                return mapped
    return None


def _give_back(mapped: mmap.mmap) -> None:
    if len(mapped) > KEPT_BYTES:
        return
    _kept.append(mapped)
    # The oldest go: sizes that are not asked for any more.
    while sum(len(kept) for kept in tuple(_kept)) > KEPT_BYTES:
        with contextlib.suppress(IndexError):
            _kept.popleft()
