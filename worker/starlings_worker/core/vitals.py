"""What a worker says of itself with each heartbeat: that it lives, what it gets done, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlings_protos.messages import Heartbeat

if TYPE_CHECKING:
    from starlings_worker.core.core import WorkerCore


def heartbeat(core: WorkerCore, now_s: float) -> Heartbeat:
    """What the device's own telemetry says is the shell's to add."""
    flow = core.flow
    stages = core.assignment.span.stages if core.loaded and core.assignment is not None else ()
    return Heartbeat(
        core.progress,
        core.version,
        core.device.busy_s(now_s),
        flow.passes,
        tuple(flow.measured_seconds.get(stage, 0.0) for stage in stages),
        flow.push_s,
        flow.room_s,
    )
