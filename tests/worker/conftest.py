"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[None]:
    """So that vectors of a few elements have several."""
    from starlings_worker import chunks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CPU_ELEMENTS", 16)
        yield
