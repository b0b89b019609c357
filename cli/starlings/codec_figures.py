"""What each codec does on this machine: bits, errors, speed. Runs in a child, because it needs torch.

Three inputs of `ELEMENTS` values as a matrix: normal; heavy-tailed (Student's t, three degrees of freedom); and a real
gradient, that of a small byte model after some steps on Python's own sources, repeated to the size.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from starlings_compression.codec import Codec, make_codec
from starlings_compression.errors import SpecError
from starlings_compression.families import FAMILIES

# One spec per family at its defaults, and compositions in use.
SPECS = (
    *(name for name in FAMILIES if name != "zstd"),
    "topk:64/4096|int2",
    "dct-topk:64/32|sign",
    "int8:128|zstd:3",
)
SIDE = 1024
ELEMENTS = SIDE * SIDE
_STEPS = 20
_TRIES = 3


def inputs() -> dict[str, Tensor]:
    """The tensors that codecs are measured on; the same on every call."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(SIDE, SIDE, generator=generator)
    # t with 3 degrees of freedom: a normal over the root of a third of a chi-squared.
    squares = torch.randn(3, SIDE, SIDE, generator=generator).square().sum(0)
    return {"normal": normal, "heavy": normal / (squares / 3).sqrt(), "gradient": real_gradient()}


def real_gradient() -> Tensor:
    """Of a byte model (two bytes predict the next one) after some steps of SGD on the source of torch.nn's package."""
    data = torch.frombuffer(
        bytearray(Path(torch.nn.functional.__file__).read_bytes()), dtype=torch.uint8
    ).long()
    width = 128
    generator = torch.Generator().manual_seed(2)
    embedding = (torch.randn(256, width, generator=generator) * 0.1).requires_grad_()
    hidden = (torch.randn(2 * width, 512, generator=generator) / 16).requires_grad_()
    head = (torch.randn(512, 256, generator=generator) / 22).requires_grad_()
    weights = (embedding, hidden, head)
    gradients: tuple[Tensor, ...] = ()
    for _ in range(_STEPS):
        at = torch.randint(0, len(data) - 3, (512,), generator=generator)
        context = torch.cat([embedding[data[at]], embedding[data[at + 1]]], 1)
        loss = nn.functional.cross_entropy(torch.relu(context @ hidden) @ head, data[at + 2])
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.5 * gradient
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return flat.repeat(-(-ELEMENTS // flat.numel()))[:ELEMENTS].view(SIDE, SIDE).contiguous()


def relative_error(decoded: Tensor, tensor: Tensor) -> float:
    """|decoded - tensor| / |tensor|, Euclidean."""
    return float((decoded - tensor).norm() / tensor.norm())


def seconds_of(codec: Codec, tensor: Tensor) -> tuple[float, float]:
    """The fastest of a few encodings and decodings, buffers made beforehand."""
    out = bytearray(codec.size_estimate(tensor).most_bytes)
    back = torch.empty_like(tensor)
    encode_s = decode_s = float("inf")
    for _ in range(_TRIES):
        begin = time.perf_counter()
        length = codec.encode_into(tensor, out)
        middle = time.perf_counter()
        codec.decode(memoryview(out)[:length], limit_bytes=tensor.nbytes, out=back)
        encode_s = min(encode_s, middle - begin)
        decode_s = min(decode_s, time.perf_counter() - middle)
    return encode_s, decode_s


def rows() -> list[dict[str, Any]]:
    """One row per spec; `missing` says what a codec needs that is not installed here."""
    torch.set_num_threads(1)
    tensors, found = inputs(), []
    for spec in SPECS:
        try:
            codec = make_codec(spec)
        except SpecError as error:
            found.append({"codec": spec, "missing": str(error)})
            continue
        encode_s, decode_s = seconds_of(codec, tensors["normal"])
        row: dict[str, Any] = {
            "codec": codec.spec.text,
            "bits_per_value": 8 * len(codec.encode(tensors["normal"])) / ELEMENTS,
            "exact_decode": codec.exact_decode,
        }
        for name, tensor in tensors.items():
            decoded = codec.decode(codec.encode(tensor), limit_bytes=tensor.nbytes)
            row[f"error_{name}"] = relative_error(decoded, tensor)
        row["encode_gb_per_s"] = 4 * ELEMENTS / encode_s / 1e9
        row["decode_gb_per_s"] = 4 * ELEMENTS / decode_s / 1e9
        found.append(row)
    return found
