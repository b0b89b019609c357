"""What the tests of codecs share: one spec of every kind, tensors, and what is true of each decoded tensor."""

from __future__ import annotations

import torch

from starlings_compression.codec import Codec, decode_any
from starlings_compression.errors import CodecError

# Every family, every flag, compositions; small chunks, so that small tensors have several.
EVERY = (
    "exact",
    "fp16",
    "bf16",
    "fp8:128",
    "fp8-e5m2:32",
    "int8:128",
    "int8:8",
    "int4:64",
    "int4:32/means",
    "int2:64",
    "int2:16/means",
    "sign:64",
    "topk:64/4096",
    "topk:5/64|int2:8",
    "topk:3/16|fp16",
    "randk:4/32",
    "randk:16/256|int8:8",
    "lowrank:2",
    "lowrank:1|int8:64",
    "dct-topk:64/32|sign:64",
    "dct-topk:8/9",
    "exact|zstd:3",
    "int8:64|zstd:1",
    "topk:5/64|int4:8|zstd:3",
    "dct-topk:16/30|int8:32|zstd:3",
    "lowrank:3|fp16|zstd:3",
)
LOSSY = tuple(spec for spec in EVERY if not spec.startswith("exact"))
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LIMIT = 1 << 30
FUZZ_LIMIT_BYTES = 1 << 16


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    decoded = codec.decode(codec.encode(tensor), limit_bytes=LIMIT)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype
    assert bool(torch.isfinite(decoded).all())
    return decoded


def relative_error(codec: Codec, tensor: torch.Tensor) -> float:
    wide = tensor.double()
    return float((round_trip(codec, tensor).double() - wide).norm() / wide.norm())


def check(data: bytes) -> bool:
    """Whether `data` was accepted; fails when something else than a bounded, finite tensor or CodecError
    comes out.
    """
    try:
        tensor = decode_any(data, limit_bytes=FUZZ_LIMIT_BYTES)
    except CodecError:
        return False
    assert tensor.numel() * tensor.element_size() <= FUZZ_LIMIT_BYTES
    assert tensor.dim() <= 8
    assert not tensor.dtype.is_floating_point or bool(torch.isfinite(tensor).all())
    if tensor.dtype == torch.bool:
        assert set(tensor.view(torch.uint8).unique().tolist()) <= {0, 1}
    return True
