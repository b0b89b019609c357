"""Copies of committed state, kept for the keeper and late joiners to fetch: each is one version exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlings_job.state import PARAMETER
from starlings_protos.state_transfer import ServedBlock, StateTensor
from starlings_worker.stage import HeldSpan

# The newest, and the one before it, which somebody may be in the middle of fetching.
_VERSIONS_KEPT = 2


class NotHeld(Exception):
    """No snapshot of that version, or no such block in it."""


class Snapshots:
    """By version and block, in host memory. Written by the compute thread, read by the event loop: whole
    dictionaries are exchanged, never changed.
    """

    def __init__(self) -> None:
        self._versions: dict[int, dict[str, ServedBlock]] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._versions))

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
            )
            for block in held.blocks
        }
        kept = {**self._versions, held.version: blocks}
        self._versions = {v: kept[v] for v in sorted(kept)[-_VERSIONS_KEPT:]}

    def clear(self) -> None:
        self._versions = {}

    def serve(self, version: int, blocks: Iterable[str], *, optimizer: bool) -> Sequence[ServedBlock]:
        """The asked-for blocks.

        Raises:
            NotHeld: names what is missing.
        """
        held = self._versions.get(version)
        if held is None:
            have = ", ".join(map(str, self.versions)) or "none"
            raise NotHeld(f"version {version} is not kept here; there is: {have}")
        served = []
        for name in blocks:
            block = held.get(name)
            if block is None:
                raise NotHeld(f"block {name[:80]} is not kept here at version {version}")
            if not optimizer:
                parameters = [t for t in block.tensors if t.name.startswith(PARAMETER)]
                block = ServedBlock(version, name, parameters)
            served.append(block)
        return served
