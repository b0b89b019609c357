"""Measures what the device does: real forward and backward passes of one microbatch of the job's shape, by
block kind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.memory import GPU_CONTEXT_BYTES
from starlings_job.model import Batch, build_stage, loss_sum
from starlings_job.records import IMAGES, DatasetMeta
from starlings_job.spec import JobSpec
from starlings_worker.device import Device
from starlings_worker.emulation import BACKWARD_PART, FORWARD_PART, Throttle

_WARM_UP_PASSES = 1
_TIMED_PASSES = 3
# One kind of block may take this long; a slow device is measured by fewer passes.
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds per microbatch by block kind."""

    forward_seconds: dict[str, float]
    backward_seconds: dict[str, float]


def memory_for_job(device: Device, cap_bytes: int) -> int:
    """Bytes that the job may use by the accounting of `starlings_job.memory`.

    Args:
        cap_bytes: the user's or the emulated device's limit; 0 = none. A cap is what the device pretends to
        have, so that
            the accounting, which is the same for all, decides what fits.
    """
    if cap_bytes:
        return cap_bytes
    # The context exists already when this is measured, and the accounting counts it once more.
    return device.memory_bytes() + (GPU_CONTEXT_BYTES if device.torch.type == "cuda" else 0)


def probe(job: JobSpec, device: Device, throttle: Throttle) -> Measured:
    """Runs each kind of block once built alone, in the order of the model, on made-up weights and samples.

    Raises:
        torch.OutOfMemoryError: not even one block fits.
    """
    description = job.description
    batch = _made_up_batch(job.dataset, job.train.microbatch).to(device.torch)
    value = batch.inputs
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    last = len(description.blocks) - 1
    for index, block in enumerate(description.blocks):
        kind = description.kind(block)
        if kind in forward:
            # Blocks of one kind have one shape in and out, so the value can stand for its successor.
            continue
        module = build_stage(description, index, index, device.torch)
        with torch.no_grad():
            for named in module.block_tensors().values():
                for parameter in named.values():
                    parameter.normal_(std=0.02) if parameter.dim() >= 2 else parameter.fill_(1.0)
        value, forward[kind], backward[kind] = _measure(
            module, value, batch if index == last else None, device, throttle, 1 / (last + 1)
        )
        del module
        device.free_cache()
    return Measured(forward, backward)


def _measure(
    module: Callable[[Tensor], Tensor],
    value: Tensor,
    labels: Batch | None,
    device: Device,
    throttle: Throttle,
    share: float,
) -> tuple[Tensor, float, float]:
    """(output, median seconds of a forward, of a backward) of one block, which is `share` of the model."""
    forward, backward = [], []
    gradient: Tensor | None = None
    began = time.monotonic()
    output = value
    for number in range(_WARM_UP_PASSES + _TIMED_PASSES):
        if number > _WARM_UP_PASSES and time.monotonic() - began > _PATIENCE_S:
            break
        entry = value.detach().requires_grad_() if value.is_floating_point() else value
        begin = time.monotonic()
        with throttle.block(FORWARD_PART * share), device.autocast():
            output = module(entry)
            result = output if labels is None else loss_sum(output, labels)[0]
            device.synchronise()
        middle = time.monotonic()
        with throttle.block(BACKWARD_PART * share):
            if gradient is None:
                gradient = torch.ones_like(result)
            if result.requires_grad:
                result.backward(gradient)  # type: ignore[no-untyped-call]
            device.synchronise()
        if number >= _WARM_UP_PASSES:
            forward.append(middle - begin)
            backward.append(time.monotonic() - middle)
    return output.detach().float(), statistics.median(forward), statistics.median(backward)


def _made_up_batch(meta: DatasetMeta, rows: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    if meta.kind == IMAGES:
        pixels = torch.rand(rows, *meta.image_shape, generator=generator) * 2 - 1
        labels = torch.randint(0, meta.vocabulary_size, (rows,), generator=generator)
        return Batch(pixels, labels, None, rows)
    tokens = torch.randint(0, meta.vocabulary_size, (rows, meta.sequence_length + 1), generator=generator)
    count = rows * meta.sequence_length
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, count)
