"""How a supervisor starts its children: a module of ours, told who its parent is, with pipes to talk through."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import BinaryIO

from starlings_worker.platform import start_options


async def start_child(module: str, log: BinaryIO) -> asyncio.subprocess.Process:
    """`python -m module PID-OF-THIS-PROCESS`, which speaks `pipes` over its standard input and output.

    Args:
        log: its standard error; may be closed afterwards.

    Raises:
        OSError: it cannot be started.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        **start_options(),
    )
