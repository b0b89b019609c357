"""Codecs that send fewer values: which ones, and what comes back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_cases import LIMIT, normal, relative_error, round_trip
from starlings_compression.codec import make_codec
from starlings_compression.dct import dct_matrix
from starlings_compression.lowrank import orthonormal_rows
from starlings_compression.sizes import kept_of
from starlings_compression.sparse import drawn_places
from starlings_compression.state import CodecState
from starlings_compression.tensors import CHUNK_ELEMENTS

# ---------------------------------------------------------------------- top-k


@given(st.integers(1, 7), st.integers(0, 100), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_topk_keeps_the_largest_of_each_chunk_and_nothing_else(kept: int, count: int, seed: int) -> None:
    tensor = normal(count, seed=seed)
    expected = torch.zeros(count)
    for start in range(0, count, 8):
        chunk = tensor[start : start + 8].tolist()
        for place in sorted(range(len(chunk)), key=lambda i: -abs(chunk[i]))[:kept]:
            expected[start + place] = chunk[place]
    assert torch.equal(round_trip(make_codec(f"topk:{kept}/8"), tensor), expected)


@pytest.mark.parametrize("spec", ["topk:16/256", "topk:16/1024", "topk:16/8192", "topk:3/65536"])
def test_indices_of_every_width(spec: str) -> None:
    tensor = normal(70_000, seed=1)
    decoded = round_trip(make_codec(spec), tensor)
    assert torch.equal(decoded[decoded != 0], tensor[decoded != 0])
    kept, chunk = make_codec(spec).spec.elements[0].arguments
    assert int((decoded != 0).sum()) == kept_of(70_000, chunk, kept)


def test_values_of_topk_go_through_the_next_codec() -> None:
    tensor = normal(4096 * 3 + 100, seed=2)
    plain = round_trip(make_codec("topk:64/4096"), tensor)
    places = plain.nonzero().view(-1)
    for spec in ("int2:64", "int8:128", "fp16", "sign:256"):
        decoded = round_trip(make_codec(f"topk:64/4096|{spec}"), tensor)
        assert torch.equal(decoded[places], round_trip(make_codec(spec), tensor[places]))
        assert int(decoded.count_nonzero()) <= places.numel()


def test_two_bits_suit_what_topk_leaves() -> None:
    tensor = normal(1 << 16, seed=3)
    best = relative_error(make_codec("topk:64/4096"), tensor)
    assert relative_error(make_codec("topk:64/4096|int2"), tensor) < best + 0.002
    bits = 8 * len(make_codec("topk:64/4096|int2").encode(tensor)) / tensor.numel()
    assert bits < 0.24


# ---------------------------------------------------------------------- rand-k


def test_randk_draws_one_of_each_piece_anew_each_round_by_the_shared_seed() -> None:
    codec, tensor = make_codec("randk:4/32"), normal(1003, seed=4)
    here, there, other = CodecState(9), CodecState(9), CodecState(10)
    places = []
    for _ in range(3):
        data = codec.encode(tensor, here)
        assert codec.encode(tensor, there) == data
        assert codec.encode(tensor, other) != data
        decoded = codec.decode(data, limit_bytes=LIMIT)
        chosen = decoded.nonzero().view(-1)
        assert torch.equal(decoded[chosen], tensor[chosen])
        assert (chosen // 8).tolist() == list(range(126))
        places.append(chosen.tolist())
        for state in (here, there, other):
            state.commit()
    assert places[0] != places[1] != places[2]


def test_randk_places_are_even_and_the_same_everywhere() -> None:
    # A receiver on any machine draws the same: SplitMix64, as a generator in plain Python gives it.
    assert drawn_places(7, 0, 8, 64, torch.device("cpu")).tolist() == [24, 1, 57, 37, 28, 15, 29, 20]
    counts = torch.bincount(drawn_places(1, 0, 64_000, 64, torch.device("cpu")), minlength=64)
    # Six standard deviations of a binomial count of mean 1000.
    assert int((counts - 1000).abs().max()) < 190
    # Where reading begins makes no difference.
    assert torch.equal(
        drawn_places(1, 500, 100, 10, torch.device("cpu")),
        drawn_places(1, 0, 600, 10, torch.device("cpu"))[500:],
    )


# ---------------------------------------------------------------------- low rank


def test_a_matrix_of_low_rank_comes_back_whole() -> None:
    matrix = normal(90, 3, seed=5) @ normal(3, 70, seed=6)
    assert relative_error(make_codec("lowrank:3"), matrix) < 1e-5
    assert relative_error(make_codec("lowrank:8"), matrix) < 1e-5
    assert relative_error(make_codec("lowrank:4"), matrix.view(90, 7, 10)) < 1e-5


def test_warm_starts_come_to_the_best_factors() -> None:
    matrix = normal(200, 160, seed=7) + 8 * normal(200, 2, seed=8) @ normal(2, 160, seed=9)
    s = torch.linalg.svdvals(matrix.double())
    best = float((s[4:].square().sum() / s.square().sum()).sqrt())
    codec, state = make_codec("lowrank:4"), CodecState()
    errors = []
    for _ in range(40):
        decoded = codec.decode(codec.encode(matrix, state), limit_bytes=LIMIT)
        errors.append(float((decoded - matrix).norm() / matrix.norm()))
        state.commit()
    assert errors[0] > best * 1.001
    assert errors[-1] < best * 1.001
    assert all(after <= before * 1.00001 for before, after in itertools.pairwise(errors))


def test_vectors_and_matrices_too_small_for_factors_travel_exactly() -> None:
    codec = make_codec("lowrank:4|int8")
    for shape in ((1000,), (), (0,), (7, 8), (1, 500), (500, 1)):
        tensor = normal(*shape)
        assert torch.equal(round_trip(codec, tensor), tensor)


def test_rank_that_the_matrix_does_not_have_is_drawn_again() -> None:
    codec, state = make_codec("lowrank:3"), CodecState(1)
    one = normal(60, 1, seed=1) @ normal(1, 50, seed=2)
    codec.encode(one, state)
    state.commit()
    three = normal(60, 3, seed=3) @ normal(3, 50, seed=4)
    decoded = codec.decode(codec.encode(three, state), limit_bytes=LIMIT)
    assert float((decoded - three).norm() / three.norm()) < 1e-4
    assert torch.equal(round_trip(codec, torch.zeros(60, 50)), torch.zeros(60, 50))


@given(st.integers(1, 6), st.integers(6, 50), st.integers(0, 1000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_rows_become_orthonormal_also_when_nearly_parallel(
    count: int, size: int, seed: int, near: bool
) -> None:
    rows = normal(count, size, seed=seed)
    if near:
        rows = rows[:1] + 1e-3 * rows
    done = orthonormal_rows(rows).double()
    assert float((done @ done.t() - torch.eye(count)).abs().max()) < 1e-5


# ---------------------------------------------------------------------- cosines


def test_the_transform_is_orthonormal_and_a_dct() -> None:
    import numpy
    from scipy.fft import dct

    for size in (1, 2, 7, 64):
        matrix = dct_matrix(size).double()
        assert torch.allclose(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64), atol=1e-6)
        values = numpy.linspace(-1, 2, size)
        assert numpy.allclose(matrix.numpy() @ values, dct(values, norm="ortho"), atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 64), (100, 70), (5, 200), (4096,), (9000,), (50,), (3, 5, 7)])
def test_a_wave_is_one_coefficient_and_all_coefficients_are_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = normal(*shape, seed=1)
    assert relative_error(make_codec("dct-topk:8/63"), tensor) < 0.2
    smooth = torch.full(shape, 0.25)
    assert relative_error(make_codec("dct-topk:64/32"), smooth) < 0.35
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    wave = torch.cos(torch.pi * (2 * rows + 1) * 5 / 128) * torch.cos(torch.pi * (2 * columns + 1) * 9 / 128)
    assert relative_error(make_codec("dct-topk:64/1"), wave) < 1e-5


def test_coefficients_are_the_largest_ones() -> None:
    from scipy.fft import dctn

    tensor = normal(16, 32, seed=3)
    decoded = round_trip(make_codec("dct-topk:16/9"), tensor)
    for columns in (slice(0, 16), slice(16, 32)):
        before = torch.from_numpy(dctn(tensor[:, columns].numpy(), norm="ortho")).view(-1)
        after = torch.from_numpy(dctn(decoded[:, columns].contiguous().numpy(), norm="ortho")).view(-1)
        kept = before.abs().topk(9).indices
        expected = torch.zeros(256)
        expected[kept] = before[kept]
        assert torch.allclose(after, expected, atol=1e-5)


def test_wide_matrices_are_transformed_some_columns_at_a_time() -> None:
    """The same coefficients as of the parts by themselves, and memory that does not grow with the width."""
    at_once = CHUNK_ELEMENTS // 64
    tensor = normal(70, 2 * at_once + 901, seed=4)
    codec = make_codec("dct-topk:64/32")
    decoded = round_trip(codec, tensor)
    for columns in (slice(0, at_once), slice(at_once, 2 * at_once), slice(2 * at_once, None)):
        assert torch.equal(decoded[:, columns], round_trip(codec, tensor[:, columns]))
    low = round_trip(codec, tensor.bfloat16())
    assert float((low.float() - decoded).norm() / decoded.norm()) < 0.1
