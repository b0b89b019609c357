"""What a donor says of versions that it has, had, and is about to have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from starlings_worker.serving import NotHeld, NotYet
from starlings_worker.snapshots import Snapshots


def span(version: int) -> Any:
    """A span of one block with one small tensor, which says its version."""
    raw = SimpleNamespace(data_type="U8", shape=(1,), data=bytes([version]))
    return SimpleNamespace(
        version=version,
        blocks=("embed",),
        block_state=lambda _: {"weight": raw},
        optimizer_steps_of=lambda _: 0,
    )


def test_a_version_that_observers_wait_for_is_not_there_yet_until_it_was_copied() -> None:
    snapshots = Snapshots()
    with pytest.raises(NotHeld):
        snapshots.serve(3, "embed", optimizer=True)
    snapshots.pin((3,))
    with pytest.raises(NotYet):
        snapshots.serve(3, "embed", optimizer=True)
    snapshots.take(span(3))
    assert bytes(snapshots.serve(3, "embed", optimizer=True).tensors[0].data) == b"\x03"


def test_what_was_missed_will_not_come() -> None:
    snapshots = Snapshots()
    snapshots.take(span(5))
    snapshots.pin((4,))
    with pytest.raises(NotHeld, match="there is: 5"):
        snapshots.serve(4, "embed", optimizer=True)


def test_pinned_versions_stay_while_newer_ones_come_and_go_with_the_next_word() -> None:
    snapshots = Snapshots()
    snapshots.pin((1,))
    for version in (1, 2, 3, 4):
        snapshots.take(span(version))
    assert snapshots.versions == (1, 3, 4)
    snapshots.pin(())
    assert snapshots.versions == (3, 4)
    with pytest.raises(NotHeld):
        snapshots.serve(1, "embed", optimizer=True)
