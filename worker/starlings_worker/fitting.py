"""How many rows of a microbatch are computed at a time: all, until memory does not suffice; then half, down to one.

Rows don't know of each other, so what comes out is the same, up to the order of sums; it costs a second forward pass.
Whoever has no memory for one row can only hold fewer stages, and that is for the coordinator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Fitting:
    """Of one engine's life. `rows_most`: None means all."""

    def __init__(self, microbatch: int, free_cache: Callable[[], None]) -> None:
        self._microbatch = microbatch
        self._free_cache = free_cache
        self.rows_most: int | None = None

    def smaller(self) -> bool:
        """From here on half of the rows; False where it is one already."""
        rows = self.rows_most or self._microbatch
        if rows <= 1:
            return False
        self.rows_most = (rows + 1) // 2
        print(f"out of memory: rows of a microbatch at a time are {self.rows_most} now", file=sys.stderr)
        return True

    def forward(self, compute: Callable[[], T], *, train: bool) -> T:
        """A forward pass adds nothing, so it is tried again in smaller parts, if it is one of training.

        Raises:
            torch.OutOfMemoryError: not even one row fits.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError:
                if not train or not self.smaller():
                    raise
            # Only out here what the failed pass had is let go of.
            self._free_cache()
