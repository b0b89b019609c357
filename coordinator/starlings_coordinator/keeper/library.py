"""The versions that lie on the owner's disk, by block, ready to be served."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from starlings_job.checkpoint import Manifest, load_manifest, read_block, versions
from starlings_job.errors import CheckpointError
from starlings_job.state import RawTensor
from starlings_protos.state_transfer import ServedBlock, StateTensor

# Local files are mapped, not read, so these cost address space and page cache; remote ones cost memory.
CACHED_BLOCKS = 8


class NotHeld(Exception):
    """The keeper does not have that version or block."""


class StateLibrary:
    """Version 0 from `weights/`, the others from the checkpoint url. Methods block; safe from several threads."""

    def __init__(self, weights: Path, checkpoint_url: str) -> None:
        self._weights = weights
        self._checkpoint_url = checkpoint_url
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[int, str, bool], ServedBlock] = OrderedDict()
        self._manifests: dict[int, Manifest] = {}

    def versions(self) -> tuple[int, ...]:
        """Complete versions, ascending. Raises OSError when the storage does not answer."""
        found = set(versions(self._checkpoint_url)) | (set(versions(self._weights)) & {0})
        return tuple(sorted(found))

    def served(self, version: int, block: str, *, optimizer: bool) -> ServedBlock:
        """Raises NotHeld when it is absent or damaged."""
        key = (version, block, optimizer)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        tensors = self.tensors(version, block, optimizer=optimizer)
        found = ServedBlock(
            version,
            block,
            tuple(StateTensor(name, t.data_type, t.shape, t.data) for name, t in sorted(tensors.items())),
            self._optimizer_steps(version, block) if optimizer else 0,
        )
        found.header()  # hashes every tensor once, here in the caller's thread
        with self._lock:
            self._cached[key] = found
            while len(self._cached) > CACHED_BLOCKS:
                self._cached.popitem(last=False)
        return found

    def tensors(self, version: int, block: str, *, optimizer: bool) -> Mapping[str, RawTensor]:
        """Raises NotHeld when it is absent or damaged."""
        try:
            manifest = self._manifest(version)
            return read_block(self._url(version), version, block, optimizer=optimizer, manifest=manifest)
        except (CheckpointError, OSError) as error:
            raise NotHeld(str(error)) from None

    def _optimizer_steps(self, version: int, block: str) -> int:
        """Of a block that was just read."""
        try:
            return self._manifest(version).blocks[block].optimizer_steps
        except (CheckpointError, KeyError, OSError) as error:
            raise NotHeld(str(error)) from None

    def _url(self, version: int) -> str | Path:
        return self._weights if version == 0 else self._checkpoint_url

    def _manifest(self, version: int) -> Manifest:
        with self._lock:
            known = self._manifests.get(version)
        if known is None:
            known = load_manifest(self._url(version), version)
            with self._lock:
                self._manifests[version] = known
        return known

    def changed(self) -> None:
        """Checkpoints were written or removed: maps of files that are gone are let go."""
        with self._lock:
            self._cached = OrderedDict((k, v) for k, v in self._cached.items() if k[0] == 0)
            self._manifests = {v: m for v, m in self._manifests.items() if v == 0}
