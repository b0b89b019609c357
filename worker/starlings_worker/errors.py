"""What can go wrong in a worker."""

from __future__ import annotations

from starlings_protos.errors import ExitCode, StarlingsError

__all__ = ["EngineFault", "ExitCode", "WorkerError"]


class WorkerError(StarlingsError):
    """Ends the worker with `exit_code`; the text is one sentence for people and names the fix."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineFault(Exception):
    """An effect could not be carried out, but the engine lives on; the core is told."""
