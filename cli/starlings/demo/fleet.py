"""Which devices the demo pretends to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """An emulated class (its relative speed) and a cap on memory that forces the plan to cut the model."""

    device_class: str
    memory: str


# Memory is scaled down with the model, of which all eight blocks take 110 MB with two microbatches in
# flight: nobody can hold everything, so activations travel, and every stage but the middle ones has two
# holders. Speeds add up to about two cores.
FLEET: Sequence[Device] = (
    Device("rtx4090", "88MB"),
    Device("rtx4080", "63MB"),
    Device("t4", "38MB"),
    Device("t4", "38MB"),
)


def fleet(workers: int) -> list[Device]:
    """`workers` devices, the most capable first; more than four repeat the fleet."""
    return [FLEET[index % len(FLEET)] for index in range(workers)]
