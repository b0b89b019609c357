"""Checkpoints: per version a folder with safetensors files per block and a manifest, on any fsspec system.

    <url>/00000040/layers.3.safetensors             parameters, under their names inside the block
    <url>/00000040/layers.3.optimizer.safetensors   optimizer tensors, as "exp_avg:NAME"
    <url>/00000040/manifest.json                    every file's size and SHA-256; written last

A version whose manifest or any of its files is absent does not exist. There is one writer per url; how it stays true
that a crash leaves the newest version that was whole is in `checkpoint_places.py`. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from starlings_job.checkpoint_places import open_url, place_of, version_folders
from starlings_job.errors import CheckpointError, disk_full_explained
from starlings_job.manifest import (
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    BlockEntry,
    FileEntry,
    Manifest,
    block_name,
)
from starlings_job.safetensors_io import read_buffer, write_file
from starlings_job.state import PARAMETER, RawTensor, Tensorlike, block_digest

__all__ = [
    "BlockEntry",
    "CheckpointWriter",
    "FileEntry",
    "Manifest",
    "load_manifest",
    "newest_version",
    "read_block",
    "versions",
]

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one version, block by block.

    Use: `add_block` for each block, then `finish`. On any error call `abort` (or use it as a context
    manager).
    """

    def __init__(self, url: str | Path, version: int, *, keep: int = 0) -> None:
        """`keep`: how many versions remain afterwards, this one included; 0 = all."""
        self._url, self.version, self._keep = url, version, keep
        self._blocks: dict[str, BlockEntry] = {}
        self._finished = False
        with disk_full_explained("a checkpoint", url):
            known = next((m for m in _whole(url) if m.version == version), None)
        self._place = place_of(url, version, known)
        with self._undone_on_error():
            self._place.begin()

    def add_block(self, block: str, tensors: Mapping[str, Tensorlike], optimizer_steps: int = 0) -> str:
        """Writes a block's state, named "param:NAME", "exp_avg:NAME", ...; returns its digest.

        Args:
            optimizer_steps: that the block's optimizer has made; 0: as many as the version.

        Raises:
            DiskFull: no space; the version is as if it had never been begun.
            CheckpointError: the block was added before, or has no parameters.
        """
        block_name(block)
        parameters = {n.removeprefix(PARAMETER): t for n, t in tensors.items() if n.startswith(PARAMETER)}
        optimizer = {n: t for n, t in tensors.items() if not n.startswith(PARAMETER)}
        if block in self._blocks:
            raise CheckpointError(f"block {block} is in the checkpoint already")
        self._blocks[block] = BlockEntry(
            block_digest(tensors),
            self._write(f"{block}.safetensors", parameters),
            self._write(f"{block}.optimizer.safetensors", optimizer) if optimizer else None,
            optimizer_steps if optimizer else 0,
        )
        return self._blocks[block].digest

    def finish(self, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Makes the version visible, then forgets versions beyond `keep` and what crashes left behind.

        Raises:
            DiskFull: no space; the version is as if it had never been begun.
        """
        manifest = Manifest(self.version, dict(self._blocks), dict(facts or {}))
        with self._undone_on_error():
            self._place.publish(manifest)
        self._finished = True
        try:
            self._tidy()
        except OSError as error:
            # The version is there, which is what counts; the next one tidies up.
            logger.warning("old checkpoints could not be removed from %s: %s", self._url, error)
        return manifest

    def abort(self) -> None:
        """Removes what was written; harmless after `finish`."""
        if not self._finished:
            self._place.abandon()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()

    def _write(self, name: str, tensors: Mapping[str, Tensorlike]) -> FileEntry:
        with self._undone_on_error(), self._place.new_file(name) as (written_name, file):
            written = write_file(cast(Any, file), tensors)
        return FileEntry(written_name, written.byte_count, written.sha256)

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            with disk_full_explained("a checkpoint", self._url):
                yield
        except Exception:
            # Gives the space back, so that the version before can go on being used.
            with contextlib.suppress(OSError):
                self.abort()
            raise

    def _tidy(self) -> None:
        # First: what is healed after its version was forgotten would come back.
        self._place.remove_leftovers()
        known = [m.version for m in _whole(self._url) if m.version != self.version]
        for version in known[: max(0, len(known) + 1 - self._keep)] if self._keep else ():
            self._place.forget(version)


def _whole(url: str | Path) -> list[Manifest]:
    """Of every version that is there with all its files, the manifest; ascending."""
    found = []
    for version, sizes in version_folders(url):
        try:
            manifest = load_manifest(url, version)
        except CheckpointError:
            continue
        if all(sizes.get(file.name, -1) in (file.byte_count, None) for file in manifest.files):
            found.append(manifest)
    return found


def versions(url: str | Path) -> tuple[int, ...]:
    """Complete versions, ascending; empty when there is no such place. Contents are checked when they are read.

    Raises:
        OSError: the storage does not answer.
    """
    return tuple(manifest.version for manifest in _whole(url))


def newest_version(url: str | Path) -> int | None:
    """The highest complete version, or None."""
    found = versions(url)
    return found[-1] if found else None


def load_manifest(url: str | Path, version: int) -> Manifest:
    """The manifest of a complete version.

    Raises:
        CheckpointError: no such version, or a malformed manifest.
    """
    filesystem, root, _ = open_url(url)
    data = _read(filesystem, f"{root}/{version:08d}/{MANIFEST}", MANIFEST_LIMIT_BYTES)
    manifest = Manifest.from_json(data)
    if manifest.version != version:
        raise CheckpointError(f"the manifest of version {version} names version {manifest.version}")
    return manifest


def read_block(
    url: str | Path,
    version: int,
    block: str,
    *,
    optimizer: bool = True,
    manifest: Manifest | None = None,
) -> dict[str, RawTensor]:
    """A block's state ("param:NAME", "exp_avg:NAME", ...), every file checked against its hash.

    Args:
        optimizer: with the optimizer's tensors, where there are any.
        manifest: spares reading it again.

    Raises:
        CheckpointError: no such block, or bytes that do not match.
    """
    filesystem, root, local = open_url(url)
    manifest = manifest or load_manifest(url, version)
    entry = manifest.blocks.get(block)
    if entry is None:
        raise CheckpointError(f"version {version} has no block {block[:80]!r}")
    tensors: dict[str, RawTensor] = {}
    for file in (entry.parameters, entry.optimizer if optimizer else None):
        if file is None:
            continue
        path = f"{root}/{version:08d}/{file.name}"
        data = _map(path, file) if local else memoryview(_read(filesystem, path, file.byte_count))
        if len(data) != file.byte_count or hashlib.sha256(data).hexdigest() != file.sha256:
            raise CheckpointError(f"{path} is damaged: its bytes do not match the manifest")
        prefix = PARAMETER if file is entry.parameters else ""
        tensors |= {prefix + name: tensor for name, tensor in read_buffer(data).items()}
    return tensors


def _read(filesystem: Any, path: str, limit_bytes: int) -> bytes:
    try:
        with filesystem.open(path, "rb") as file:
            data = cast(bytes, file.read(limit_bytes + 1))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}") from None
    if len(data) > limit_bytes:
        raise CheckpointError(f"{path} is larger than the {limit_bytes} bytes it should have")
    return data


def _map(path: str, entry: FileEntry) -> memoryview:
    """A local file without a copy; the map lives as long as any tensor of it."""
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}") from None
    except ValueError:
        raise CheckpointError(f"{path} is empty instead of {entry.byte_count} bytes") from None
