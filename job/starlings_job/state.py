"""Tensors as named bytes, and a block's digest over them. Torch-free, for the keeper and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

# safetensors' names of data types and their item sizes in bytes.
ITEM_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
PARAMETER = "param:"


class Tensorlike(Protocol):
    """Whatever has a tensor's type, shape and bytes; also `starlings_protos.state_transfer.StateTensor`."""

    @property
    def data_type(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor: safetensors' type name, shape, and its little-endian bytes in C order.

    Raises:
        ValueError: unknown type, or shape and bytes disagree.
    """

    data_type: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        item = ITEM_BYTES.get(self.data_type)
        if item is None:
            raise ValueError(f"unknown data type {self.data_type!r}")
        if prod(self.shape) * item != self.data.nbytes:
            raise ValueError(f"{self.data_type} of shape {self.shape} cannot have {self.data.nbytes} bytes")


def block_digest(tensors: Mapping[str, Tensorlike]) -> str:
    """SHA-256 hex over name, type, shape and bytes of every tensor, sorted by name.

    Names are state names: "param:NAME", or a kind of optimizer state and the parameter's name. Lengths are
    hashed too, so different sets of tensors never have one digest.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        text = f"{name}\0{tensor.data_type}\0{','.join(map(str, tensor.shape))}\0{tensor.data.nbytes}\0"
        digest.update(len(text.encode()).to_bytes(4, "little"))
        digest.update(text.encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def only_parameters(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The parameters among a block's state, still under their state names."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(PARAMETER)}
