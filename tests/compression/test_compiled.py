"""Compiled loops give the bits of the eager ones, or are not used."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from codec_cases import normal
from starlings_compression import compiled
from starlings_compression.codec import make_codec
from starlings_compression.errors import CodecError
from starlings_compression.feedback import ErrorFeedback
from starlings_compression.layout import DataType
from starlings_compression.terms import Landing, Term
from starlings_compression.wire import open_wire, plain_reader

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang", "g++", "clang++"))), reason="needs a C compiler"
)


@pytest.fixture(autouse=True)
def _eager_again() -> Iterator[None]:
    yield
    compiled.forget()


def test_without_a_compiler_nothing_changes_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    before = make_codec("int8:128").encode(normal(5000))
    assert compiled.prepare("int8:128") == "there is no C compiler here"
    assert make_codec("int8:128").encode(normal(5000)) == before
    assert "only int8" in (compiled.prepare("topk:64/4096|int8") or "")


def test_a_compiler_that_fails_is_told_and_nothing_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled, "_SOURCE", tmp_path / "none.c")
    false = shutil.which("false")
    assert false is not None
    monkeypatch.setattr(shutil, "which", lambda name: false)
    assert "compiling failed: CalledProcessError" in (compiled.prepare("int8:64") or "")
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / "no-such-compiler"))
    assert "compiling failed: FileNotFoundError" in (compiled.prepare("int8:64") or "")
    assert compiled.int8_kernels(64) is None


@needs_a_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("#define ROUNDING 12582912.0f", "#define ROUNDING 6291456.0f"),
        ("0x7fffu", "0x8000u"),
        ("dropped[i] = sum[i] - code * scale;", "dropped[i] = sum[i] - code;"),
        ("dropped, block, t > 0);", "dropped, block, t > 1);"),
        ("out[i] += (float)codes[i] * scale * weight;", "out[i] += (float)codes[i] * scale;"),
        ("fold(&state, out + first, weights + start, block);", "fold(&state, out + first, weights, block);"),
        ("0xffff0000u", "0xffffff00u"),
        ("target[i] = bounded((float)numbers[i] * scale);", "target[i] = (float)numbers[i];"),
        ("fold(&state, target, weights + start, block);", "fold(&state, target, weights, block);"),
        ("piece, PIECE, t > 0);", "piece, PIECE, t > 1);"),
        ("fold(&state, piece, weights + start, PIECE);", "fold(&state, piece, weights, PIECE);"),
    ],
)
def test_code_that_gives_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    source = compiled._SOURCE.read_text()
    assert right in source
    changed = tmp_path / "kernels.c"
    changed.write_text(source.replace(right, wrong))
    monkeypatch.setattr(compiled, "_SOURCE", changed)
    assert "other bytes" in (compiled.prepare("int8:64") or "")
    assert compiled.int8_kernels(64) is None


@needs_a_compiler
@pytest.mark.parametrize("block", [128, 8])
def test_compiled_code_gives_the_eager_bits(block: int) -> None:
    codec = make_codec(f"int8:{block}")
    tensors = [normal(count, seed=count) for count in (0, 5, block - 1, block, block + 1, 700 * block + 3)]
    tensors += [normal(300).bfloat16(), normal(65, 33).t(), torch.nn.Parameter(normal(512))]
    tensors += [
        normal(500) * 2.0**-130,
        torch.full((300,), torch.finfo(torch.float32).max),
        -torch.zeros(300),
    ]
    eager = [codec.encode(tensor) for tensor in tensors]
    decoded = [codec.decode(data, limit_bytes=1 << 20) for data in eager]
    assert compiled.prepare(codec.spec) is None
    assert compiled.prepare(codec.spec) is None
    assert [codec.encode(tensor) for tensor in tensors] == eager
    for data, before in zip(eager, decoded, strict=True):
        after = codec.decode(data, limit_bytes=1 << 20)
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = normal(5 * block)
        values[3 * block - 1] = bad
        with pytest.raises(CodecError, match="hidden: NaN"):
            codec.encode(values, name="hidden")
        with pytest.raises(CodecError, match="hidden: NaN"):
            ErrorFeedback(codec).encode(values, name="hidden")


@needs_a_compiler
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_compiled_error_feedback_gives_the_eager_bits(decay: float) -> None:
    rounds = [normal(40 * 64 + 17, seed=i) * 10.0 ** (i - 2) for i in range(5)]

    def run() -> list[tuple[bytes, bytes]]:
        feedback = ErrorFeedback(make_codec("int8:64"), decay)
        found = []
        for values in rounds:
            data = feedback.encode(values)
            feedback.commit()
            assert feedback.residual is not None
            found.append((data, bytes(feedback.residual.view(torch.uint8).numpy())))
        return found

    eager = run()
    assert compiled.prepare("int8:64") is None
    assert run() == eager


@needs_a_compiler
def test_the_compiler_cannot_hang_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(command: list[str], *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", never)
    assert "TimeoutExpired" in (compiled.prepare("int8:64") or "")


@needs_a_compiler
@pytest.mark.parametrize("count", [64 * 20, 64 * 20 + 7])
def test_a_sum_that_is_encoded_at_once_gives_the_bits_of_one_that_is_computed_first(count: int) -> None:
    """Plain values and codes in any order, weighted; and values that are not finite are refused by who reads them."""
    codec = make_codec("int8:64")
    tensors = [normal(count, seed=seed) * 3.0**seed for seed in range(3)]
    packed = codec.encode(tensors[1])
    size = 4 * count

    class Sum:
        shape, device, granularity = (count,), torch.device("cpu"), 64
        # Where what is encoded is wanted once it is decoded.
        landing: Landing | None

        def __init__(self, landing: Landing | None = None) -> None:
            self.landing = landing
            self.readers = [
                plain_reader(tensors[0]),
                open_wire(
                    codec,
                    packed,
                    data_type=DataType.FLOAT32,
                    shape=(count,),
                    limit_bytes=size,
                    device=self.device,
                ),
                plain_reader(tensors[2]),
            ]

        def terms(self) -> list[Term]:
            found = [
                reader.term(weight) for reader, weight in zip(self.readers, (1.0, 0.3, 2.5), strict=True)
            ]
            return [term for term in found if term is not None]

        def read(self, start: int, stop: int, into: torch.Tensor) -> torch.Tensor:
            into.copy_(tensors[0][start:stop])
            into.add_(self.readers[1].read(start, stop, torch.empty(stop - start)) * 0.3)
            into.add_(tensors[2][start:stop] * 2.5)
            if not into.isfinite().all():
                raise CodecError("the third's values are not finite")
            return into

    def run(residual: torch.Tensor | None, landing: Landing | None = None) -> tuple[bytes, bytes]:
        buffer, error = bytearray(codec.size_estimate(tensors[0]).most_bytes), torch.empty(count)
        codec.encode_with_error(Sum(landing), buffer, error, residual=residual)
        return bytes(buffer), bytes(error.view(torch.uint8).numpy())

    eager = [run(None), run(tensors[2])]
    assert len(Sum().terms()) == 3
    assert compiled.prepare(codec.spec) is None
    assert [run(None), run(tensors[2])] == eager
    # The same bytes, and whole chunks of what they decode to in the place of a summand.
    kept, weights = tensors[0].clone(), torch.arange(128, dtype=torch.int32) | 1
    landing = Landing(tensors[0], weights, 64)
    assert run(tensors[2], landing) == eager[1]
    decoded = codec.decode(eager[1][0], limit_bytes=size)
    assert (landing.first, landing.last, len(landing.folds)) == (64, 64 + 9 * 128, 9)
    assert torch.equal(tensors[0][64:1216], decoded[64:1216])
    assert torch.equal(tensors[0][:64], kept[:64])
    assert torch.equal(tensors[0][1216:], kept[1216:])
    found = compiled.int8_kernels(64)
    assert found is not None
    assert landing.folds == [found.fold(piece, weights) for piece in decoded[64:1216].view(-1, 128)]
    for first in (32, count):
        nowhere = Landing(torch.empty(0), weights, first)
        tensors[0].copy_(kept)
        assert run(tensors[2], nowhere) == eager[1]
        assert not nowhere.folds
    tensors[2][100] = float("inf")
    for where in (None, Landing(tensors[0], weights, 0)):
        with pytest.raises(CodecError, match="the third's"):
            run(None, where)
    assert torch.equal(tensors[0][64:], kept[64:]), "nothing of a block that is not finite may be replaced"
