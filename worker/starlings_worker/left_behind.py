"""The state of a worker that leaves, on its disk: written by the engine, served without torch until others have it.

    <cache>/left/00000040/<block>.safetensors        parameters and optimizer state, by state name

A version is built in a folder of another name and renamed when all of it is on the disk, so it is whole or not there.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from starlings_job.errors import CheckpointError, disk_full_explained
from starlings_job.safetensors_io import header_bytes, read_buffer
from starlings_job.state import Tensorlike, block_digest
from starlings_protos.private_files import sync_directory
from starlings_protos.state_transfer import ServedBlock, StateTensor
from starlings_worker.serving import NotHeld
from starlings_worker.snapshots import only_parameters

_FOLDER = "left"
_BUILDING = ".building"
_SUFFIX = ".safetensors"
_BLOCK = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """`directory`: None when nothing was wanted."""

    directory: Path | None
    byte_count: int
    seconds: float
    digests: dict[str, str] = field(default_factory=dict)


def leave_behind(cache: Path, version: int, blocks: Mapping[str, Mapping[str, Tensorlike]]) -> LeftBehind:
    """Writes blocks, by name and state name, and returns when they are on the disk. What was left before is removed.

    Raises:
        DiskFull: no room; nothing is left. OSError: the directory cannot be written.
    """
    if not blocks:
        return LeftBehind(None, 0, 0.0)
    began = time.monotonic()
    folder = cache / _FOLDER
    final, building = folder / f"{version:08d}", folder / f"{version:08d}{_BUILDING}"
    shutil.rmtree(folder, ignore_errors=True)
    digests, byte_count = {}, 0
    try:
        with disk_full_explained("the state of this worker", folder):
            building.mkdir(parents=True, mode=0o700)
            # One thread hashes while this one writes.
            with ThreadPoolExecutor(1, thread_name_prefix="hashing") as hashing:
                for block, tensors in sorted(blocks.items()):
                    digest = hashing.submit(block_digest, tensors)
                    byte_count += _write(building / f"{block}{_SUFFIX}", tensors)
                    digests[block] = digest.result()
            os.rename(building, final)
            sync_directory(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return LeftBehind(final, byte_count, time.monotonic() - began, digests)


def _write(path: Path, tensors: Mapping[str, Tensorlike]) -> int:
    names = sorted(tensors)
    header = header_bytes(((n, tensors[n].data_type, tensors[n].shape) for n in names), {})
    with path.open("xb") as file:
        file.write(header)
        for name in names:
            file.write(tensors[name].data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


class DiskShelf:
    """A `serving.Shelf` over what was left behind; files are mapped, not read."""

    def __init__(self, directory: Path, version: int) -> None:
        self._directory = directory
        self._version = version
        self._blocks: dict[str, ServedBlock] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(p.name.removesuffix(_SUFFIX) for p in self._directory.glob(f"*{_SUFFIX}")))

    def serve(self, version: int, block: str, *, optimizer: bool) -> ServedBlock:
        """One block.

        Raises:
            NotHeld: another version, no such block, or its file was damaged.
        """
        if version != self._version:
            raise NotHeld(f"version {version} is not kept here; version {self._version} was left behind")
        found = self._blocks.get(block)
        if found is None:
            found = self._blocks[block] = self._open(block)
        return found if optimizer else only_parameters(found)

    def _open(self, block: str) -> ServedBlock:
        if not _BLOCK.fullmatch(block):
            raise NotHeld("that is no block's name")
        try:
            with (self._directory / f"{block}{_SUFFIX}").open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            tensors = read_buffer(memoryview(data))
        except (OSError, ValueError, CheckpointError) as error:
            raise NotHeld(f"block {block} cannot be read here: {type(error).__name__}") from None
        served = [StateTensor(name, t.data_type, t.shape, t.data) for name, t in sorted(tensors.items())]
        return ServedBlock(self._version, block, served)
