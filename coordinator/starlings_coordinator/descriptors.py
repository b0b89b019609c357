"""File descriptors: every connection is one, and systems give a process few unless it asks for more (1,024 on most)."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

# Kept free of workers: the log's files, the children's pipes, joins under way, and the owner who wants to know.
RESERVED = 64
# Lists what this process has open, on Linux and on macOS.
_OPEN = "/dev/fd"


def raise_descriptor_limit() -> None:
    """The soft limit becomes the hard one; nothing happens where that is not possible."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS says "unlimited" and refuses to give it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shortage() -> str | None:
    """Why no further worker can be served: in words, or None while there are descriptors."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        count = len(os.listdir(_OPEN))
    except OSError as error:
        # Where they cannot be counted nothing is refused; but looking takes a descriptor too.
        count = limit if error.errno == errno.EMFILE else 0
    if count + RESERVED < limit:
        return None
    return f"{count} of its {limit} file descriptors are in use; its owner can raise the limit (ulimit -Hn)"
