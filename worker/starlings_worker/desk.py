"""The worker's side of `local_files`: says what the worker does, and hears what commands of this machine ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from starlings_worker.local_files import (
    LEAVE_FILE,
    LOOK_EVERY_S,
    REPORT_FILE,
    Phase,
    Request,
    Running,
    forget_requests,
    new_life,
    read_request,
    write_running,
)
from starlings_worker.options import WorkerEvent

_PHASES = {
    "connected": Phase.READY,
    "reconnecting": Phase.INTERRUPTED,
    "engine_down": Phase.INTERRUPTED,
    "leaving": Phase.LEAVING,
}
# Comes with every step: not worth a write each second for weeks.
_FREQUENT = frozenset({"step"})


class Desk:
    """Of one life of one device's worker, whose directory is locked. Failing to write never ends a worker."""

    def __init__(self, directory: Path, leave_within_s: float) -> None:
        self._directory = directory
        self._running = new_life(leave_within_s)
        self._changed = True
        # What an earlier life did not come to see.
        forget_requests(directory)
        self._write(self._running)

    def heard(self, event: WorkerEvent) -> None:
        """Something happened that people are told of. Called on the event loop; writes nothing by itself."""
        leaving = self._running.phase is Phase.LEAVING
        if event.kind in _FREQUENT and not leaving:
            return
        phase = self._running.phase if leaving else _PHASES.get(event.kind, self._running.phase)
        self._running = replace(
            self._running, phase=phase, text=event.text, worker_id=event.worker_id or self._running.worker_id
        )
        self._changed = True

    async def serve(self, leave: Callable[[bool], None]) -> None:
        """Looks for requests about once a second, until cancelled; calls `leave(now)` for those to this life."""
        while True:
            for name, request in await asyncio.to_thread(self._take):
                if request.life != self._running.life:
                    continue
                self._running = replace(self._running, answered=request.id)
                self._changed = True
                if name == LEAVE_FILE:
                    leave(request.now)
            if self._changed:
                said = self._running
                written = await asyncio.to_thread(self._write, said)
                self._changed = not written or self._running is not said
            await asyncio.sleep(LOOK_EVERY_S)

    def end(self, exit_code: int) -> None:
        """The last word, while the directory is still locked."""
        self._running = replace(self._running, phase=Phase.ENDED, exit_code=exit_code)
        self._write(self._running)
        forget_requests(self._directory)

    def _take(self) -> list[tuple[str, Request]]:
        """The requests that lie there; they are gone then."""
        found = []
        for name in (REPORT_FILE, LEAVE_FILE):
            # One that cannot be read (yet) stays; the next life deletes it.
            if (request := read_request(self._directory / name)) is not None:
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()
                found.append((name, request))
        return found

    def _write(self, running: Running) -> bool:
        with contextlib.suppress(OSError):  # a full disk: tried again at the next look
            write_running(self._directory, running)
            return True
        return False
