"""Checkpoints: per version a folder with safetensors files per block and a manifest, on any fsspec system.

    <url>/00000040/layers.3.safetensors             parameters, under their names inside the block
    <url>/00000040/layers.3.optimizer.safetensors   optimizer tensors, as "exp_avg:NAME"
    <url>/00000040/manifest.json                    every file's size and SHA-256; written last

A version without a manifest does not exist. On a local disk a version is built in a folder of another name
and renamed when it is whole, so a crash leaves what was there. There is one writer per url. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from starlings_job.errors import CheckpointError, disk_full_explained
from starlings_job.safetensors_io import read_buffer, write_file
from starlings_job.state import PARAMETER, RawTensor, Tensorlike, block_digest

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 64 << 20
_VERSION = re.compile(r"[0-9]{8,}")
_BLOCK = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BUILDING = ".building"
_REPLACED = ".replaced"


@dataclass(frozen=True, slots=True)
class FileEntry:
    name: str
    byte_count: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block's files and the digest of its state. `optimizer` is None at version 0."""

    digest: str
    parameters: FileEntry
    optimizer: FileEntry | None


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    blocks: Mapping[str, BlockEntry]
    # What the writer wanted to be known: tokens, job, ...
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def byte_count(self) -> int:
        files = [f for b in self.blocks.values() for f in (b.parameters, b.optimizer) if f is not None]
        return sum(f.byte_count for f in files)

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
                blocks[_block_name(name)] = BlockEntry(
                    str(entry["digest"]),
                    _file_entry(entry["parameters"]),
                    None if optimizer is None else _file_entry(optimizer),
                )
            version = record["version"]
            if type(version) is not int or not 0 <= version < 2**62:
                raise ValueError(version)
            return cls(version, blocks, dict(record["facts"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError("the checkpoint's manifest is malformed") from None


def _file_entry(record: Mapping[str, Any]) -> FileEntry:
    name, count, digest = record["name"], record["byte_count"], record["sha256"]
    # A manifest may come from elsewhere: its file names must not lead out of the folder.
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name) or name.startswith("."):
        raise ValueError(name)
    if type(count) is not int or not 0 <= count < 2**62 or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(name)
    return FileEntry(name, count, digest)


def _block_name(name: str) -> str:
    if not _BLOCK.fullmatch(name) or name.startswith("."):
        raise CheckpointError(f"{name[:80]!r} is no block name")
    return name


def _open_url(url: str | Path) -> tuple[Any, str, bool]:
    """File system, root path, and whether it is a local disk."""
    filesystem, root = fsspec.core.url_to_fs(os.path.abspath(url) if isinstance(url, Path) else str(url))
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    return filesystem, root.rstrip("/"), protocol in ("file", "local")


class CheckpointWriter:
    """Writes one version, block by block.

    Use: `add_block` for each block, then `finish`. On any error call `abort` (or use it as a context
    manager).
    """

    def __init__(self, url: str | Path, version: int, *, keep: int = 0) -> None:
        """`keep`: how many versions remain afterwards, this one included; 0 = all."""
        self._filesystem, self._root, self._local = _open_url(url)
        self._url, self.version, self._keep = str(url), version, keep
        self._final = f"{self._root}/{version:08d}"
        self._folder = self._final + _BUILDING if self._local else self._final
        self._blocks: dict[str, BlockEntry] = {}
        self._finished = False
        with disk_full_explained("a checkpoint", self._url):
            self._remove(self._folder)
            self._filesystem.makedirs(self._folder, exist_ok=True)

    def add_block(self, block: str, tensors: Mapping[str, Tensorlike]) -> str:
        """Writes a block's state, named "param:NAME", "exp_avg:NAME", ...; returns its digest.

        Raises:
            DiskFull: no space; the version is as if it had never been begun.
            CheckpointError: the block was added before, or has no parameters.
        """
        _block_name(block)
        parameters = {n.removeprefix(PARAMETER): t for n, t in tensors.items() if n.startswith(PARAMETER)}
        optimizer = {n: t for n, t in tensors.items() if not n.startswith(PARAMETER)}
        if block in self._blocks:
            raise CheckpointError(f"block {block} is in the checkpoint already")
        self._blocks[block] = BlockEntry(
            block_digest(tensors),
            self._write(f"{block}.safetensors", parameters),
            self._write(f"{block}.optimizer.safetensors", optimizer) if optimizer else None,
        )
        return self._blocks[block].digest

    def finish(self, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Makes the version visible, then forgets versions beyond `keep`.

        Raises:
            DiskFull: no space; the version is as if it had never been begun.
        """
        manifest = Manifest(self.version, dict(self._blocks), dict(facts or {}))
        with self._undone_on_error():
            with self._create(MANIFEST) as file:
                file.write(manifest.to_json())
            if self._local:
                _replace_folder(self._folder, self._final)
        self._finished = True
        if self._keep:
            self._forget_old()
        return manifest

    def abort(self) -> None:
        """Removes what was written; harmless after `finish`."""
        if not self._finished:
            self._remove(self._folder)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()

    def _write(self, name: str, tensors: Mapping[str, Tensorlike]) -> FileEntry:
        with self._undone_on_error(), self._create(name) as file:
            written = write_file(file, tensors)
        return FileEntry(name, written.byte_count, written.sha256)

    @contextlib.contextmanager
    def _create(self, name: str) -> Iterator[BinaryIO]:
        """A new file of the version; on a local disk its bytes are on the disk when the block ends."""
        with self._filesystem.open(f"{self._folder}/{name}", "wb") as file:
            yield cast(BinaryIO, file)
            if self._local:
                file.flush()
                os.fsync(file.fileno())

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

    def _remove(self, folder: str) -> None:
        # The manifest first: from then on the version does not exist.
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{folder}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(folder, recursive=True)

    def _forget_old(self) -> None:
        known = [v for v in versions(self._url) if v != self.version]
        for version in known[: max(0, len(known) + 1 - self._keep)]:
            self._remove(f"{self._root}/{version:08d}")
        if self._local:
            # What a crash left behind; this process is the only writer.
            for leftover in Path(self._root).glob(f"*{_BUILDING}"):
                self._remove(str(leftover))


def _replace_folder(new: str, final: str) -> None:
    """Gives the folder `new` the name `final`; an older one of that name stays until then."""
    old = final + _REPLACED
    for last_try in (False, False, True):
        shutil.rmtree(old, ignore_errors=True)
        if os.path.isdir(final):
            os.replace(final, old)
        try:
            os.replace(new, final)
            break
        except OSError:
            # A reader may have healed what looked like a crash between the two renames.
            if os.path.isdir(old) and not os.path.isdir(final):
                os.replace(old, final)
            if last_try:
                raise
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(os.path.dirname(final))


def sync_folder(path: str | Path) -> None:
    """Makes renames in a folder durable, where the system can."""
    flags = getattr(os, "O_DIRECTORY", None)
    if flags is None:
        return
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | flags)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def versions(url: str | Path) -> tuple[int, ...]:
    """Complete versions, ascending; empty when there is no such place."""
    filesystem, root, local = _open_url(url)
    if local:
        _heal(Path(root))
    filesystem.invalidate_cache()
    try:
        names = [str(path).rstrip("/").rpartition("/")[2] for path in filesystem.ls(root, detail=False)]
    except FileNotFoundError:
        return ()
    found = (name for name in names if _VERSION.fullmatch(name))
    return tuple(sorted(int(name) for name in found if filesystem.exists(f"{root}/{name}/{MANIFEST}")))


def _heal(root: Path) -> None:
    """A crash between the two renames of `_replace_folder` left the older version under another name."""
    if not root.is_dir():
        return
    for old in root.glob(f"*{_REPLACED}"):
        final = old.with_name(old.name.removesuffix(_REPLACED))
        if not final.exists():
            with contextlib.suppress(OSError):
                os.replace(old, final)


def newest_version(url: str | Path) -> int | None:
    """The highest complete version, or None."""
    found = versions(url)
    return found[-1] if found else None


def load_manifest(url: str | Path, version: int) -> Manifest:
    """The manifest of a complete version.

    Raises:
        CheckpointError: no such version, or a malformed manifest.
    """
    filesystem, root, _ = _open_url(url)
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
    filesystem, root, local = _open_url(url)
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
