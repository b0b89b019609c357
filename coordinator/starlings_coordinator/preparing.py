"""A job that is not prepared yet is prepared in a child, so that torch never comes into the coordinator's process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from starlings_job.prepared import is_prepared
from starlings_protos.errors import ExitCode, StarlingsError, UsageError

_CODE = """
import sys
from starlings_job.errors import JobError
from starlings_job.prepare import prepare
try:
    prepare(sys.argv[1], sys.argv[2])
except JobError as error:
    sys.exit((print(error, file=sys.stderr), error.exit_code)[1])
"""


class PreparationFailed(StarlingsError):
    """`starlings prepare` said why; its exit code is ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def ensure_prepared(directory: Path, job_file: Path | None) -> None:
    """Prepares `job_file` into `directory` unless that is prepared. Blocks, maybe for minutes.

    Raises:
        UsageError: not prepared, and it cannot be done here.
        PreparationFailed: it was tried.
    """
    if is_prepared(directory):
        return
    if job_file is None:
        raise UsageError(
            f"{directory} is not prepared: give its job file, or run `starlings prepare JOB.TOML`."
        )
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            f"{directory} is not prepared, and that needs torch, which is not installed here: run `starlings prepare "
            f'{job_file}` on a machine with "starlings[worker]" and copy the directory here.'
        )
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(job_file.absolute()), str(directory.absolute())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise PreparationFailed(
            lines[-1] if lines else f"The preparation ended with status {done.returncode}.",
            done.returncode if done.returncode > 0 else ExitCode.BUG,
        )
