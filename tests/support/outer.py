"""Vectors for tests of outer rules, and what close means among them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

# Several chunks of `small_chunks` (tests/worker/conftest.py).
SIZE = 37
seeds = st.integers(0, 2**32 - 1)


def vector(rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(SIZE)).astype(np.float32).astype(np.float64)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def close(
    found: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6, *, among: np.ndarray | None = None
) -> bool:
    """To a millionth of its size; or of the size of `among`, for sums of differences of such vectors: they keep the
    vectors' float32 error, however small they are themselves.
    """
    scale = max(float(np.linalg.norm(expected if among is None else among)), 1e-3)
    return float(np.linalg.norm(found.double().numpy() - expected)) <= tolerance * scale
