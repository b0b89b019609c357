"""Why a GPU runs slower than it could, by its driver's own word (NVML's clocks event reasons)."""

from __future__ import annotations

from typing import Any, Self

from starlings_protos.messages import SlowedBy

# Of nvml.h, nvmlClocksEventReason*: bits of one number.
_HEAT = 0x20 | 0x40  # software and hardware thermal slowdown
_POWER = 0x04 | 0x80  # the power cap, and the hardware's power brake
# Hardware slowdown: heat or power, and the bits above say which where the device knows.
_HARDWARE = 0x08


def slowed_by(reasons: int) -> SlowedBy:
    """What the bits mean. Heat comes first: who is too hot often meets its power cap as well."""
    if reasons & _HEAT:
        return SlowedBy.HEAT
    if reasons & (_POWER | _HARDWARE):
        return SlowedBy.POWER
    return SlowedBy.UNSPECIFIED


class GpuClocks:
    """One device of NVML's."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def of(cls, uuid: str) -> Self | None:
        """Args: uuid: as torch prints it, without "GPU-". None: no driver, or none that knows the device."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name))
        except pynvml.NVMLError:
            return None

    def slowed_by(self) -> SlowedBy:
        """A call of microseconds. A driver that does not say names nothing."""
        try:
            return slowed_by(int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)))
        except self._nvml.NVMLError:
            return SlowedBy.UNSPECIFIED
