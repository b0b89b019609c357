"""Which devices a host has, without torch: for the supervisor, which must stay small."""

from __future__ import annotations

from dataclasses import dataclass

from starlings_worker.device_classes import guess_class
from starlings_worker.errors import ExitCode, WorkerError


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """A device as `--devices` names it, and what people call it."""

    name: str
    product: str

    @property
    def class_name(self) -> str:
        """Of `device_classes`; empty when unknown."""
        return guess_class(self.product)


CPU = ListedDevice("cpu", "cpu")


def list_gpus() -> tuple[ListedDevice, ...]:
    """NVIDIA GPUs by the driver's own count; none when there is no driver. Other makes are found by torch in
    the engine.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
            text = name.decode() if isinstance(name, bytes) else str(name)
            gpus.append(ListedDevice(f"cuda:{index}", text))
        return tuple(gpus)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def choose_devices(wish: str, gpus: tuple[ListedDevice, ...] | None = None) -> tuple[ListedDevice, ...]:
    """The devices that `--devices` asks for.

    Args:
        wish: "" (every GPU, else the CPU), "all" (the same, but an error when there is no GPU), "cpu", or a
        list such as
            "cuda:0,cuda:2".
        gpus: what the host has; found out when None.

    Raises:
        WorkerError: a name that is no device, or one named twice. Whether torch can use it is seen in the
        engine.
    """
    wish = wish.strip().lower()
    if wish == "cpu":
        return (CPU,)
    found = list_gpus() if gpus is None else gpus
    if wish == "":
        return found or (CPU,)
    if wish == "all":
        if not found:
            raise WorkerError(
                ExitCode.NO_DEVICE,
                "--devices all, but the driver shows no GPU here. Check `nvidia-smi`, or use --devices cpu",
            )
        return found
    by_name = {device.name: device for device in found}
    chosen = []
    for part in wish.split(","):
        name = part.strip()
        name = "cuda:0" if name == "cuda" else name
        kind, _, number = name.partition(":")
        if kind not in ("cpu", "cuda", "mps", "xpu") or (number and not number.isdecimal()):
            raise WorkerError(
                ExitCode.USAGE, f"--devices {part.strip()!r} is no device; write all, cpu or cuda:0,cuda:2"
            )
        chosen.append(by_name.get(name, ListedDevice(name, name)))
    if len({device.name for device in chosen}) < len(chosen):
        raise WorkerError(ExitCode.USAGE, f"--devices {wish} names a device twice")
    return tuple(chosen)
