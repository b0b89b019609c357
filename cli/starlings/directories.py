"""Where jobs and workers live on this machine, and which one a command means."""

from __future__ import annotations

import json
import re
from pathlib import Path

import platformdirs

from starlings.failures import CommandError, ExitCode

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def jobs_root() -> Path:
    """`<user data>/starlings/jobs`; the folder may not exist yet."""
    return Path(platformdirs.user_data_dir("starlings", appauthor=False)) / "jobs"


def workers_root() -> Path:
    """`<user data>/starlings/workers`: one directory per swarm that this machine has joined."""
    return Path(platformdirs.user_data_dir("starlings", appauthor=False)) / "workers"


def observers_root() -> Path:
    """`<user data>/starlings/observers`: one directory per swarm that this machine may look at."""
    return Path(platformdirs.user_data_dir("starlings", appauthor=False)) / "observers"


def job_directory(job: str) -> Path:
    """The default directory of a job by its name."""
    if not _NAME.fullmatch(job):
        raise CommandError(
            f"'{job}' is not a job name: use letters, digits and . _ -, at most 63.", ExitCode.USAGE
        )
    return jobs_root() / job


def is_prepared(directory: Path) -> bool:
    """True when `starlings prepare` has finished there: its last file is in place."""
    return (directory / "prepared.json").is_file()


def local_jobs() -> list[Path]:
    """Prepared jobs below the default root, sorted by name."""
    root = jobs_root()
    if not root.is_dir():
        return []
    return sorted(d for d in root.iterdir() if is_prepared(d))


def choose_job(job: Path | None) -> Path:
    """The job that an owner's command means: `--job DIR` (or a job's name), else the only local one.

    Raises:
        CommandError: no such job, none at all, or several to choose from.
    """
    if job is not None:
        for candidate in (job, jobs_root() / job):
            if is_prepared(candidate):
                return candidate
        raise CommandError(
            f"{job} holds no prepared job: give the directory that `starlings prepare` wrote, "
            f"or a name in {jobs_root()}.",
            ExitCode.USAGE,
        )
    found = local_jobs()
    if not found:
        raise CommandError(
            f"There is no job on this machine (looked in {jobs_root()}): give --job DIR, "
            "or make one (starlings init, then starlings prepare).",
            ExitCode.USAGE,
        )
    if len(found) > 1:
        names = ", ".join(d.name for d in found)
        raise CommandError(
            f"There are several jobs here ({names}): say which with --job NAME.", ExitCode.USAGE
        )
    return found[0]


def control_address(job_directory: Path) -> str:
    """ "host:port" of the job's running coordinator, as it wrote into its directory.

    Raises:
        CommandError: none runs there, or it left no address.
    """
    path = job_directory / "owner" / "coordinator.json"
    try:
        addresses = json.loads(path.read_text("utf-8"))["control"]
        return str(addresses[0])
    except (OSError, ValueError, LookupError, TypeError):
        raise CommandError(
            f"No coordinator runs for the job in {job_directory}: "
            f"start it with `starlings coordinator {job_directory}`.",
            ExitCode.UNREACHABLE,
        ) from None
