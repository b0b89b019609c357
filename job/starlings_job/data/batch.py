"""Records as tensors, and the loss over them. The torch side of `starlings_job.records`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.nn.functional as functional

from starlings_job.records import IMAGES, DatasetMeta

_NUMPY_TYPES = {1: "<u1", 2: "<u2", 4: "<u4"}


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch of n samples with t tokens each, or of n images.

    inputs: int64 (n, t), or float32 (n, channels, rows, columns) in [-1, 1].
    targets: int64 (n, t), or (n,).
    mask: bool (n, t), which targets count; None when all do.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor | None
    target_count: int

    def rows(self, first: int, end: int) -> Batch:
        """Some of its samples, as a batch of their own."""
        mask = None if self.mask is None else self.mask[first:end]
        targets = self.targets[first:end]
        count = targets.numel() if mask is None else int(mask.sum())
        return Batch(self.inputs[first:end], targets, mask, count)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        mask = None if self.mask is None else self.mask.to(device)
        return Batch(self.inputs.to(device), self.targets.to(device), mask, self.target_count)


def decode_records(records: bytes | bytearray | memoryview, meta: DatasetMeta) -> Batch:
    """The records of a TRAIN or EVALUATE lease as a batch on the CPU.

    Raises:
        ValueError: no whole number of records, or a token that the model does not have.
    """
    size = meta.record_bytes
    if len(records) == 0 or len(records) % size:
        raise ValueError(f"{len(records)} bytes are no whole number of records of {size} bytes")
    rows = np.frombuffer(records, dtype=np.uint8).reshape(-1, size)
    if meta.kind == IMAGES:
        pixels = rows[:, :-1].astype(np.float32).reshape(-1, *meta.image_shape)
        targets = _checked(rows[:, -1].astype(np.int64), meta)
        return Batch(torch.from_numpy(pixels / 127.5 - 1.0), targets, None, len(rows))
    length = meta.tokens_per_record
    token_part = np.ascontiguousarray(rows[:, : length * meta.token_bytes])
    tokens = _checked(token_part.view(_NUMPY_TYPES[meta.token_bytes]).astype(np.int64), meta)
    mask = None
    count = len(rows) * meta.sequence_length
    if meta.masked:
        mask = torch.from_numpy(rows[:, length * meta.token_bytes + 1 :] == 1)
        count = int(mask.sum())
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, count)


def decode_prompt(records: bytes | bytearray | memoryview, meta: DatasetMeta) -> torch.Tensor:
    """The tokens of a GENERATE lease as int64 (1, t); at most the model's context, its last tokens kept.

    Raises:
        ValueError: no whole number of tokens, none, or a token that the model does not have.
    """
    if len(records) == 0 or len(records) % meta.token_bytes:
        raise ValueError(f"{len(records)} bytes are no whole number of tokens of {meta.token_bytes} bytes")
    tokens = np.frombuffer(records, dtype=_NUMPY_TYPES[meta.token_bytes]).astype(np.int64)
    return _checked(tokens[-meta.context_tokens :].reshape(1, -1), meta)


def loss_sum(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    """Sum of the cross entropy in nats over the batch's targets (float32 scalar, with a graph); their number.

    Args:
        logits: (n, t, vocabulary) or (n, classes); any float type, the loss is computed in float32.
    """
    flat = logits.float().reshape(prod(batch.targets.shape), -1)
    if batch.mask is None:
        return functional.cross_entropy(flat, batch.targets.reshape(-1), reduction="sum"), batch.target_count
    losses = functional.cross_entropy(flat, batch.targets.reshape(-1), reduction="none")
    return (losses * batch.mask.reshape(-1).to(losses.dtype)).sum(), batch.target_count


def next_token(logits: torch.Tensor) -> int:
    """The most likely token after the last position of the first row; logits (n, t, vocabulary)."""
    return int(logits[0, -1].float().argmax())


def _checked(tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]], meta: DatasetMeta) -> torch.Tensor:
    # An index out of range would end the device's context on a GPU, so it is found here.
    if tokens.size and int(tokens.max()) >= meta.vocabulary_size:
        raise ValueError(f"token {int(tokens.max())} is not one of the {meta.vocabulary_size} known")
    return torch.from_numpy(tokens)
