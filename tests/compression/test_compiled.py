"""The compiled encoder gives the bytes of the eager one, or is not used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from codec_cases import normal
from starlings_compression import compiled
from starlings_compression.codec import make_codec
from starlings_compression.errors import CodecError


@pytest.fixture(autouse=True)
def _eager_again() -> Iterator[None]:
    yield
    compiled.forget()


def test_without_a_compiler_nothing_changes_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    before = make_codec("int8:128").encode(normal(5000))
    assert compiled.prepare("int8:128") == "there is no C++ compiler here"
    assert make_codec("int8:128").encode(normal(5000)) == before
    assert "only int8" in (compiled.prepare("topk:64/4096|int8") or "")


def test_a_kernel_that_fails_or_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)

    def broken(function: object, **options: object) -> compiled.Kernel:
        raise RuntimeError("the compiler\nended")

    monkeypatch.setattr(torch, "compile", broken)
    assert compiled.prepare("int8:64") == "compiling failed: RuntimeError: the compiler"

    def careless(function: compiled.Kernel, **options: object) -> compiled.Kernel:
        def kernel(source: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            peak = function(source, scales, codes)
            codes[3, 5] += 1
            return peak

        return kernel

    monkeypatch.setattr(torch, "compile", careless)
    assert "other bytes" in (compiled.prepare("int8:64") or "")
    assert compiled.int8_kernel(64) is None


def test_the_expression_that_is_compiled_gives_the_eager_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled here: that the chunks, the rest and the check fit together needs no compiler."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    check_the_same("int8:64")


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.parametrize("block", [128, 64])
def test_compiled_encoding_gives_the_eager_bytes(block: int) -> None:
    check_the_same(f"int8:{block}")


def check_the_same(spec: str) -> None:
    codec = make_codec(spec)
    step = compiled.kernel_elements(codec.spec.values.arguments[0])
    tensors = [normal(count, seed=count) for count in (5, step - 1, step, step + 1000, 2 * step + 77)]
    tensors += [normal(step + 3).bfloat16(), normal(1025, 1025).t(), torch.nn.Parameter(normal(step))]
    eager = [codec.encode(tensor) for tensor in tensors]
    assert compiled.prepare(spec) is None
    assert compiled.prepare(spec) is None
    assert [codec.encode(tensor) for tensor in tensors] == eager
    bad = normal(2 * step)
    bad[step + 5] = float("nan")
    with pytest.raises(CodecError, match="hidden: NaN"):
        codec.encode(bad, name="hidden")
