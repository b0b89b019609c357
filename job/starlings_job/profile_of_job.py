"""The profile of a job that is not prepared: what its model costs, without text, tokens or weights. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlings_job.data.shapes import SIDE
from starlings_job.description import SHAPES_CLASSES, ModelDescription
from starlings_job.model import measure_profile
from starlings_job.prepare import describe_job
from starlings_job.profile import Profile
from starlings_job.records import IMAGES, TOKENS, DatasetMeta, token_bytes_for
from starlings_job.spec import JobSpec


def profile_of_job(job: JobSpec, base: Path, progress: Callable[[float], None] | None = None) -> Profile:
    """What `starlings prepare` would write to profile.json; paths in the job are relative to `base`.

    Raises:
        JobFileError: the model cannot be read, is not allowed, or cannot be cut as the job says.
    """
    description = describe_job(job, base)
    job.check_cut(description.blocks)
    return measure_profile(description, _records(job, description), progress)


def _records(job: JobSpec, description: ModelDescription) -> DatasetMeta:
    """The format that the records will have; the tokenizer may use fewer tokens than the model knows."""
    if not description.is_language_model:
        return DatasetMeta(IMAGES, 1, 1, 1, SHAPES_CLASSES, image_shape=(1, SIDE, SIDE))
    length = job.data.sequence_length
    return DatasetMeta(
        TOKENS,
        1,
        1,
        length,
        description.vocabulary_size,
        token_bytes=token_bytes_for(description.vocabulary_size),
        stride_tokens=length,
        context_tokens=description.context_tokens,
    )
