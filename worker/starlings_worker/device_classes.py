"""What kinds of device there are: the prior for planning, the sanity check of a probe, and what `--emulate`
can pretend.

`relative_speed` is dense half-precision matrix throughput with float32 accumulation, relative to an RTX 4090
(165.2 Tflop/s): the figure that training a transformer follows most closely. Sources of the figures:

- Ada: NVIDIA, "NVIDIA Ada GPU Architecture" white paper, appendix A (RTX 4090, RTX 4080); for the others of
  the family
  twice the published FP32 rate, the ratio of that table.
- Ampere: NVIDIA, "NVIDIA Ampere GA102 GPU Architecture" white paper, table 2 (RTX 3090, RTX 3080), and for
  GA104/GA106
  twice the published FP32 rate, the ratio of that table.
- Turing: NVIDIA, "NVIDIA Turing GPU Architecture" white paper, appendix A (RTX 2080 Ti), and the T4 data
  sheet.
- Volta: NVIDIA, Tesla V100 data sheet (PCIe).
- Pascal: NVIDIA, GeForce GTX 1080 Ti specification; no tensor cores, so the FP32 rate counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlings_worker.errors import WorkerError

_GIB = 1 << 30
_REFERENCE_TFLOPS = 165.2


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One kind of device. `source` names the document that the figures come from."""

    name: str
    tflops: float
    memory_bytes: int
    source: str

    @property
    def relative_speed(self) -> float:
        """Of an RTX 4090: 0 < s <= 1."""
        return min(1.0, self.tflops / _REFERENCE_TFLOPS)


_ADA = "NVIDIA Ada GPU Architecture white paper, appendix A"
_ADA_RATE = "NVIDIA GeForce 40 series specifications, FP32 rate doubled"
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture white paper, table 2"
_AMPERE_RATE = "NVIDIA GeForce 30 series specifications, FP32 rate doubled"
_TURING = "NVIDIA Turing GPU Architecture white paper, appendix A"

_TABLE = (
    DeviceClass("rtx4090", 165.2, 24 * _GIB, _ADA),
    DeviceClass("rtx4080", 97.5, 16 * _GIB, _ADA),
    DeviceClass("rtx4070", 58.3, 12 * _GIB, _ADA_RATE),
    DeviceClass("rtx4060", 30.2, 8 * _GIB, _ADA_RATE),
    DeviceClass("rtx3090", 71.0, 24 * _GIB, _AMPERE),
    DeviceClass("rtx3080", 59.5, 10 * _GIB, _AMPERE),
    DeviceClass("rtx3070", 40.6, 8 * _GIB, _AMPERE_RATE),
    DeviceClass("rtx3060", 25.5, 12 * _GIB, _AMPERE_RATE),
    DeviceClass("rtx2080ti", 53.8, 11 * _GIB, _TURING),
    DeviceClass("t4", 65.0, 16 * _GIB, "NVIDIA T4 data sheet"),
    DeviceClass("v100", 112.0, 16 * _GIB, "NVIDIA Tesla V100 data sheet, PCIe"),
    DeviceClass("gtx1080ti", 11.3, 11 * _GIB, "NVIDIA GeForce GTX 1080 Ti specification, FP32"),
)

DEVICE_CLASSES: dict[str, DeviceClass] = {c.name: c for c in _TABLE}


def device_class(name: str) -> DeviceClass:
    """The class of that name.

    Raises:
        WorkerError: there is none; the message lists all.
    """
    found = DEVICE_CLASSES.get(name.lower().replace(" ", "").replace("-", ""))
    if found is None:
        raise WorkerError(
            2, f"no device class is named {name!r}; there are: {', '.join(sorted(DEVICE_CLASSES))}"
        )
    return found


def guess_class(product_name: str) -> str:
    """The class that a product name such as "NVIDIA GeForce RTX 3060" belongs to; empty when unknown."""
    squeezed = "".join(c for c in product_name.lower() if c.isalnum())
    matches = [name for name in DEVICE_CLASSES if name in squeezed]
    return max(matches, key=len, default="")
