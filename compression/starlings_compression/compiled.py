"""Faster loops for `int8:B` on CPUs, where a C compiler is present.

    why_not = prepare("int8:128")        # None: from now on every int8:128 codec of this process uses them

One pass over memory instead of six over a cache, and with error feedback one instead of twelve. Compiling
`kernels.c` takes about a second, starts another program, and is asked for, never done behind anybody's back. The
result is used only after it gave the very bits of the eager path on a set of hard inputs; where there is no compiler,
or it fails, or it differs, everything stays as it was.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from starlings_compression.spec import CodecSpec, parse_spec
from starlings_compression.terms import Term

_SOURCE = Path(__file__).with_name("kernels.c")
_COMPILE_LIMIT_S = 60.0
# Multiples of these many are what calls of `Kernels.fold`, and of `Kernels.add_up_folded`, take.
FOLDED_ELEMENTS = 16
SUMMED_ELEMENTS = 512
_COMPILERS = ("cc", "gcc", "clang", "g++", "clang++")
# Every operation rounded alone, as torch does it.
_FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-x", "c")


class _TermOfC(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("weight", ctypes.c_float))


class Folds:
    """Room for what `Kernels.fold` says of several pieces."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._sums, self._squares = (ctypes.c_uint64 * count)(), (ctypes.c_double * count)()

    @property
    def addresses(self) -> tuple[int, int]:
        return ctypes.addressof(self._sums), ctypes.addressof(self._squares)

    def pairs(self) -> list[tuple[int, float]]:
        """(sum, squares) of each piece."""
        return list(zip(self._sums, self._squares, strict=True))


