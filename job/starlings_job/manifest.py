"""A checkpoint's manifest: size and SHA-256 of every file, digest of every block. What it omits is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from starlings_job.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 64 << 20
_BLOCK = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    name: str
    byte_count: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block's files and the digest of its state. `optimizer` is None at version 0.

    `optimizer_steps`: how many the optimizer has made, where replicas count their own; 0: as many as the version.
    """

    digest: str
    parameters: FileEntry
    optimizer: FileEntry | None
    optimizer_steps: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    blocks: Mapping[str, BlockEntry]
    # What the writer wanted to be known: tokens, job, ...
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def byte_count(self) -> int:
        return sum(f.byte_count for f in self.files)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        pairs = ((b.parameters, b.optimizer) for b in self.blocks.values())
        return tuple(file for pair in pairs for file in pair if file is not None)

    def to_json(self) -> bytes:
        record = {"format": FORMAT, "facts": dict(self.facts), "version": self.version}
        record["blocks"] = {name: asdict(entry) for name, entry in self.blocks.items()}
        return json.dumps(record, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Raises CheckpointError when malformed."""
        try:
            record = json.loads(data)
            if record["format"] != FORMAT:
                raise CheckpointError(f"the checkpoint is not of format {FORMAT}")
            blocks = {}
            for name, entry in record["blocks"].items():
                optimizer = entry["optimizer"]
                blocks[block_name(name)] = BlockEntry(
                    str(entry["digest"]),
                    _file_entry(entry["parameters"]),
                    None if optimizer is None else _file_entry(optimizer),
                    _count(entry.get("optimizer_steps", 0)),
                )
            return cls(_count(record["version"]), blocks, dict(record["facts"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError("the checkpoint's manifest is malformed") from None


def _file_entry(record: Mapping[str, Any]) -> FileEntry:
    name, count, digest = record["name"], record["byte_count"], record["sha256"]
    # A manifest may come from elsewhere: its file names must not lead out of the folder.
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name) or name.startswith("."):
        raise ValueError(name)
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(name)
    return FileEntry(name, _count(count), digest)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(value)
    return value


def block_name(name: str) -> str:
    """The name, if a block can have it. Raises CheckpointError."""
    if not _BLOCK.fullmatch(name) or name.startswith("."):
        raise CheckpointError(f"{name[:80]!r} is no block name")
    return name
