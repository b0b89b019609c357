"""Which devices the demo pretends to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """An emulated class (its relative speed) and a cap on memory that forces the plan to cut the model."""

    device_class: str
    memory: str


# Memory is scaled down with the model: it decides how many blocks a worker can hold. Speeds add up to about two cores,
# so that two real ones carry the four emulated devices. The first holds several stages, the last ones only one.
FLEET: Sequence[Device] = (
    Device("rtx4090", "64MB"),
    Device("rtx3090", "40MB"),
    Device("rtx3060", "20MB"),
    Device("rtx3060", "20MB"),
)


def fleet(workers: int) -> list[Device]:
    """`workers` devices. A single one holds the whole model; more than four repeat the fleet."""
    if workers == 1:
        return [Device(FLEET[0].device_class, "256MB")]
    return [FLEET[index % len(FLEET)] for index in range(workers)]
