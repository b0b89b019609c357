"""What kinds of device a worker can say that it has, or be told to pretend to be (`--emulate`).

The figures are those of `starlings_job.devices`. `relative_speed` is dense half-precision matrix throughput with
float32 accumulation, relative to an RTX 4090: the figure that training a transformer follows most closely. Faster
devices than that cannot be pretended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlings_job.devices import DEVICES, squeezed
from starlings_worker.errors import WorkerError

_REFERENCE_TFLOPS = DEVICES["rtx4090"].tensor_tflops


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One kind of device. `source` names what the figures come from."""

    name: str
    tflops: float
    memory_bytes: int
    source: str

    @property
    def relative_speed(self) -> float:
        """Of an RTX 4090: 0 < s <= 1."""
        return min(1.0, self.tflops / _REFERENCE_TFLOPS)


DEVICE_CLASSES: dict[str, DeviceClass] = {
    d.name: DeviceClass(d.name, d.tensor_tflops, d.memory_bytes, d.source) for d in DEVICES.values()
}


def device_class(name: str) -> DeviceClass:
    """The class of that name.

    Raises:
        WorkerError: there is none; the message lists all.
    """
    found = DEVICE_CLASSES.get(squeezed(name))
    if found is None:
        raise WorkerError(
            2, f"no device class is named {name!r}; there are: {', '.join(sorted(DEVICE_CLASSES))}"
        )
    return found


def guess_class(product_name: str) -> str:
    """The class that a product name such as "NVIDIA GeForce RTX 3060" belongs to; empty when unknown.

    Whole words only: an L40 is no L4, and an A1000 no A100.
    """
    words = re.findall(r"[a-z0-9]+", product_name.lower())
    runs = {"".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1)}
    return max((name for name in DEVICE_CLASSES if name in runs), key=len, default="")
