"""A prepared directory: what `starlings prepare` wrote, read by coordinator, keeper and export. Torch-free.

| file | what |
| --- | --- |
| job.toml | the job file as it was |
| model.json, dataset.json, profile.json | the resolved model, the records' format, what each block costs |
| tokens.bin, held_out.bin (mask.bin, held_out_mask.bin) | records, see `records.py` |
| tokenizer/ | files that transformers' AutoTokenizer loads |
| sources.json | which training samples are of which source, see `source_ranges.py` |
| weights/ | version 0, a checkpoint of parameters only, see `checkpoint.py` |
| prepared.json | written last: without it the directory is not prepared |
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from starlings_job.errors import NotPrepared
from starlings_job.profile import Profile, ProfileError
from starlings_job.spec import JobSpec, PreparedSection, load_job

FORMAT = 1
JOB_FILE = "job.toml"
PREPARED_FILE = "prepared.json"
WEIGHTS = "weights"
CHECKPOINTS = "checkpoints"
_JSON_LIMIT_BYTES = 16 << 20


def is_prepared(directory: str | Path) -> bool:
    """Whether a preparation was completed there, of whatever job."""
    return (Path(directory) / PREPARED_FILE).is_file()


def load_prepared(directory: str | Path, job: JobSpec | None = None) -> JobSpec:
    """The job of a prepared directory, with its `description` and `dataset`.

    Args:
        job: a job file read elsewhere, whose settings count; the directory's own copy when left out.

    Raises:
        NotPrepared: the directory is not prepared, or for another [model], [data], seed or trainable.
        JobFileError: a file of it is malformed, or the model cannot be cut as the job says.
    """
    directory = Path(directory)
    if not is_prepared(directory):
        raise NotPrepared(f"{directory} is not prepared: run `starlings prepare` on the job file first")
    stamp = _read_json(directory / PREPARED_FILE)
    if stamp.get("format") != FORMAT:
        raise NotPrepared(f"{directory} was prepared by another version: prepare a new directory")
    job = job or load_job(directory / JOB_FILE)
    if stamp.get("preparation_digest") != job.preparation_digest():
        raise NotPrepared(
            f"{directory} was prepared for another job: [model], [data], [job] seed or [train] trainable have "
            "changed since; prepare into another directory (--dir), or delete this one"
        )
    section = PreparedSection(
        model=_read_json(directory / "model.json"), dataset=_read_json(directory / "dataset.json")
    )
    job = job.model_copy(update={"prepared": section})
    # Checked now, so that later uses cannot fail.
    _ = job.description, job.dataset
    job.check_cut(job.description.blocks)
    return job


def load_profile(directory: str | Path) -> Profile:
    """Raises NotPrepared when absent or malformed."""
    path = Path(directory) / "profile.json"
    try:
        return Profile.from_json(path.read_bytes())
    except (OSError, ProfileError) as error:
        raise NotPrepared(f"{path}: {error}; prepare the job again") from None


def weights_url(directory: str | Path) -> str:
    """Where version 0 lies, for `checkpoint.read_block`."""
    return os.path.abspath(Path(directory) / WEIGHTS)


def checkpoint_url(directory: str | Path, job: JobSpec) -> str:
    """Where the job's checkpoints go: `[checkpoint] to`, relative to the job's directory, or its own folder."""
    to = job.checkpoint.to
    if to is not None and "://" in to:
        return to
    return os.path.abspath(Path(directory) / Path(to or CHECKPOINTS).expanduser())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_LIMIT_BYTES:
            raise NotPrepared(f"{path} is too large")
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise NotPrepared(f"{path} is absent or malformed; prepare the job again") from None
    if not isinstance(record, dict):
        raise NotPrepared(f"{path} is malformed; prepare the job again")
    return record
