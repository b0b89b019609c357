"""What the device does next: one thing at a time, the exchange and the optimizer before further microbatches."""

from __future__ import annotations

import random

from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import DeviceEffect, TakeCopy
from starlings_worker.core.flow import Flow
from starlings_worker.core.streaming.stream import Stream


def next_effect(
    device: DeviceQueue, flow: Flow, stream: Stream | None, now_s: float, rng: random.Random, *, trains: bool
) -> DeviceEffect | None:
    """Takes it from where it waits. `trains`: the span is loaded, and nothing holds training up."""
    waiting = device.waiting
    if stream is not None and stream.running and not (waiting and isinstance(waiting[0], TakeCopy)):
        closing = flow.graph_to_close()
        if closing is not None:
            return closing
    if waiting:
        return waiting.popleft()
    return flow.next_computation(now_s, rng) if trains else None
