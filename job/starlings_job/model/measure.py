"""The profile of a model: one block of each kind is run once, on the CPU, on one sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from starlings_compression.sizes import matrix_shape
from starlings_job.model.stage import Model, StageModule, build_stage, described, meta_tensors
from starlings_job.profile import BlockProfile, Profile
from starlings_job.records import IMAGES, DatasetMeta


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _grouped_flops(rows: tuple[int, ...], experts: tuple[int, ...], *_: Any, **__: Any) -> int:
    """(rows, k) times (experts, k, n): each row meets one expert, so only active experts count."""
    return 2 * rows[0] * rows[1] * experts[-1]


# What the counter does not know: the CPU's attention kernel, and the product of many experts at once.
_COUNTED_TOO = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
}


def measure_profile(
    model: Model, meta: DatasetMeta, progress: Callable[[float], None] | None = None
) -> Profile:
    """What every block costs for one sample of the dataset.

    Args:
        progress: told the fraction done.
    """
    description = described(model)
    measured: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {}
    blocks = []
    tensors = meta_tensors(description)
    shape: tuple[int, ...] = (1, *meta.image_shape) if meta.kind == IMAGES else (1, meta.sequence_length)
    for index, name in enumerate(description.blocks):
        kind = description.kind(name)
        if kind not in measured:
            measured[kind] = _measure(build_stage(description, index, index), shape)
        flops, activations, parameters, largest, shape = measured[kind]
        trained = [tensor for inner, tensor in tensors[name].items() if description.is_trainable(name, inner)]
        matrices = [tensor.shape for tensor in trained if tensor.dim() >= 2]
        blocks.append(
            BlockProfile(
                name=name,
                kind=kind,
                parameter_count=parameters,
                trainable_count=sum(tensor.numel() for tensor in trained),
                flops_per_sample=flops,
                activation_bytes_per_sample=activations,
                boundary_bytes_per_sample=4 * torch.Size(shape).numel(),
                largest_tensor_bytes=largest,
                matrix_count=sum(shape.numel() for shape in matrices),
                matrix_sides=sum(sum(matrix_shape(shape)) for shape in matrices),
            )
        )
        if progress is not None:
            progress((index + 1) / len(description.blocks))
    tied = description.tied_parameters()
    tied_count = 0 if tied is None else tensors[tied[0][0]][tied[0][1]].numel()
    return Profile(
        blocks=tuple(blocks),
        family=description.family,
        sequence_length=meta.sequence_length,
        vocabulary_size=description.vocabulary_size,
        record_bytes=meta.record_bytes,
        tied_count=tied_count,
    )


def _measure(stage: StageModule, shape: tuple[int, ...]) -> tuple[int, int, int, int, tuple[int, ...]]:
    """FLOPs, bytes kept for the backward, parameters, largest parameter in bytes, shape of the output."""
    parameters = list(stage.body.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    if stage.is_first and stage.description.is_language_model:
        x = torch.zeros(shape, dtype=torch.int64)
    else:
        x = torch.zeros(shape, requires_grad=not stage.is_first)
    known = {t.untyped_storage().data_ptr() for t in (x, *parameters)}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False, custom_mapping=_COUNTED_TOO) as counter, hooks:
        out = stage(x)
    return (
        int(counter.get_total_flops()),
        sum(kept.values()),
        sum(p.numel() for p in parameters),
        4 * max((p.numel() for p in parameters), default=0),
        tuple(out.shape),
    )
