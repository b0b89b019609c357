"""Which class does what a spec says. The names themselves are in `families.FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable

from starlings_compression.blocks import Fp16Codec, Int8Codec
from starlings_compression.codec import Codec
from starlings_compression.errors import SpecError
from starlings_compression.exact import ExactCodec
from starlings_compression.lossless import ZstdCodec
from starlings_compression.spec import CodecSpec

_VALUES: dict[str, Callable[[CodecSpec], Codec]] = {
    "exact": ExactCodec,
    "fp16": Fp16Codec,
    "int8": Int8Codec,
}
# They take the codec of their values as well.
_REDUCERS: dict[str, Callable[[CodecSpec, Codec], Codec]] = {}


def build(spec: CodecSpec) -> Codec:
    """The codec of a checked spec. Raises SpecError for one that is not built yet."""
    if names := missing(spec):
        raise SpecError(f"codec {spec.text!r}: {names} is not built yet")
    if spec.squeezer is not None:
        return ZstdCodec(spec, build(spec.without_squeezer))
    if spec.reducer is not None:
        return _REDUCERS[spec.reducer.name](spec, build(spec.of_values))
    return _VALUES[spec.values.name](spec)


def missing(spec: CodecSpec) -> str:
    """What of a spec has no implementation yet, or nothing."""
    known = {*_VALUES, *_REDUCERS, "zstd"}
    return ", ".join(element.name for element in spec.elements if element.name not in known)
