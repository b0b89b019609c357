"""How a command ends badly: one clear sentence with the fix, the sheet's exit code, no traceback.

A traceback is printed only with `--debug` or STARLINGS_DEBUG, and a failure that nobody foresaw says that it
is a bug.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from starlings_protos.errors import ExitCode, StarlingsError
from starlings_protos.locks import DirectoryInUse

__all__ = [
    "INTERRUPTED",
    "READER_GONE",
    "CommandError",
    "ExitCode",
    "debugging",
    "explain",
    "guarded",
    "report",
]

P = ParamSpec("P")
R = TypeVar("R")


# What shells report for Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130
# And for a command into a pipe that nobody reads any more (`| head`): 128 + SIGPIPE.
READER_GONE = 141


class CommandError(StarlingsError):
    """A failure that the user can do something about; its text says what."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)


def debugging() -> bool:
    return os.environ.get("STARLINGS_DEBUG", "") not in ("", "0")


def explain(error: BaseException) -> tuple[str, int]:
    """The sentence and the exit code for any exception that reaches a command's edge.

    Errors of our packages carry `exit_code`; a few of the operating system's are known; all others are bugs.
    """
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return str(error), int(code)
    if isinstance(error, DirectoryInUse):
        return f"{error}: stop it first, or choose another directory with --dir.", ExitCode.IN_USE
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted.", INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _WORKER_PACKAGES:
        return (
            f"This needs {error.name}, which is not installed here: "
            'uv tool install --torch-backend auto "starlings[worker]" (or pip install "starlings[worker]").',
            ExitCode.USAGE,
        )
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                return (
                    f"The disk is full{where}: free some space, or choose another place with --dir.",
                    ExitCode.DISK_FULL,
                )
            case errno.EADDRINUSE:
                return (
                    f"A port is busy{where}: stop what listens there, or choose another port (0 = any).",
                    ExitCode.PORT_BUSY,
                )
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return (
                    f"No permission{where}: choose a place that you may write to with --dir.",
                    ExitCode.USAGE,
                )
            case errno.ENOENT | errno.ENOTDIR | errno.EISDIR:
                return f"{error.strerror}{where}: check the path.", ExitCode.USAGE
    summary = "".join(traceback.format_exception_only(error)).strip()
    return (
        f"This is a bug in Starlings: {summary}. Run again with --debug and report what it prints.",
        ExitCode.BUG,
    )


_WORKER_PACKAGES = frozenset({"torch", "transformers", "tokenizers", "pynvml"})


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe without a reader."""
    if sys.platform == "win32":
        return True  # It cannot be asked; no other pipe of a command's breaks as a rule.
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _let_go_of_output() -> None:
    """What is still in buffers goes nowhere at exit, instead of failing there once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def report(error: BaseException, *, as_json: bool) -> int:
    """Prints the failure (stderr; with `as_json` also an object on stdout) and returns the exit code. Whoever closed
    our output has heard enough, and is told nothing.
    """
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        _let_go_of_output()
        return READER_GONE
    message, code = explain(error)
    if debugging() and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    prefix = "" if code == INTERRUPTED else "starlings: "
    print(f"{prefix}{message}", file=sys.stderr, flush=True)
    if as_json:
        try:
            print(json.dumps({"error": message, "exit_code": int(code)}), flush=True)
        except BrokenPipeError:
            _let_go_of_output()
    return int(code)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Wraps a command so that every failure ends as `report` says. Usage errors of typer pass through."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except (Exception, KeyboardInterrupt) as error:
            code = report(error, as_json=bool(kwargs.get("json_output", False)))
        raise typer.Exit(code)

    return run
