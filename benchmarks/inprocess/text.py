"""The text that everybody trains on, prepared once, and its records as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlings import template
from starlings_job.data.batch import Batch, decode_records
from starlings_job.description import ModelDescription
from starlings_job.prepare import prepare
from starlings_job.prepared import load_prepared
from starlings_job.records import RecordStore


class Text:
    """Batches of the standard library's sources, and the model that is to learn them."""

    def __init__(
        self,
        directory: Path,
        *,
        preset: str = "micro",
        held_out: int = 512,
        limit: str = "8M",
        source: str = "stdlib",
    ) -> None:
        """Prepares a folder of `directory`, unless that was done before with the same settings.

        Args:
            source, limit: as in `[data]`.
        """
        directory = directory / f"{preset}-{limit}-{held_out}"
        directory.mkdir(parents=True, exist_ok=True)
        job_file = directory / "job.toml"
        sections = {
            "job": {"name": "in-process", "seed": 0, "tokens": 1_000_000},
            "model": {"preset": preset},
            "data": {"source": source, "limit": limit, "held_out": held_out},
        }
        job_file.write_text(template.render(sections, comments=False), "utf-8")
        prepare(job_file, directory / "prepared")
        self._open(directory / "prepared")

    @classmethod
    def opened(cls, prepared: Path) -> Text:
        """What another process has prepared (`Text.prepared`); any number of processes may read it."""
        text = cls.__new__(cls)
        text._open(prepared)
        return text

    def _open(self, prepared: Path) -> None:
        self.prepared = prepared
        job = load_prepared(prepared)
        self.description: ModelDescription = job.description
        self.meta = job.dataset
        self._store = RecordStore(self.prepared)

    @property
    def population(self) -> int:
        return self._store.population

    def batch(self, samples: Sequence[int]) -> Batch:
        return decode_records(self._store.read(samples), self.meta)

    def target_count(self, samples: Sequence[int]) -> int:
        return self._store.target_count(samples)

    def held_out(self, count: int, microbatch: int) -> list[Batch]:
        """The first `count` held-out samples, in batches."""
        count = min(count, self._store.held_out_count)
        starts = range(0, count, microbatch)
        return [
            decode_records(self._store.read_held_out(range(s, min(s + microbatch, count))), self.meta)
            for s in starts
        ]

    def close(self) -> None:
        self._store.close()
