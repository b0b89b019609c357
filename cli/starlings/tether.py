"""`python -m starlings.tether ...`: the `starlings` command, tied to the life of the process that started it.

The parent holds the write end of this process's stdin and never writes. When the parent goes, for whatever
reason, the pipe ends: the command gets SIGTERM as from a service manager, and is ended for good if it has not
left after `GRACE_S`. On Linux the kernel's parent-death signal covers the time until the watcher runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

GRACE_S = 10.0


def die_with_parent() -> None:
    """Starts watching stdin; returns at once."""
    _ask_kernel()
    # The commands below must not read the pipe: they get an empty stdin, the watcher keeps the real one.
    watched = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    threading.Thread(target=_watch, args=(watched,), name="tether", daemon=True).start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def _ask_kernel() -> None:
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    # A failure only loses the second of two safeguards.
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGTERM), 0, 0, 0)


if __name__ == "__main__":
    die_with_parent()
    from starlings.main import main

    main()
