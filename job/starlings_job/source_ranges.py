"""Which training samples are of which source of the text: `sources.json` of a prepared directory. Torch-free.

A source is what people would call one: of files in several folders each folder (the first one below what all of them
share), and each file that lies in none. A sample belongs to the source of its first token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from starlings_job.errors import NotPrepared

SOURCES_FILE = "sources.json"
FORMAT = 1
# Neighbours by name are joined where there are more.
SOURCES_MOST = 512
_LIMIT_BYTES = 1 << 20
_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Training samples `first` to `first` + `samples` - 1."""

    name: str
    first: int
    samples: int


def source_names(names: Sequence[str]) -> list[str]:
    """The source of each of some documents, by their names, which are relative paths with forward slashes."""
    parts = [PurePosixPath(name).parts for name in names]
    shared = 0
    while all(len(own) > shared + 1 for own in parts) and len({own[shared] for own in parts}) == 1:
        shared += 1
    found = [own[shared] for own in parts]
    distinct = sorted(set(found))
    if len(distinct) <= SOURCES_MOST:
        return found
    joined = {name: place * SOURCES_MOST // len(distinct) for place, name in enumerate(distinct)}
    firsts: dict[int, str] = {}
    for name in distinct:
        firsts.setdefault(joined[name], f"{name} and after")
    return [firsts[joined[name]] for name in found]


def write_sources(directory: Path, sources: Sequence[SourceRange]) -> None:
    """Raises OSError when the disk is full."""
    rows = [[source.name[:_NAME_CHARACTERS], source.first, source.samples] for source in sources]
    text = json.dumps({"format": FORMAT, "sources": rows}, indent=0) + "\n"
    (directory / SOURCES_FILE).write_text(text, "utf-8")


def read_sources(directory: Path, population: int) -> tuple[SourceRange, ...]:
    """Of a prepared directory with so many training samples; they lie one after another, and each sample is in one.

    Raises:
        NotPrepared: an older version prepared it, or the file is malformed.
    """
    path = directory / SOURCES_FILE
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise ValueError("it is too large")
        record = json.loads(path.read_bytes())
        if record["format"] != FORMAT:
            raise ValueError("it is of another version")
        sources = tuple(
            SourceRange(str(name), int(first), int(count)) for name, first, count in record["sources"]
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotPrepared(
            f"{path} does not say which samples are of which source ({error}), and [data] skew needs that: prepare the "
            "job again, into a new directory"
        ) from None
    at = 0
    for source in sources:
        if source.first != at or source.samples < 1:
            raise NotPrepared(f"{path} has a gap: prepare the job again, into a new directory")
        at += source.samples
    if at != population:
        raise NotPrepared(f"{path} is of other samples: prepare the job again, into a new directory")
    return sources
