"""What a codec remembers from one encoding to the next, and only if the round committed.

    state = CodecState(seed=7)
    data = codec.encode(tensor, state)
    state.commit()            # or state.rollback(): then it is as if the encoding had never been

`lowrank` keeps its right factor (warm start), `randk` counts rounds so that places change. Other codecs leave
a state alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Memory:
    """One version of a codec's memory; never changed in place."""

    round: int = 0
    factor: torch.Tensor | None = None


class CodecState:
    """One per tensor, peer or group, and direction. Encoding starts from the last commit each time."""

    def __init__(self, seed: int = 0) -> None:
        """`seed`: what random choices follow from; equal seeds and equal inputs give equal bytes."""
        self.seed = seed
        self._committed = Memory()
        self._pending: Memory | None = None

    @property
    def committed(self) -> Memory:
        return self._committed

    def stage(self, memory: Memory) -> None:
        """What to remember if the encoding that was just made commits."""
        self._pending = memory

    def commit(self) -> None:
        """The bytes of the last `encode` count."""
        if self._pending is not None:
            self._committed, self._pending = self._pending, None

    def rollback(self) -> None:
        """The bytes of the last `encode` do not count."""
        self._pending = None

    def reset(self) -> None:
        """Forget everything, as at the start."""
        self._committed, self._pending = Memory(), None
