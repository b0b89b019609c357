"""Which devices the demo pretends to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """An emulated class (its relative speed) and a cap on memory that forces the plan to cut the model."""

    device_class: str
    memory: str


# Memory is scaled down with the model, of which all eight blocks take 105 MB with two microbatches in
# flight: the big ones could hold everything, the small ones two blocks. Speeds add up to about two cores,
# so that two carry them all.
FLEET: Sequence[Device] = (
    Device("rtx4090", "160MB"),
    Device("rtx4080", "110MB"),
    Device("rtx3060", "22MB"),
    Device("rtx3060", "22MB"),
)


def fleet(workers: int) -> list[Device]:
    """`workers` devices, the most capable first; more than four repeat the fleet."""
    return [FLEET[index % len(FLEET)] for index in range(workers)]
