"""Where the profile of a job's model comes from: its prepared directory, an earlier measurement, or a new one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import platformdirs

from starlings import children
from starlings.directories import job_directory, jobs_root
from starlings.failures import CommandError, ExitCode
from starlings_job.errors import NotPrepared
from starlings_job.prepared import JOB_FILE, is_prepared, load_prepared, load_profile
from starlings_job.profile import FORMAT, Profile, ProfileError
from starlings_job.spec import JobSpec, load_job

# Configurations are small, and weights are not looked at.
_CONFIG_LIMIT_BYTES = 4 << 20


def job_file(job: Path) -> Path:
    """The job file that the argument means: a file, a directory with job.toml, or a prepared job's name.

    Raises:
        CommandError: none of them.
    """
    for candidate in (job, job / JOB_FILE, jobs_root() / job / JOB_FILE):
        if candidate.is_file():
            return candidate
    raise CommandError(
        f"{job} is no job file, no directory with one, and no prepared job's name; `starlings init` writes a job file.",
        ExitCode.USAGE,
    )


def profile_file(path: Path, progress: children.Progress) -> tuple[JobSpec, Path]:
    """The job and the file with its model's profile; measures the model (in a child, with torch) where nobody has.

    Raises:
        JobFileError, CommandError: the job file or its model cannot be used; torch is needed and not there.
    """
    job = load_job(path)
    for directory in (path.parent, job_directory(job.job.name)):
        if is_prepared(directory) and _is_prepared_for(directory, job):
            return job, directory / "profile.json"
    cached = _cache() / f"{_digest(job, path.parent)}.json"
    if not _usable(cached):
        cached.parent.mkdir(parents=True, exist_ok=True)
        arguments = {"job_file": os.path.abspath(path), "out": os.path.abspath(cached)}
        children.run_heavy("profile", arguments, log=2, progress=progress)
    return job, cached


def _is_prepared_for(directory: Path, job: JobSpec) -> bool:
    try:
        load_prepared(directory, job)
        load_profile(directory)
    except NotPrepared:
        return False
    return True


def _cache() -> Path:
    return Path(platformdirs.user_cache_dir("starlings", appauthor=False)) / "profiles"


def _usable(path: Path) -> bool:
    try:
        Profile.from_json(path.read_bytes())
    except (OSError, ProfileError):
        return False
    return True


def _digest(job: JobSpec, base: Path) -> str:
    """Over all that a profile depends on."""
    what: dict[str, Any] = {
        "format": FORMAT,
        "model": job.model.model_dump(mode="json", by_alias=True),
        "unties": job.unties,
        "trainable": list(job.train.trainable),
        "sequence_length": job.data.sequence_length,
        "config": _config(job.model.config or job.model.from_, base),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _config(named: str | None, base: Path) -> str:
    if named is None:
        return ""
    path = base / Path(named).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(_CONFIG_LIMIT_BYTES)).hexdigest()
    except OSError:
        # The measurement says what is wrong with it.
        return ""
