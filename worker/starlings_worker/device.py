"""The torch device of one engine: which one, in which precision, of which numeric class, with how much
memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from platform import machine

import torch

from starlings_protos.messages import SlowedBy
from starlings_worker.errors import ExitCode, WorkerError
from starlings_worker.gpu_clocks import GpuClocks
from starlings_worker.platform import memory_available_bytes

# A worker on a CPU leaves this part of the free memory to the machine's owner.
_CPU_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Device:
    """One device as an engine uses it."""

    torch: torch.device
    # Forward and backward under bfloat16 autocast; weights stay float32.
    bf16: bool

    @cached_property
    def numeric_class(self) -> str:
        """Workers of equal class compute equal bits: device type, capability, torch's minor version."""
        version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        precision = "bf16" if self.bf16 else "fp32"
        if self.torch.type == "cuda":
            capability = "sm_{}{}".format(*torch.cuda.get_device_capability(self.torch))
        elif self.torch.type == "cpu":
            capability = torch.backends.cpu.get_cpu_capability()
        else:
            capability = machine()
        return f"{self.torch.type}/{capability}/{precision}/torch-{version}"

    @cached_property
    def product_name(self) -> str:
        """What people call it."""
        if self.torch.type == "cuda":
            return str(torch.cuda.get_device_name(self.torch))
        return self.torch.type

    def memory_bytes(self) -> int:
        """What the engine could use now."""
        if self.torch.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.torch)
            return int(free)
        return int(memory_available_bytes() * _CPU_MEMORY_SHARE)

    def synchronise(self) -> None:
        """Waits until the device has done what it was told, so that measured seconds are true."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)
        elif self.torch.type == "mps":
            torch.mps.synchronize()

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which blocks compute."""
        return torch.autocast(self.torch.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    @cached_property
    def _clocks(self) -> GpuClocks | None:
        if self.torch.type != "cuda":
            return None
        return GpuClocks.of(str(getattr(torch.cuda.get_device_properties(self.torch), "uuid", "")))

    def slowed_by(self) -> SlowedBy:
        """Why its clocks are below what they could be, if its driver says so."""
        return self._clocks.slowed_by() if self._clocks is not None else SlowedBy.UNSPECIFIED

    def free_cache(self) -> None:
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()


def open_device(name: str, precision: str) -> Device:
    """The device called "cpu", "cuda:0", "mps", ...

    Args:
        precision: "auto" (bfloat16 where the hardware has it, else float32), "fp32" or "bf16".

    Raises:
        WorkerError: torch cannot use it; the message names the fix.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WorkerError(ExitCode.USAGE, f"{name!r} is no device; write cpu, cuda:0 or all") from None
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        _check_cuda(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise WorkerError(ExitCode.NO_DEVICE, "torch finds no Apple GPU; use --devices cpu")
    elif device.type not in ("cpu", "mps", "xpu"):
        raise WorkerError(
            ExitCode.USAGE, f"{name!r} is no device that Starlings trains on; write cpu or cuda:0"
        )
    try:
        torch.zeros(8, device=device).add_(1.0).sum().item()
    except Exception as error:
        raise WorkerError(
            ExitCode.NO_DEVICE,
            f"torch cannot compute on {name}: {_first_line(error)}. "
            "Install the torch build that fits the driver (uv tool install --torch-backend auto "
            "'starlings[worker]'), or use --devices cpu",
        ) from None
    bf16_hardware = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return Device(device, precision == "bf16" or (precision == "auto" and bf16_hardware))


def _check_cuda(device: torch.device) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        raise WorkerError(
            ExitCode.NO_DEVICE,
            f"{device} was asked for, but this torch ({torch.__version__}) is a CPU build. Reinstall with "
            "uv tool install --torch-backend auto 'starlings[worker]', or use --devices cpu",
        )
    if not torch.cuda.is_available():
        raise WorkerError(
            ExitCode.NO_DEVICE,
            f"torch {torch.__version__} cannot use the GPU: the driver is missing or too old for "
            f"CUDA {torch.version.cuda}. Update the driver, or use --devices cpu",
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise WorkerError(
            ExitCode.NO_DEVICE,
            f"there is no {device}: torch sees {torch.cuda.device_count()} GPU(s), cuda:0 upward",
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
