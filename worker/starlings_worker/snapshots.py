"""Copies of committed state, kept for the keeper and late joiners to fetch: each is one version exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlings_job.state import PARAMETER
from starlings_protos.state_transfer import ServedBlock, StateTensor
from starlings_worker.serving import NotHeld, NotYet

if TYPE_CHECKING:
    from starlings_worker.stage import HeldSpan

# The newest, and the one before it, which somebody may be in the middle of fetching.
_VERSIONS_KEPT = 2


class Snapshots:
    """By version and block, in host memory. Written by the compute thread, read by the event loop: whole
    dictionaries are exchanged, never changed.
    """

    def __init__(self) -> None:
        self._versions: dict[int, dict[str, ServedBlock]] = {}
        # Kept although there are newer ones: observers load them.
        self._pinned: frozenset[int] = frozenset()

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._versions))

    def pin(self, versions: Iterable[int]) -> None:
        """Keeps these, also if they are taken later; what was pinned before and is old goes."""
        self._pinned = frozenset(versions)
        self._prune(self._versions)

    def take(self, held: HeldSpan) -> None:
        """Copies the present state of every held block."""
        blocks = {
            block: ServedBlock(
                held.version,
                block,
                [
                    StateTensor(name, raw.data_type, raw.shape, memoryview(bytes(raw.data)))
                    for name, raw in sorted(held.block_state(block).items())
                ],
                held.optimizer_steps_of(block),
            )
            for block in held.blocks
        }
        self._prune({**self._versions, held.version: blocks})

    def _prune(self, versions: dict[int, dict[str, ServedBlock]]) -> None:
        newest = sorted(versions)[-_VERSIONS_KEPT:]
        self._versions = {v: versions[v] for v in sorted(versions) if v in newest or v in self._pinned}

    def clear(self) -> None:
        self._versions, self._pinned = {}, frozenset()

    def blocks(self, version: int) -> dict[str, ServedBlock]:
        """Every block of a kept version.

        Raises:
            NotHeld: it is not kept. NotYet: it is to be taken, with the commit that makes it or just now.
        """
        held = self._versions.get(version)
        if held is None:
            if version in self._pinned and version > max(self._versions, default=-1):
                raise NotYet(f"version {version} is not copied yet")
            have = ", ".join(map(str, self.versions)) or "none"
            raise NotHeld(f"version {version} is not kept here; there is: {have}")
        return held

    def serve(self, version: int, block: str, *, optimizer: bool) -> ServedBlock:
        """One block.

        Raises:
            NotHeld: names what is missing. NotYet: as in `blocks`.
        """
        found = self.blocks(version).get(block)
        if found is None:
            raise NotHeld(f"block {block[:80]} is not kept here at version {version}")
        return found if optimizer else only_parameters(found)


def only_parameters(block: ServedBlock) -> ServedBlock:
    parameters = [t for t in block.tensors if t.name.startswith(PARAMETER)]
    return ServedBlock(block.version, block.block, parameters)
