"""Spec strings, size estimates, and what they may import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from starlings_compression.codec import make_codec
from starlings_compression.errors import CompressionError, SpecError
from starlings_compression.families import FAMILIES
from starlings_compression.layout import DataType
from starlings_compression.sizes import size_estimate
from starlings_compression.spec import parse_spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("exact", "exact"),
        ("fp16", "fp16"),
        ("int8", "int8:128"),
        ("int8:64", "int8:64"),
        ("int8:0128", "int8:128"),
        ("zstd", "exact|zstd:3"),
        ("int4:64/means", "int4:64/means"),
        ("topk|exact", "topk:64/4096"),
        ("topk|int2|zstd:5", "topk:64/4096|int2:64|zstd:5"),
        ("dct-topk:64/32|sign", "dct-topk:64/32|sign:256"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    spec = parse_spec(text)
    assert spec.text == canonical == str(spec)
    assert parse_spec(canonical) == spec


@pytest.mark.parametrize(
    "text",
    [
        "", "int9", "INT8", "int8:", "int8:7", "int8:12", "int8:0", "int8:-8", "int8:131072", "int8:128/2",
        "int8:a", "int8:٣٢", "fp16:4", "exact:1", "int8|", "|", "int8:128|fp16", "exact|exact", " int8",
        "int8:1e3", "int8:8/means",
        "int4:means/8", "int4:8/mean", "zstd|int8", "zstd:20", "int8|topk", "topk:8",
        "topk:64/64",
        "topk:0/64", "topk|randk", "topk|zstd|zstd", "randk:3/64", "lowrank:0", "dct-topk:7/3", "dct-topk:64/4096",
        "x" * 65, "int8:" + "9" * 40,
    ],
)  # fmt: skip
def test_wrong_specs_are_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert isinstance(caught.value, CompressionError)
    assert len(str(caught.value)) < 300


def test_error_names_what_is_allowed() -> None:
    with pytest.raises(SpecError, match=r"unknown name 'int9'.*exact, fp16, bf16, fp8:BLOCK"):
        parse_spec("int9")
    with pytest.raises(SpecError, match=r"multiple of 8 from 8 to 65536.*usage: int8:BLOCK"):
        parse_spec("int8:7")
    with pytest.raises(SpecError, match="int8 cannot be followed by fp16"):
        parse_spec("int8|fp16")
    with pytest.raises(SpecError, match=r"int8 cannot be followed by topk; the order is \[topk or randk"):
        parse_spec("int8|topk")


def test_every_family_has_a_codec() -> None:
    for name in FAMILIES:
        assert name in [element.name for element in make_codec(name).spec.elements]
        assert FAMILIES[name].usage.startswith(name)


def test_bytes_per_value_are_as_documented() -> None:
    count = 1 << 24
    assert size_estimate("exact", (count,)).likely_bytes / count == pytest.approx(4, abs=1e-4)
    assert size_estimate("fp16", (count,)).likely_bytes / count == pytest.approx(2 + 2 / 1024, abs=1e-4)
    assert size_estimate("int8:128", (count,)).likely_bytes / count == pytest.approx(1 + 2 / 128, abs=1e-4)


def test_data_types_have_the_numbers_of_the_wire_protocol() -> None:
    from starlings_protos import data_pb2

    assert {f"DATA_TYPE_{t.name}": int(t) for t in DataType} == {
        name: number for name, number in data_pb2.DataType.items() if number
    }


def test_spec_sizes_and_layout_need_no_torch() -> None:
    code = (
        "import sys; from starlings_compression import layout, policy, sizes, spec;"
        "sys.exit(any(m.split('.')[0] in ('torch', 'numpy', 'zstandard') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_reference_has_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs/reference.md").read_text("utf-8")
    table = text.partition("## Codecs")[2].partition("\n## ")[0]
    assert [family.usage for family in FAMILIES.values() if f"| `{family.usage}` |" not in table] == []
