"""Fresh memory for large messages: in huge pages where the system has them, as touching it costs a third then."""

from __future__ import annotations

import contextlib
import mmap

# Below, allocators reuse what they have.
_MAPPED_BYTES = 4 << 20


def fresh(length: int) -> memoryview:
    """Writable zeros. Memory is taken as it is touched, and given back when nobody refers to it any more."""
    if length < _MAPPED_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(bytearray(length))
    mapped = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)
