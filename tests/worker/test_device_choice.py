"""Which devices, of which class, in which precision, at which speed: everything that needs no engine process."""

from __future__ import annotations

import time

import pytest
import torch

from starlings_worker.addresses import reachable_addresses
from starlings_worker.device import open_device
from starlings_worker.device_classes import DEVICE_CLASSES, device_class, guess_class
from starlings_worker.device_list import CPU, ListedDevice, choose_devices
from starlings_worker.emulation import Throttle
from starlings_worker.errors import ExitCode, WorkerError
from starlings_worker.platform import machine_id, memory_available_bytes, memory_kills

torch.set_num_threads(1)
GPUS = (ListedDevice("cuda:0", "NVIDIA GeForce RTX 3060"), ListedDevice("cuda:1", "NVIDIA GeForce RTX 4090"))


@pytest.mark.parametrize(
    ("wish", "gpus", "names"),
    [
        ("", GPUS, ["cuda:0", "cuda:1"]),
        ("", (), ["cpu"]),
        ("all", GPUS, ["cuda:0", "cuda:1"]),
        ("cpu", GPUS, ["cpu"]),
        ("cuda:1", GPUS, ["cuda:1"]),
        ("cuda", GPUS, ["cuda:0"]),
        (" CUDA:1 , cuda:0", GPUS, ["cuda:1", "cuda:0"]),
        # Whether torch can use what the driver does not show is seen in the engine.
        ("cuda:7", GPUS, ["cuda:7"]),
    ],
)
def test_devices_are_chosen_by_name(wish: str, gpus: tuple[ListedDevice, ...], names: list[str]):
    assert [d.name for d in choose_devices(wish, gpus)] == names


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ("all", ExitCode.NO_DEVICE),
        ("gpu0", ExitCode.USAGE),
        ("cuda:x", ExitCode.USAGE),
        ("cpu,cpu", ExitCode.USAGE),
    ],
)
def test_a_wish_that_makes_no_sense_says_what_would(wish: str, code: ExitCode):
    with pytest.raises(WorkerError, match="cpu") as failed:
        choose_devices(wish, ())
    assert failed.value.exit_code == code


def test_classes_are_recognised_and_every_figure_has_a_source():
    assert GPUS[0].class_name == "rtx3060"
    assert guess_class("NVIDIA GeForce RTX 2080 Ti") == "rtx2080ti"
    assert guess_class("NVIDIA A100-SXM4-80GB") == "a100"
    assert guess_class("NVIDIA L40") == guess_class("NVIDIA A1000") == ""
    assert guess_class("AMD Radeon") == "" == CPU.class_name
    assert device_class("RTX-3060").memory_bytes == 12 << 30
    with pytest.raises(WorkerError, match="rtx3060"):
        device_class("rtx9999")
    for entry in DEVICE_CLASSES.values():
        assert 0 < entry.relative_speed <= 1
        assert entry.source


def test_the_cpu_opens_in_float32_and_names_its_class():
    device = open_device("cpu", "auto")
    assert not device.bf16
    assert device.numeric_class.startswith("cpu/")
    assert device.numeric_class.endswith("torch-" + ".".join(torch.__version__.split(".")[:2]))
    assert open_device("cpu", "bf16").numeric_class != device.numeric_class
    assert 0 < device.memory_bytes() <= memory_available_bytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_torch_cannot_use_is_exit_13_with_the_fix():
    with pytest.raises(WorkerError, match=r"--devices cpu|torch-backend") as failed:
        open_device("cuda:0", "auto")
    assert failed.value.exit_code == ExitCode.NO_DEVICE
    with pytest.raises(WorkerError) as failed:
        open_device("toaster", "auto")
    assert failed.value.exit_code == ExitCode.USAGE


def _burn(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def test_an_emulated_device_takes_its_time():
    """Sleeps t (1/s - 1) after t seconds of processor time: at least that, however busy the machine is."""
    throttle = Throttle(0.25)
    begin = time.monotonic()
    for _ in range(10):
        with throttle.block():
            _burn(0.004)
    assert time.monotonic() - begin >= 0.16 * 0.98
    for speed in (0.0, 1.0):
        assert not Throttle(speed).active
    with pytest.raises(ValueError, match="outside"):
        Throttle(1.5)


def test_addresses_that_the_user_names_replace_those_that_are_found():
    assert reachable_addresses("0.0.0.0", 7710, ("example.org", "1.2.3.4:99", "[::1]:5", "fd00::1")) == (
        "example.org:7710",
        "1.2.3.4:99",
        "[::1]:5",
        "[fd00::1]:7710",
    )
    assert reachable_addresses("127.0.0.1", 5) == ("127.0.0.1:5",)
    found = reachable_addresses("0.0.0.0", 5)
    assert found
    assert all(address.endswith(":5") for address in found)


def test_this_machine_has_an_id_and_memory():
    assert machine_id() == machine_id() != ""
    assert memory_available_bytes() > 1 << 20
    assert memory_kills() >= -1
