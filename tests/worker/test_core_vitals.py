"""What drivers and devices say of themselves with each heartbeat."""

from __future__ import annotations

import pytest

from starlings_protos.messages import SlowedBy, WorkerId
from starlings_worker.core.core import WorkerCore
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import ClearGradients
from starlings_worker.core.events import GradientsCleared
from starlings_worker.core.vitals import heartbeat
from starlings_worker.gpu_clocks import GpuClocks, slowed_by


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (0x00, SlowedBy.UNSPECIFIED),
        (0x01, SlowedBy.UNSPECIFIED),  # idle
        (0x04, SlowedBy.POWER),
        (0x08, SlowedBy.POWER),
        (0x20, SlowedBy.HEAT),
        (0x44, SlowedBy.HEAT),
        (0x80, SlowedBy.POWER),
    ],
)
def test_clock_reasons_are_read_as_nvml_defines_them(reasons: int, expected: SlowedBy) -> None:
    assert slowed_by(reasons) is expected


def test_a_host_without_the_device_has_no_clocks() -> None:
    assert GpuClocks.of("00000000-0000-0000-0000-000000000000") is None


def test_a_device_is_busy_from_the_beginning_to_the_end_of_one_piece_of_work() -> None:
    device = DeviceQueue()
    assert device.busy_s(5.0) == 0.0
    device.begin(ClearGradients(1, 0), 5.0)
    assert device.busy_s(7.5) == 2.5
    assert device.finish(GradientsCleared(1, 0)) is not None
    assert device.busy_s(9.0) == 0.0


def test_who_holds_nothing_says_no_seconds() -> None:
    sign = heartbeat(WorkerCore(WorkerId("w0")), 1.0)
    assert (sign.busy_s, sign.passes, sign.stage_seconds) == (0.0, 0, ())