class Kernels:
    """The compiled functions. Tensors are float32 (values, residual, error, out), bfloat16 (scales) and int8 or uint8
    (codes), on the host, flat, contiguous, and of whole blocks: callers check that.
    """

    def __init__(self, library: ctypes.CDLL, block: int) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._block = block
        self._encode = library.encode_int8
        self._encode.argtypes, self._encode.restype = [pointer] * 3 + [size] * 2, ctypes.c_uint32
        self._encode_of_sum = library.encode_int8_of_sum
        self._encode_of_sum.argtypes = [pointer, size, *[pointer] * 4, *[size] * 2]
        self._encode_of_sum.restype = ctypes.c_uint32
        self._decode_folded = library.decode_int8_folded
        self._decode_folded.argtypes = [*[pointer] * 4, *[size] * 3, *[pointer] * 2]
        self._decode_folded.restype = None
        self._encode_of_sum_folded = library.encode_int8_of_sum_folded
        self._encode_of_sum_folded.argtypes = [pointer, size, *[pointer] * 6, *[size] * 3, *[pointer] * 2]
        self._encode_of_sum_folded.restype = size
        self._add_up_folded = library.add_up_folded
        self._add_up_folded.argtypes = [pointer, size, *[pointer] * 2, *[size] * 2, *[pointer] * 2]
        self._add_up_folded.restype = size
        self._decode = library.decode_int8
        self._decode.argtypes, self._decode.restype = [pointer] * 3 + [size] * 2, None
        self._fold = library.fold_words
        self._fold.argtypes, self._fold.restype = [pointer, pointer, size, pointer], ctypes.c_uint64

    def encode(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> float:
        """Fills scales and codes; returns the largest magnitude, NaN or infinite if a value is."""
        bits = self._encode(values.data_ptr(), scales.data_ptr(), codes.data_ptr(), *self._shape(values))
        return _from_bits(bits)

    def encode_with_error(
        self,
        values: torch.Tensor,
        residual: torch.Tensor | None,
        scales: torch.Tensor,
        codes: torch.Tensor,
        error: torch.Tensor,
    ) -> float:
        """`encode` of values + residual; `error` receives what that drops."""
        return self.encode_of_sum([Term(1.0, values)], residual, scales, codes, error)

    def encode_of_sum(
        self,
        terms: Sequence[Term],
        residual: torch.Tensor | None,
        scales: torch.Tensor,
        codes: torch.Tensor,
        error: torch.Tensor,
    ) -> float:
        """`encode_with_error` of the weighted sum of terms, at least one; codes among them are in this block size."""
        summands = _terms_of_c(terms)
        old = 0 if residual is None else residual.data_ptr()
        pointers = old, scales.data_ptr(), codes.data_ptr(), error.data_ptr()
        bits = self._encode_of_sum(ctypes.addressof(summands), len(terms), *pointers, *self._shape(error))
        return _from_bits(bits)

    def encode_of_sum_folded(
        self,
        terms: Sequence[Term],
        residual: torch.Tensor | None,
        scales: torch.Tensor,
        codes: torch.Tensor,
        error: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[int, Folds]:
        """`encode_of_sum`, whose decoded blocks take their places in `out`, which may be the memory of a term, and
        `fold` of each piece of that which is as long as `weights`: a multiple of the block, as `out` is one of it.
        Returns how many elements were done: it stops at a block that is not finite, of which nothing is replaced.
        """
        summands, folds = _terms_of_c(terms), Folds(out.numel() // weights.numel())
        old = 0 if residual is None else residual.data_ptr()
        pointers = (
            old,
            scales.data_ptr(),
            codes.data_ptr(),
            error.data_ptr(),
            out.data_ptr(),
            weights.data_ptr(),
        )
        shape = folds.count, weights.numel(), self._block
        blocks = self._encode_of_sum_folded(
            ctypes.addressof(summands), len(terms), *pointers, *shape, *folds.addresses
        )
        return int(blocks) * self._block, folds

    def add_up_folded(
        self, terms: Sequence[Term], out: torch.Tensor, weights: torch.Tensor
    ) -> tuple[int, Folds]:
        """The weighted sum of terms without scales, at least one, into `out`, which may be the memory of one of them;
        and `fold` of each piece of it that is as long as `weights`, a multiple of SUMMED_ELEMENTS. Returns how many
        elements were done: it stops where the sum is not finite, before anything of that is written.
        """
        summands, folds = _terms_of_c(terms), Folds(out.numel() // weights.numel())
        pointers = out.data_ptr(), weights.data_ptr()
        done = self._add_up_folded(
            ctypes.addressof(summands), len(terms), *pointers, folds.count, weights.numel(), *folds.addresses
        )
        return int(done), folds

    def decode_folded(
        self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, weights: torch.Tensor
    ) -> Folds:
        """`decode`, and `fold` of each piece of `out` that is as long as `weights`: a multiple of the block, as `out`
        is one of it.
        """
        folds = Folds(out.numel() // weights.numel())
        pointers = scales.data_ptr(), codes.data_ptr(), out.data_ptr(), weights.data_ptr()
        self._decode_folded(*pointers, folds.count, weights.numel(), self._block, *folds.addresses)
        return folds

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(scales.data_ptr(), codes.data_ptr(), out.data_ptr(), *self._shape(out))

    def fold(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[int, float]:
        """The sum modulo 2^64 of pairs of words of 32 bits, each multiplied by its weight (int32) modulo 2^32; and the
        sum of the values' squares in float64. Their number is a multiple of `FOLDED_ELEMENTS`.
        """
        squares = ctypes.c_double()
        found = self._fold(values.data_ptr(), weights.data_ptr(), values.numel(), ctypes.addressof(squares))
        return found, squares.value

    def _shape(self, values: torch.Tensor) -> tuple[int, int]:
        return values.numel() // self._block, self._block


def _terms_of_c(terms: Sequence[Term]) -> ctypes.Array[_TermOfC]:
    summands = (_TermOfC * len(terms))()
    for place, term in zip(summands, terms, strict=True):
        place.values, place.weight = term.values.data_ptr(), term.weight
        place.scales = None if term.scales is None else term.scales.data_ptr()
    return summands


def _from_bits(bits: int) -> float:
    (value,) = struct.unpack("=f", struct.pack("=I", bits))
    return float(value)


_kernels: dict[int, Kernels] = {}


def int8_kernels(block: int) -> Kernels | None:
    """The kernels for that block size, if they were prepared."""
    return _kernels.get(block)


def any_kernels() -> Kernels | None:
    """For what does not depend on a block size: kernels that were prepared for any."""
    return next(iter(_kernels.values()), None)


def prepare(spec: str | CodecSpec) -> str | None:
    """Compiles what can be compiled for a codec; takes about a second.

    Returns None when the codec works with compiled code from now on, otherwise why it does not, in one
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
    wanted = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (*([wanted] if wanted else []), *_COMPILERS))), None)
    if compiler is None or sys.byteorder != "little":
        return "there is no C compiler here"
    try:
        kernels = Kernels(_compile(compiler), block)
        good = all(_gives_the_same_bits(kernels, block, values) for values in _hard_inputs(block))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        # Whatever a compiler may come up with: the eager path needs none.
        return f"compiling failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if not good:
        return "compiled code gave other bytes than the eager path on this machine"
    _kernels[block] = kernels
    return None


def forget() -> None:
    """Back to the eager path."""
    _kernels.clear()


def _compile(compiler: str) -> ctypes.CDLL:
    """Raises OSError or SubprocessError."""
    # The instructions of this very processor; Apple's and other ARM compilers say it otherwise.
    native = "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64") else "-march=native"
    with tempfile.TemporaryDirectory(prefix="starlings-kernels-", ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "kernels.so"
        command = [compiler, *_FLAGS, native, "-o", str(library), str(_SOURCE)]
        subprocess.run(
            command, check=True, timeout=_COMPILE_LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True
        )
        return ctypes.CDLL(str(library))


def _hard_inputs(block: int) -> Iterator[torch.Tensor]:
    count = 512 * block
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
    # Scales in the middle between two of bfloat16.
    middles = (torch.arange(0x3F80_8000, 0x3F80_8000 + 512 * 0x1_0000, 0x1_0000).int()).view(torch.float32)
    yield (
        normal.view(-1, block).clamp(-1.0, 1.0).index_fill(1, torch.tensor([0]), 1.0)
        * (middles * 127.0)[:, None]
    ).view(-1)
    yield torch.where(normal > 0, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max)


@torch.no_grad()
def _gives_the_same_bits(kernels: Kernels, block: int, values: torch.Tensor) -> bool:
    # Here, because that module imports this one.
    from starlings_compression.codec import make_codec

    codec = make_codec(f"int8:{block}")
    # Of this block size there are no kernels yet, so this is the eager path.
    expected = codec.encode(values)
    scales = torch.empty(values.numel() // block, dtype=torch.bfloat16)
    codes = torch.empty(values.numel(), dtype=torch.int8)

    def body() -> bytes:
        return bytes(scales.view(torch.uint8).numpy()) + bytes(codes.numpy())

    peak = kernels.encode(values, scales, codes)
    if not expected.endswith(body()) or peak != float(values.abs().max()):
        return False
    decoded = torch.empty_like(values)
    kernels.decode(scales, codes, decoded)
    if not _equal(decoded, codec.decode(expected, limit_bytes=4 * values.numel())):
        return False
    weights = _some_weights(values.numel())
    total, squares = kernels.fold(values, weights)
    pairs = (values.view(torch.int32) * weights).view(torch.int64)
    if total != int(pairs.sum()) & ((1 << 64) - 1):
        return False
    if not math.isclose(squares, float(values.double().square().sum()), rel_tol=1e-12):
        return False
    # Half of each, so that no sum leaves float32.
    half, other = values / 2, values.flip(0) / 2
    for residual in (None, other):
        wanted, error, buffer = torch.empty_like(half), torch.empty_like(half), bytearray(len(expected))
        codec.encode_with_error(half, buffer, wanted, residual=residual)
        kernels.encode_with_error(half, residual, scales, codes, error)
        if not (buffer.endswith(body()) and _equal(error, wanted)):
            return False
        # The same as a sum: of a tensor and nothing, and of what was encoded above and a tensor, both weighted.
        nothing = Term(0.25, torch.zeros_like(half))
        kernels.encode_of_sum([Term(1.0, half), nothing], residual, scales, codes, error)
        if not (buffer.endswith(body()) and _equal(error, wanted)):
            return False
        packed, plain = Term(0.3, codes.clone(), scales.clone(), block), Term(0.1, other)
        for terms in ([plain, packed], [packed], [Term(1.0, half)]):
            if not _lands_what_it_encodes(kernels, block, terms, residual):
                return False
        kernels.decode(scales, codes, decoded)
        for terms, summed in (
            ([packed, plain], decoded * 0.3 + other * 0.1),
            ([plain, packed], other * 0.1 + decoded * 0.3),
        ):
            codec.encode_with_error(summed, buffer, wanted, residual=residual)
            kernels.encode_of_sum(terms, residual, scales, codes, error)
            if not (buffer.endswith(body()) and _equal(error, wanted)):
                return False
    return _folds_what_it_decodes(kernels, block, scales, codes) and _adds_up(kernels, half, other)


def _folds_what_it_decodes(kernels: Kernels, block: int, scales: torch.Tensor, codes: torch.Tensor) -> bool:
    if block % FOLDED_ELEMENTS:
        return True
    plain, folded = (torch.empty(codes.numel()) for _ in range(2))
    weights = _some_weights(codes.numel() // 4)
    kernels.decode(scales, codes, plain)
    found = kernels.decode_folded(scales, codes, folded, weights)
    return _equal(plain, folded) and found.pairs() == _folds_of(kernels, plain, weights)


def _lands_what_it_encodes(
    kernels: Kernels, block: int, terms: Sequence[Term], residual: torch.Tensor | None
) -> bool:
    """In the place of a term that is plain, which is why the terms are copied first."""
    if block % FOLDED_ELEMENTS:
        return True
    count = terms[0].values.numel()
    wanted, found = (
        (
            torch.empty(count // block, dtype=torch.bfloat16),
            torch.empty(count, dtype=torch.int8),
            torch.empty(count),
        )
        for _ in range(2)
    )
    kernels.encode_of_sum(terms, residual, *wanted)
    decoded, weights = torch.empty(count), _some_weights(count // 4)
    kernels.decode(wanted[0], wanted[1], decoded)
    copies = [Term(t.weight, t.values.clone(), t.scales, t.block) for t in terms]
    out = next((t.values for t in copies if t.scales is None), torch.empty(count))
    done, folds = kernels.encode_of_sum_folded(copies, residual, *found, out, weights)
    same = all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(wanted, found, strict=True)
    )
    return (
        same and done == count and _equal(out, decoded) and folds.pairs() == _folds_of(kernels, out, weights)
    )


def _adds_up(kernels: Kernels, one: torch.Tensor, other: torch.Tensor) -> bool:
    """In the place of the second term."""
    if one.numel() % (4 * SUMMED_ELEMENTS):
        return True
    wanted, out, weights = one + other * 0.3, other.clone(), _some_weights(one.numel() // 4)
    done, folds = kernels.add_up_folded([Term(1.0, one), Term(0.3, out)], out, weights)
    return done == len(one) and _equal(out, wanted) and folds.pairs() == _folds_of(kernels, wanted, weights)


def _some_weights(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32) * 0x5BD1E995 | 1


def _folds_of(kernels: Kernels, values: torch.Tensor, weights: torch.Tensor) -> list[tuple[int, float]]:
    return [kernels.fold(piece, weights) for piece in values.view(-1, weights.numel())]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
