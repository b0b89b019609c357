"""Fresh memory for large messages: in huge pages where the system has them, as touching it costs a third then."""

from __future__ import annotations

import contextlib
import mmap
import sys

# Below, allocators reuse what they have.
_MAPPED_BYTES = 4 << 20


def fresh(length: int) -> memoryview:
    """Writable zeros. Memory is taken as it is touched, and given back when nobody refers to it any more."""
    if sys.platform != "linux" or length < _MAPPED_BYTES:
        return memoryview(bytearray(length))
    mapped = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)
