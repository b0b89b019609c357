"""Whose checkpoints lie at a place: two jobs that write to one place would forget each other's versions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from starlings_job.checkpoint import load_manifest, newest_version
from starlings_job.checkpoint_places import open_url
from starlings_job.errors import CheckpointError, JobError

_JOB, _AUTHORITY = "job", "authority"


@dataclass(frozen=True, slots=True)
class Owner:
    """A job as its checkpoints name it: names may be alike, certificate authorities are not."""

    job: str
    # SHA-256 of the authority's public key, as in invites.
    authority: str

    @property
    def facts(self) -> dict[str, str]:
        """For the manifest."""
        return {_JOB: self.job, _AUTHORITY: self.authority}

    def refuse_others(self, url: str, directory: Path) -> None:
        """Checks the newest checkpoint, if there is one.

        What lies inside the job's own directory is the job's, also under a new authority.

        Raises:
            JobError: it is another job's.
            OSError: the storage does not answer.
        """
        _, root, local = open_url(url)
        if local and Path(root).is_relative_to(os.path.abspath(directory)):
            return
        newest = newest_version(url)
        if newest is None:
            return
        try:
            facts = load_manifest(url, newest).facts
        except CheckpointError:
            return  # forgotten meanwhile, by whoever writes here; its next one will be found
        job, authority = str(facts.get(_JOB, self.job)), str(facts.get(_AUTHORITY, self.authority))
        if (job, authority) == (self.job, self.authority):
            return
        whose = (
            f"of the job {job[:64]!r}" if job != self.job else f"of another job that is called {job!r} too"
        )
        raise JobError(
            f"The checkpoints at {url} are {whose}: give this job another place with `[checkpoint] to`, or move those "
            "away. Nothing was changed there."
        )
