"""The only place with calls that exist on one operating system alone. Torch-free.

Each module offers the same functions; the rest of the worker imports them from here.
"""

from __future__ import annotations

import sys

if sys.platform == "linux":
    from starlings_worker.platform.linux import (
        die_with_parent,
        machine_id,
        memory_available_bytes,
        memory_kills,
        start_options,
        stop_signals,
    )
elif sys.platform == "win32":
    from starlings_worker.platform.win32 import (
        die_with_parent,
        machine_id,
        memory_available_bytes,
        memory_kills,
        start_options,
        stop_signals,
    )
else:
    from starlings_worker.platform.darwin import (
        die_with_parent,
        machine_id,
        memory_available_bytes,
        memory_kills,
        start_options,
        stop_signals,
    )

__all__ = [
    "die_with_parent",
    "machine_id",
    "memory_available_bytes",
    "memory_kills",
    "start_options",
    "stop_signals",
]
