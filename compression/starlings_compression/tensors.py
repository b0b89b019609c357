"""Between torch and bytes: types, views on buffers, checks that every codec shares."""

from __future__ import annotations

import math
import warnings

import torch

from starlings_compression.errors import CodecError
from starlings_compression.layout import DIMENSION_LIMIT, DataType

TORCH_TYPES: dict[DataType, torch.dtype] = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.INT64: torch.int64,
    DataType.INT32: torch.int32,
    DataType.UINT8: torch.uint8,
    DataType.BOOL: torch.bool,
    DataType.FLOAT64: torch.float64,
}
DATA_TYPES: dict[torch.dtype, DataType] = {dtype: data_type for data_type, dtype in TORCH_TYPES.items()}

# Elements that are worked on at once: small enough to stay in a processor's cache, large enough to hide torch's
# call overhead (int8 encodes a third slower with half of it, and a few percent faster with twice as many).
CHUNK_ELEMENTS = 1 << 18
# On an accelerator launches cost more and caches less: the whole of most tensors at once, still bounded.
DEVICE_CHUNK_ELEMENTS = 1 << 26


def _spend_the_warning_about_read_only_buffers() -> None:
    """torch warns once per process when it wraps read-only bytes. We only read them: spend it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


_spend_the_warning_about_read_only_buffers()


def view(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat CPU tensor over `buffer`; a copy of it where it is not aligned (some machines trap then)."""
    if len(buffer) == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def chunk_elements(device: torch.device, multiple: int = 1) -> int:
    """Elements per chunk on `device`, a multiple of `multiple`."""
    size = CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(size // multiple, 1) * multiple


def data_type_of(tensor: torch.Tensor, name: str) -> DataType:
    """Raises CodecError for tensors that no codec takes: complex, quantised, sparse, meta, too many
    dimensions.
    """
    data_type = DATA_TYPES.get(tensor.dtype)
    if data_type is None or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise CodecError(
            f"{name}: a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be encoded"
        )
    if tensor.dim() > DIMENSION_LIMIT:
        raise CodecError(f"{name}: {tensor.dim()} dimensions; at most {DIMENSION_LIMIT} can be encoded")
    return data_type


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite: one pass, no temporaries (`isfinite().all()` is 20 times slower
    on a CPU).
    """
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def finite_peak(tensor: torch.Tensor, name: str) -> float:
    """The largest magnitude; 0 of nothing. Raises CodecError for NaN, infinities, and what float32 cannot hold."""
    if tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    peak = max(-float(low), float(high))
    if not (math.isfinite(float(low)) and peak <= torch.finfo(torch.float32).max):
        raise CodecError(f"{name}: NaN or infinite values")
    return peak
