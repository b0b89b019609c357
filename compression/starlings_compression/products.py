"""Matrix products that give the same bits for the same values.

A BLAS splits work among threads, and a different split adds in a different order; it also takes other paths for
memory that is not aligned. So the products of codecs run on one thread, over aligned memory. Most are bound by
memory, which one thread nearly saturates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ALIGNMENT_BYTES = 64


@contextmanager
def one_thread() -> Iterator[None]:
    """Computations of the calling thread, and no others, use one core."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it where its memory is not aligned."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor
