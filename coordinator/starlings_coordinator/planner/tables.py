"""Devices and access lines as their makers and regulators publish them: a prior for fleets that nobody measured yet.

What a worker measures when it joins replaces every figure here. `share` is what part of the peak a decoder's forward
and backward get in practice (half of it on cards with much bandwidth per operation, a third where power is capped), an
estimate that holds to about a third.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """`peak_tflops`: dense half precision with 32-bit sums, or single precision where there are no matrix units."""

    memory_gb: float
    peak_tflops: float
    share: float
    source: str

    @property
    def flops_per_s(self) -> float:
        return self.peak_tflops * self.share * 1e12


@dataclass(frozen=True, slots=True)
class Access:
    """`delay_ms`: to the first exchange point and back."""

    down_mbit_per_s: float
    up_mbit_per_s: float
    delay_ms: float
    source: str


_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper, comparison tables"
_ADA = "NVIDIA Ada GPU architecture whitepaper, comparison tables"

DEVICES: dict[str, Device] = {
    "gtx1080ti": Device(11, 11.3, 0.5, "NVIDIA GeForce GTX 1080 Ti product page (single precision)"),
    "rtx2080ti": Device(11, 53.8, 0.45, "NVIDIA Turing GPU architecture whitepaper, appendix on GeForce"),
    "rtx3060": Device(
        12, 25.5, 0.5, "GA102 whitepaper's rule (twice the shader rate) on 12.7 TFLOPS, product page"
    ),
    "rtx3070": Device(8, 40.6, 0.5, _GA102),
    "rtx3080": Device(10, 59.5, 0.5, _GA102),
    "rtx3090": Device(24, 71.0, 0.5, _GA102),
    "rtx4060": Device(
        8, 30.2, 0.4, "Ada whitepaper's rule (twice the shader rate) on 15.1 TFLOPS, product page"
    ),
    "rtx4070": Device(
        12, 58.3, 0.4, "Ada whitepaper's rule (twice the shader rate) on 29.1 TFLOPS, product page"
    ),
    "rtx4080": Device(16, 97.5, 0.4, _ADA),
    "rtx4090": Device(24, 165.2, 0.4, _ADA),
    "t4": Device(16, 65.0, 0.3, "NVIDIA T4 datasheet"),
    "v100": Device(16, 125.0, 0.37, "NVIDIA V100 datasheet (SXM2)"),
    "l4": Device(24, 121.0, 0.3, "NVIDIA L4 datasheet (half of the figure with sparsity)"),
    "a10": Device(24, 125.0, 0.35, "NVIDIA A10 datasheet"),
    "a6000": Device(48, 154.8, 0.45, "NVIDIA RTX A6000 datasheet (half of the figure with sparsity)"),
    "a100": Device(80, 312.0, 0.45, "NVIDIA A100 datasheet"),
    "h100": Device(80, 989.4, 0.4, "NVIDIA H100 datasheet (SXM, half of the figure with sparsity)"),
    "rx7900xtx": Device(24, 122.8, 0.3, "AMD Radeon RX 7900 XTX product page"),
    "m2max": Device(32, 13.6, 0.4, "Apple's announcement of M2 Max (single precision)"),
}

ACCESS: dict[str, Access] = {
    "fibre": Access(
        500, 400, 8, "common retail tier; delay: FCC Measuring Broadband America, 12th and 13th report"
    ),
    "cable": Access(
        300, 20, 18, "common retail tier; delay: FCC Measuring Broadband America, 12th and 13th report"
    ),
    "dsl": Access(
        50, 10, 30, "common retail tier; delay: FCC Measuring Broadband America, 12th and 13th report"
    ),
    "mobile": Access(150, 15, 40, "fixed wireless over 5G as operators advertise it"),
    "satellite": Access(120, 12, 45, "Starlink's published typical speeds and latency"),
    "campus": Access(1000, 1000, 1, "Gigabit Ethernet, IEEE 802.3ab"),
}
