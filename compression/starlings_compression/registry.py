"""Which class does what a spec says. The names themselves are in `families.FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable

from starlings_compression.codec import Codec
from starlings_compression.dct import DctTopkCodec
from starlings_compression.exact import ExactCodec
from starlings_compression.floats import Bf16Codec, Fp8Codec, Fp8E5m2Codec, Fp16Codec
from starlings_compression.integers import Int2Codec, Int4Codec, Int8Codec, SignCodec
from starlings_compression.lossless import ZstdCodec
from starlings_compression.lowrank import LowrankCodec
from starlings_compression.sparse import RandkCodec, TopkCodec
from starlings_compression.spec import CodecSpec

_VALUES: dict[str, Callable[[CodecSpec], Codec]] = {
    "exact": ExactCodec,
    "fp16": Fp16Codec,
    "bf16": Bf16Codec,
    "fp8": Fp8Codec,
    "fp8-e5m2": Fp8E5m2Codec,
    "int8": Int8Codec,
    "int4": Int4Codec,
    "int2": Int2Codec,
    "sign": SignCodec,
}
# They take the codec of their values as well.
_REDUCERS: dict[str, Callable[[CodecSpec, Codec], Codec]] = {
    "topk": TopkCodec,
    "randk": RandkCodec,
    "lowrank": LowrankCodec,
    "dct-topk": DctTopkCodec,
}


def build(spec: CodecSpec) -> Codec:
    """The codec of a checked spec. Raises SpecError for one that needs a package that is not here."""
    if spec.squeezer is not None:
        return ZstdCodec(spec, build(spec.without_squeezer))
    if spec.reducer is not None:
        return _REDUCERS[spec.reducer.name](spec, build(spec.of_values))
    return _VALUES[spec.values.name](spec)
