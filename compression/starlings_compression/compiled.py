"""A faster encoder for `int8:B` on CPUs, made by torch.compile where a C++ compiler is present.

    why_not = prepare("int8:128")        # None: from now on every int8:128 codec of this process uses it

One pass over memory instead of six over a cache. Compiling takes seconds to a minute the first time on a machine, so it
is asked for, never done behind anybody's back; torch keeps the result on disk. The kernel is used only after
it gave the very bytes of the eager path on a set of hard inputs; where there is no compiler, or it fails, or it
differs, everything stays as it was. Decoding needs none: it is as fast as memory without.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import torch

from starlings_compression.spec import CodecSpec, parse_spec

# Elements of a call: a call costs some twenty microseconds by itself, so chunks of a core's cache would be too few.
KERNEL_ELEMENTS = 1 << 20
# Values (blocks x B), scales (bfloat16, blocks x 1) and codes (int8, blocks x B) to fill; returns the peak.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_kernels: dict[int, Kernel] = {}


def int8_kernel(block: int) -> Kernel | None:
    """The kernel for that block size, if it was prepared."""
    return _kernels.get(block)


def kernel_elements(block: int) -> int:
    """How many values a kernel takes, no more and no less."""
    return max(KERNEL_ELEMENTS // block, 1) * block


def prepare(spec: str | CodecSpec) -> str | None:
    """Compiles what can be compiled for a codec; takes up to a minute.

    Returns None when the codec encodes with compiled code from now on, otherwise why it does not, in one
    sentence.

    Raises:
        SpecError: there is no such codec.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    if spec.reducer is not None or spec.values.name != "int8":
        return f"nothing of {spec} is compiled; only int8 of whole tensors is"
    (block,) = spec.values.arguments
    if block in _kernels:
        return None
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")))):
        return "there is no C++ compiler here"
    try:
        kernel: Kernel = torch.compile(_encode_int8, fullgraph=True, dynamic=False)
        good = all(_gives_the_same_bytes(kernel, block, values) for values in _hard_inputs(block))
    except Exception as error:
        # Whatever a compiler may come up with: the eager path needs none.
        return f"compiling failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if not good:
        return "compiled code gave other bytes than the eager path on this machine"
    _kernels[block] = kernel
    return None


def forget() -> None:
    """Back to the eager path."""
    _kernels.clear()


def _encode_int8(source: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What `integers.Int8Codec` does, in one expression."""
    peaks = source.abs().amax(1, keepdim=True)
    wide = (peaks / 127.0).clamp(min=2.0**-126).view(torch.int32)
    # Rounding to bfloat16 on the bits, to nearest even: compilers leave out a conversion there and back.
    rounded = ((wide + (0x7FFF + ((wide >> 16) & 1))) & -0x10000).view(torch.float32)
    codes.copy_((source * rounded.reciprocal()).round())
    scales.copy_(rounded)
    return peaks.amax()


def _hard_inputs(block: int) -> Iterator[torch.Tensor]:
    count = kernel_elements(block)
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(count, generator=generator)
    yield normal
    # All magnitudes of float32, also those that machines flush to zero.
    yield normal * 2.0 ** torch.randint(-140, 126, (count,), generator=generator).float()
    # Values that lie in the middle between two codes.
    halves = torch.randint(-127, 127, (count,), generator=generator).float() + 0.5
    halves[::block] = 127.0
    yield halves
    constant = torch.full((count,), -0.37)
    constant[: count // 2] = 0.0
    yield constant
    yield torch.where(normal > 0, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max)


@torch.no_grad()
def _gives_the_same_bytes(kernel: Kernel, block: int, values: torch.Tensor) -> bool:
    # Here, because that module imports this one.
    from starlings_compression.codec import make_codec

    codec = make_codec(f"int8:{block}")
    # Of this block size there is no kernel yet, so this is the eager path.
    expected = codec.encode(values)
    source = values.view(-1, block)
    scales = torch.empty(source.shape[0], 1, dtype=torch.bfloat16)
    codes = torch.empty(source.shape, dtype=torch.int8)
    peak = kernel(source, scales, codes)
    body = scales.view(torch.uint8).numpy().tobytes() + codes.numpy().tobytes()
    return expected.endswith(body) and float(peak) == float(values.abs().max())
