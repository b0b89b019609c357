"""Child processes that never outlive this one, and heavy steps that run in them.

`starlings` itself must stay light, so whatever needs torch or transformers runs as `python -m
starlings.heavy`; it reports progress as JSON lines on stdout, which also makes Ctrl-C and exit codes work as
people expect.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from starlings.failures import CommandError, ExitCode

TERMINATE_AFTER_S = 10.0
TAIL_LINES = 15

Progress = Callable[[Mapping[str, Any]], None]


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    log: IO[bytes] | int,
    environment: Mapping[str, str] | None = None,
    read_output: bool = False,
    through: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments...` with a stdin pipe that ends with this process, in a session of
    its own.

    The own session keeps the terminal's Ctrl-C with us: we decide in which order children end. With
    `read_output` the child's stdout is a pipe, otherwise it goes to `log` like stderr. `through` is a command that
    becomes the child, such as `ip netns exec NAME`.
    """
    return subprocess.Popen(
        [*through, sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if read_output else log,
        stderr=log,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes], *, within_s: float = TERMINATE_AFTER_S) -> int:
    """Closes the child's stdin, asks it to end, and kills it when it does not; returns its exit status."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
    status = process.wait()
    if process.stdout is not None:
        process.stdout.close()
    return status


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log file, or a note that there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def json_lines(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream, one per line; whatever else a library prints there is passed over."""
    for line in stream:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def run_heavy(
    step: str, arguments: Mapping[str, Any], *, log: IO[bytes] | int, progress: Progress
) -> dict[str, Any]:
    """Runs one step of `starlings.heavy` in a child and returns its result.

    Raises:
        CommandError: the step failed; carries the child's sentence and exit code.
    """
    process = spawn("starlings.heavy", [step, json.dumps(arguments)], log=log, read_output=True)
    assert process.stdout is not None
    failure: CommandError | None = None
    result: dict[str, Any] | None = None
    try:
        for record in json_lines(process.stdout):
            match record:
                case {"result": dict(found)}:
                    result = found
                case {"error": str(message), "exit_code": int(code)}:
                    failure = CommandError(message, code)
                case {"progress": dict(news)}:
                    progress(news)
        status = process.wait()
    finally:
        end(process)
    if failure is not None:
        raise failure
    if status == 0 and result is not None:
        return result
    cause = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    hint = " (out of memory?)" if status == -9 else ""
    raise CommandError(
        f"The step '{step}' {cause}{hint}; see the lines above for what it said.", ExitCode.BUG
    )
