"""Between torch tensors and `RawTensor`."""

from __future__ import annotations

import torch

from starlings_job.state import RawTensor, Tensorlike

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}


def raw_tensor(tensor: torch.Tensor) -> RawTensor:
    """The tensor's bytes. A contiguous tensor on the CPU is not copied: clone it first if it will change."""
    plain = tensor.detach().cpu().contiguous()
    flat = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return RawTensor(_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data)


def torch_tensor(raw: Tensorlike) -> torch.Tensor:
    """A tensor on the CPU with its own memory."""
    dtype = TYPES[raw.data_type]
    if not raw.data.nbytes:
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape)
