"""Which codec may stand where, how sums come back, and what both take on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_compression.policy import Role
from starlings_compression.sizes import size_estimate
from starlings_compression.spec import parse_spec
from starlings_job.codecs import (
    boundary_bytes,
    check_codec,
    exchange_bytes,
    may_return,
    return_spec,
    stages_most,
)
from starlings_job.errors import JobFileError
from starlings_job.spec import JobSpec, parse_job

MINIMAL = '[job]\nname = "demo"\ntokens = 10\n[model]\npreset = "tiny"\n'
VALUES = ("exact", "fp16", "bf16", "int8:128", "int4:64", "int4:64/means", "int2:64", "sign:256")
SPECS = st.builds(
    lambda parts: "|".join(part for part in parts if part),
    st.tuples(
        st.sampled_from(["", "topk:64/4096", "topk:1/8", "topk:30/64", "randk:32/1024", "dct-topk:64/32"]),
        st.sampled_from(VALUES),
        st.sampled_from(["", "zstd:3"]),
    ),
)


def job(extra: str) -> JobSpec:
    return parse_job(MINIMAL + extra)


@pytest.mark.parametrize(
    "codec",
    [
        *VALUES,
        "fp8:128",
        "int8:128|zstd:3",
        "topk:64/4096|int2",
        "dct-topk:64/32|sign",
        "lowrank",
        "lowrank:9",
    ],
)
def test_a_job_takes_every_codec_that_suits_gradients(codec: str):
    text = parse_spec(codec).text
    forced = "force = true\n" * codec.startswith("fp8")
    assert job(f'[exchange]\n{forced}codec = "{codec}"').exchange.codec == text
    assert check_codec(codec, Role.GRADIENT, force=True) == text


@pytest.mark.parametrize("codec", ["exact", "fp16", "bf16", "fp8", "int8:128", "int4:64", "int8:64|zstd:3"])
def test_a_job_takes_every_codec_that_suits_activations(codec: str):
    assert job(f'[pipeline]\ncodec = "{codec}"').pipeline.codec == parse_spec(codec).text


@pytest.mark.parametrize(
    "codec", ["topk:64/4096", "randk:64/4096", "lowrank:4", "dct-topk:64/32", "int2:64", "sign"]
)
def test_what_hurts_activations_is_refused_unless_forced(codec: str):
    with pytest.raises(JobFileError) as refused:
        job(f'[pipeline]\ncodec = "{codec}"')
    said = str(refused.value)
    assert "line 7: [pipeline] codec: codec" in said
    assert "use int8:128" in said
    assert said.endswith("or set force = true")
    assert job(f'[pipeline]\nforce = true\ncodec = "{codec}"').pipeline.codec == parse_spec(codec).text
    # The order of the keys says nothing.
    assert job(f'[pipeline]\ncodec = "{codec}"\nforce = true').pipeline.force


@pytest.mark.parametrize("force", ["", "force = true\n"])
def test_what_cannot_work_is_refused_forced_or_not(force: str):
    for rest in ("int8", "bf16", "zstd"):
        with pytest.raises(JobFileError, match=r"factors of lowrank are summed up exactly.*; use lowrank:4"):
            job(f'[exchange]\n{force}codec = "lowrank:4|{rest}"')
    for section in ("pipeline", "exchange"):
        with pytest.raises(JobFileError, match="makes more bytes than exact"):
            job(f'[{section}]\n{force or "force = true"}\ncodec = "topk:4000/4096"')
    with pytest.raises(JobFileError, match="force: input should be a valid boolean"):
        job('[exchange]\nforce = "yes"')


def test_coarse_boundaries_bound_the_number_of_stages():
    assert stages_most("int8:128") == 0
    assert stages_most("int4:64") == 5
    assert stages_most("int4:64", force=True) == 0
    assert job('[pipeline]\ncodec = "int4:64"').stages_most == 5
    assert job('[pipeline]\nforce = true\ncodec = "int4:64"').stages_most == 0


@pytest.mark.parametrize(
    ("spec", "contributors", "back"),
    [
        ("exact", 3, "exact"),
        ("exact|zstd:3", 3, "exact|zstd:3"),
        ("fp16", 3, "fp16"),
        ("int8:64", 3, "int8:64"),
        ("int4:64", 3, "int8:128"),
        ("sign:256|zstd:3", 3, "int8:128|zstd:3"),
        ("topk:64/4096|int2:64", 1, "topk:64/4096|int8:128"),
        ("topk:64/4096|int2:64", 3, "topk:192/4096|int8:128"),
        # 12 bits for a place and 8 for a value: from 40 % on a dense vector is smaller.
        ("topk:64/4096|int2:64", 25, "topk:1600/4096|int8:128"),
        ("topk:64/4096|int2:64", 26, "int8:128"),
        ("topk:64/4096", 4, "topk:256/4096"),
        ("randk:64/4096|int8:128", 2, "topk:128/4096|int8:128"),
        ("dct-topk:64/32|sign:256", 2, "int8:128"),
        ("lowrank:4", 3, "exact"),
    ],
)
def test_how_sums_come_back(spec: str, contributors: int, back: str):
    assert return_spec(parse_spec(spec), contributors).text == back
    assert may_return(back, parse_spec(spec))


@given(SPECS, st.integers(1, 200))
def test_sums_come_back_the_same_on_every_machine_and_never_larger_than_dense(text: str, contributors: int):
    spec = parse_spec(text)
    back = return_spec(spec, contributors)
    assert back.exact_decode
    assert may_return(back.text, spec)
    assert parse_spec(back.text) == back
    if spec.reducer is not None:
        dense = size_estimate("int8:128|zstd:3" if spec.squeezer else "int8:128", (1 << 20,)).likely_bytes
        assert size_estimate(back, (1 << 20,)).likely_bytes <= dense + 4096
        if back.reducer is not None:
            # The places of all contributions together: nothing is left out of the sum.
            assert back.reducer.arguments[0] == contributors * spec.reducer.arguments[0]


@pytest.mark.parametrize(
    "text", ["", "pickle", "exact", "int4:64", "topk:65/4096|int8:128", "topk:64/8192|int8:128"]
)
def test_other_ways_back_are_refused(text: str):
    assert not may_return(text, parse_spec("topk:64/4096|int2"))


def test_bytes_on_the_wire():
    assert boundary_bytes("exact", (4, 128, 64)) == 4 * 4 * 128 * 64
    assert boundary_bytes("int8:128", (4, 128, 64)) == size_estimate("int8:128", (4, 128, 64)).most_bytes
    # Small tensors travel exactly.
    assert boundary_bytes("int8:128", (10, 10)) == 400
    assert exchange_bytes("exact", 1000, 1) == 0
    assert exchange_bytes("exact", 1 << 20, 4) == 2 * 3 * (1 << 20)
    # Up by int4, back by int8.
    part = ((1 << 19),)
    up, back = (size_estimate(s, part).most_bytes for s in ("int4:64", "int8:128"))
    assert exchange_bytes("int4:64", 1 << 20, 2) == up + back
    # Factors both ways: 4 x (rows + columns) for each matrix, the rest as it is; never more than the whole.
    square = {"matrix_elements": 10**6, "matrix_sides": 2000}
    assert exchange_bytes("lowrank:4", 10**6 + 100, 2, **square) == 2 * 4 * (8000 + 100) // 2
    assert exchange_bytes("lowrank:4", 10**6, 2) == exchange_bytes("exact", 10**6, 2)
    assert exchange_bytes("exact", 10**6, 2, **square) == exchange_bytes("exact", 10**6, 2)
