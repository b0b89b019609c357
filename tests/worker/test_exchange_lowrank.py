"""`lowrank` in a group's exchange: PowerSGD on the sum of all gradients, nothing lost, the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_protos import data_pb2, frames
from starlings_protos.frames import FrameError
from starlings_protos.messages import ExchangeHeader, Refusal
from starlings_worker.core.events import Leg
from starlings_worker.exchange import RefusedPart
from starlings_worker.history import Part, parse_part
from starlings_worker.inbound import check_part
from support.exchange_swarm import GROUP, Swarm

torch.set_num_threads(1)

# A matrix, a vector, a tensor that counts as a matrix, and a matrix that factors would not make smaller.
SHAPES: list[tuple[int, ...]] = [(40, 30), (37,), (24, 5, 6), (3, 4), (1,)]
SIZE = 1200 + 37 + 720 + 12 + 1
MATRICES = [(0, 40, 30), (1237, 24, 30)]


def _fill(swarm: Swarm, seed: int) -> torch.Tensor:
    """Random gradients; their sum in float64."""
    generator = torch.Generator().manual_seed(seed)
    for vector in swarm.vectors:
        vector.gradient.normal_(generator=generator)
    return sum((v.gradient.double() for v in swarm.vectors), torch.zeros(SIZE, dtype=torch.float64))


def _power_sgd(matrix: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vogels 2019, algorithm 1, of one matrix (here: of the sum): (P Q^T, Q)."""
    p = matrix @ q
    for column in range(p.shape[1]):
        for earlier in range(column):
            p[:, column] -= (p[:, earlier] @ p[:, column]) * p[:, earlier]
        p[:, column] /= p[:, column].norm()
    q = matrix.T @ p
    return p @ q.T, q


def test_an_exchange_is_power_sgd_on_the_sum_of_gradients_and_errors():
    """The reference sees one machine with the sum of all; here each of three members sees its own gradient only."""
    swarm = Swarm(SHAPES, 3, "lowrank:3")
    q = {
        start: swarm.buffers[0]._rounds[GROUP]._start(n).T.double()
        for n, (start, _, _) in enumerate(MATRICES)
    }
    error = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(6):
        total = _fill(swarm, step) + error
        expected = total.clone()
        for start, rows, columns in MATRICES:
            part = slice(start, start + rows * columns)
            found, q[start] = _power_sgd(total[part].view(rows, columns), q[start])
            expected[part] = found.reshape(-1)
        error = total - expected
        swarm.exchange([1.0] * 3, [0.5, 0.3, 0.2], step)
        swarm.commit(step)
        for vector in swarm.vectors:
            torch.testing.assert_close(vector.gradient.double(), expected, rtol=0, atol=2e-4)
        torch.testing.assert_close(swarm.owed(), error, rtol=0, atol=2e-4)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3),
    st.sampled_from([(1 / 3, 1 / 3, 1 / 3), (0.5, 0.5, 0.0), (0.0, 0.0, 1.0)]),
    st.integers(0, 1000),
)
def test_what_was_decoded_and_what_is_owed_add_up_to_all_inputs(
    rank: int, weights: list[float], shares: tuple[float, ...], seed: int
):
    """With members that add nothing in some steps, own nothing, and another cut in every step."""
    swarm = Swarm(SHAPES, 3, f"lowrank:{rank}")
    given_, got = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for step in range(3):
        _fill(swarm, seed + step)
        now = [1.0, weights[1], weights[2]] if step else [1.0] * 3
        given_ += sum(w * v.gradient.double() for w, v in zip(now, swarm.vectors, strict=True))
        results = swarm.exchange(now, list(shares[step:] + shares[:step]), step)
        assert len(set(results)) == 1
        got += swarm.vectors[0].gradient.double()
        for vector in swarm.vectors:
            assert torch.equal(vector.gradient, swarm.vectors[0].gradient)
        swarm.commit(step)
    torch.testing.assert_close(got + swarm.owed(), given_, rtol=0, atol=2e-4)


def test_what_factors_would_not_make_smaller_is_summed_up_exactly():
    """Vectors, small matrices, and every matrix at a rank that is high enough."""
    low, high, exact = (Swarm(SHAPES, 2, codec) for codec in ("lowrank:2", "lowrank:18", "exact"))
    for swarm in (low, high, exact):
        _fill(swarm, 5)
        swarm.exchange([1.0, 1.0], [0.5, 0.5])
    assert torch.equal(high.vectors[0].gradient, exact.vectors[0].gradient)
    for begin, end in ((1200, 1237), (1957, SIZE)):
        assert torch.equal(low.vectors[0].gradient[begin:end], exact.vectors[0].gradient[begin:end])
    assert not torch.equal(low.vectors[0].gradient, exact.vectors[0].gradient)


def test_a_sum_of_low_rank_comes_through_whole():
    """The members' matrices have rank 2 each, their sum 4."""
    swarm = Swarm([(60, 50)], 2, "lowrank:4")
    for number, vector in enumerate(swarm.vectors):
        left, right = (
            torch.randn(n, 2, generator=torch.Generator().manual_seed(number + n)) for n in (60, 50)
        )
        vector.gradient.copy_((left @ right.T).view(-1))
    total = sum(v.gradient.clone() for v in swarm.vectors)
    swarm.exchange([1.0, 1.0], [0.5, 0.5])
    torch.testing.assert_close(swarm.vectors[0].gradient, total, rtol=1e-3, atol=1e-3)


def test_attempts_that_were_given_up_leave_no_trace():
    """In the middle of either pass, and with other members."""
    tried, calm = Swarm(SHAPES, 2, "lowrank:2"), Swarm(SHAPES, 2, "lowrank:2")
    for step in range(3):
        for swarm in (tried, calm):
            _fill(swarm, step)
        for attempt in range(2 if step == 1 else 0):
            group = tried.group([1.0, 1.0], [0.9, 0.1])
            tried.open(group, step, attempt)
            if attempt:
                tried.contribute(group, step, attempt)
                assert tried.aggregate(group, step, attempt) == [None, None]
            for buffers in tried.buffers:
                buffers.clear(step, attempt + 1)
        results = tried.exchange([1.0, 1.0], [0.5, 0.5], step, attempt=2)
        assert results == calm.exchange([1.0, 1.0], [0.5, 0.5], step)
        for swarm in (tried, calm):
            swarm.commit(step)
    assert torch.equal(tried.owed(), calm.owed())


def test_alone_the_gradient_stays_as_it_is():
    swarm = Swarm(SHAPES, 1, "lowrank:2")
    _fill(swarm, 1)
    before = swarm.vectors[0].gradient.clone()
    swarm.exchange([1.0], [1.0])
    assert torch.equal(swarm.vectors[0].gradient, before)
    assert [(p.begin, p.end, p.codec, p.pass_number) for p in swarm.buffers[0].updates(0)[GROUP]] == [
        (0, SIZE, "exact", 0)
    ]


def test_a_newcomer_replays_the_factors_and_begins_with_them():
    swarm, newcomer = Swarm(SHAPES, 2, "lowrank:2"), Swarm(SHAPES, 1, "lowrank:2")
    for step in range(3):
        _fill(swarm, step)
        results = swarm.exchange([1.0, 1.0], [0.5, 0.5], step)
        assert newcomer.buffers[0].replay(swarm.buffers[1].updates(step)) == {GROUP: results[0][0]}
        assert torch.equal(newcomer.vectors[0].gradient, swarm.vectors[0].gradient)
        swarm.commit(step)
    # From here on it is one of them: all begin with the same Q.
    old, new = (b._rounds[GROUP]._warm for b in (swarm.buffers[0], newcomer.buffers[0]))
    assert len(old) == len(new) == len(MATRICES)
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


def test_members_that_begin_with_different_factors_still_agree_and_lose_nothing():
    """One was loaded afresh while the other went on: the sum is projected on a space that both share."""
    swarm = Swarm(SHAPES, 2, "lowrank:3")
    total = _fill(swarm, 0)
    swarm.exchange([1.0, 1.0], [0.5, 0.5])
    got = swarm.vectors[0].gradient.double()
    swarm.commit(0)
    owed = swarm.owed()
    swarm.buffers[1]._rounds[GROUP]._warm = ()
    total += _fill(swarm, 1)
    assert len(set(swarm.exchange([1.0, 1.0], [0.5, 0.5], 1))) == 1
    got += swarm.vectors[0].gradient.double()
    assert torch.equal(swarm.vectors[0].gradient, swarm.vectors[1].gradient)
    swarm.commit(1)
    assert not torch.equal(swarm.owed(), owed)
    torch.testing.assert_close(got + swarm.owed(), total, rtol=0, atol=2e-4)


def test_what_is_needed_of_the_first_pass_is_there_in_the_second():
    swarm = Swarm(SHAPES, 2, "lowrank:2")
    group = swarm.group([1.0, 1.0], [0.5, 0.5])
    _fill(swarm, 1)
    swarm.open(group)
    headers = [ExchangeHeader(0, 0, GROUP, part, 1, number) for number in range(2) for part in range(2)]
    assert swarm.buffers[0].outgoing(Leg.CONTRIBUTION, headers[3]) is None
    swarm.contribute(group)
    swarm.aggregate(group)
    first = swarm.buffers[0].outgoing(Leg.AGGREGATE, headers[0])
    swarm.contribute(group, pass_number=1)
    swarm.aggregate(group, pass_number=1)
    assert swarm.buffers[0].outgoing(Leg.AGGREGATE, headers[0]) == first
    second = swarm.buffers[0].outgoing(Leg.AGGREGATE, headers[2])
    assert first is not None
    assert second is not None
    assert first[0] == second[0] == "exact"
    assert swarm.buffers[0].outgoing(Leg.AGGREGATE, replace(headers[0], pass_number=2)) is None
    assert swarm.buffers[0].outgoing(Leg.AGGREGATE, replace(headers[0], pass_number=2**31)) is None


@pytest.mark.parametrize("bad", [b"", b"\xff" * 400, "long"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_malformed_part_of_either_pass_names_its_sender(bad: bytes | str, number: int):
    swarm = Swarm(SHAPES, 2, "lowrank:2")
    group = swarm.group([1.0, 1.0], [0.5, 0.5])
    _fill(swarm, 1)
    swarm.open(group)
    if number:
        swarm.contribute(group)
        swarm.aggregate(group)
    swarm.contribute(group, pass_number=number)
    header = ExchangeHeader(0, 0, GROUP, 0, 1, number)
    data = bad if isinstance(bad, bytes) else bytes(4 * SIZE)
    swarm.buffers[0].keep(Leg.CONTRIBUTION, header, swarm.ids[1], data)
    with pytest.raises(RefusedPart, match="contribution is malformed") as refused:
        swarm.buffers[0].reduce(0, 0, GROUP)
    assert refused.value.culprit == "w1"
    swarm.buffers[1].reduce(0, 0, GROUP)
    swarm.buffers[1].keep(Leg.AGGREGATE, header, swarm.ids[0], data)
    with pytest.raises(RefusedPart, match="aggregate of part 0 is malformed") as refused:
        swarm.buffers[1].assemble(0, 0, GROUP)
    assert refused.value.culprit == "w0"


def test_gradients_and_products_that_are_not_finite_are_refused():
    swarm = Swarm(SHAPES, 2, "lowrank:2")
    swarm.vectors[0].gradient[5] = float("nan")
    with pytest.raises(RefusedPart, match="NaN or infinite") as refused:
        swarm.open(swarm.group([1.0, 1.0], [0.5, 0.5]))
    assert refused.value.culprit == "w0"
    swarm = Swarm([(8, 8), (40, 30)], 2, "lowrank:2")
    group = swarm.group([1.0, 1.0], [1.0, 0.0])
    swarm.open(group)
    swarm.contribute(group)
    swarm.aggregate(group)
    # Any bytes of a summed Q: as large as they may be, and with directions that add up.
    swarm.buffers[1]._rounds[GROUP]._lefts = tuple(torch.ones(2, rows) for rows in (8, 40))
    largest = torch.full((2 * (8 + 30),), 3e38).numpy().tobytes()
    swarm.buffers[1].keep(Leg.AGGREGATE, ExchangeHeader(0, 0, GROUP, 0, 1, 1), swarm.ids[0], largest)
    with pytest.raises(RefusedPart, match="product of the summed factors is not finite"):
        swarm.buffers[1].assemble(0, 0, GROUP)


def test_limits_and_codecs_of_each_pass():
    buffers = Swarm(SHAPES, 1, "lowrank:2").buffers[0]
    assert buffers.part_limit(GROUP, 0) == SIZE
    assert buffers.part_limit(GROUP, 1) == 2 * (30 + 30)
    assert buffers.part_limit(GROUP, 2) == buffers.part_limit("stage:7", 1) == 0
    assert Swarm(SHAPES, 1, "int8:128").buffers[0].part_limit(GROUP, 1) == 0
    assert buffers.codec_text == "lowrank:2"
    for leg in Leg:
        assert buffers.takes(leg, "exact")
        assert not buffers.takes(leg, "lowrank:2")
        assert not buffers.takes(leg, "int8:128")


@pytest.mark.parametrize(
    ("number", "count", "codec", "refusal"),
    [
        (0, SIZE + 1, "exact", Refusal.LIMIT),
        (0, 128, "lowrank:2", Refusal.MALFORMED),
        (1, 2 * 60 + 1, "exact", Refusal.LIMIT),
        (2, 8, "exact", Refusal.MALFORMED),
        (2, 0, "exact", Refusal.MALFORMED),
    ],
)
def test_headers_of_parts_that_no_pass_has_are_refused(number: int, count: int, codec: str, refusal: Refusal):
    exchange = Swarm(SHAPES, 1, "lowrank:2").buffers[0]
    life: Any = SimpleNamespace(computer=SimpleNamespace(exchange=exchange))

    def check(number: int, count: int, codec: str) -> None:
        subject = ExchangeHeader(0, 0, GROUP, 0, 1, number)
        tensor = frames.tensor_header("part", data_pb2.DATA_TYPE_FLOAT32, (count,), 4 * count, codec=codec)
        check_part(Leg.CONTRIBUTION, frames.make_header(subject, [tensor]), subject, life)

    check(0, SIZE, "exact")
    check(1, 2 * 60, "exact")
    with pytest.raises(FrameError) as refused:
        check(number, count, codec)
    assert refused.value.refusal is refusal


def test_updates_that_do_not_fit_are_refused_whole():
    swarm, newcomer = Swarm(SHAPES, 2, "lowrank:2"), Swarm(SHAPES, 1, "lowrank:2")
    _fill(swarm, 1)
    swarm.exchange([1.0, 1.0], [0.5, 0.5])
    parts = swarm.buffers[0].updates(0)[GROUP]
    assert {part.pass_number for part in parts} == {0, 1}
    assert all(parse_part(p.name) == (p.pass_number, p.begin, p.end, p.codec) for p in parts)
    first, second = ([p for p in parts if p.pass_number == number] for number in range(2))
    wrong: list[list[Part]] = [
        first,
        second,
        [*first, *second[:-1]],
        [*first[:-1], *second],
        [replace(part, codec="int8:128") for part in parts],
        [*first, *(replace(part, pass_number=2) for part in second)],
        [replace(part, data=bytes(part.data)[:-4]) for part in parts],
    ]
    for update in wrong:
        with pytest.raises(RefusedPart):
            newcomer.buffers[0].replay({GROUP: update})
        assert not newcomer.vectors[0].gradient.any()
    with pytest.raises(RefusedPart, match="pass too many"):
        Swarm(SHAPES, 1, "exact").buffers[0].replay({GROUP: parts})
    newcomer.buffers[0].replay({GROUP: parts})
    assert torch.equal(newcomer.vectors[0].gradient, swarm.vectors[0].gradient)


def test_nothing_is_kept_after_a_step_but_what_is_owed():
    swarm = Swarm(SHAPES, 2, "lowrank:2")
    for step in range(4):
        _fill(swarm, step)
        swarm.exchange([1.0, 1.0], [0.5, 0.5], step)
        swarm.commit(step)
        for buffers in swarm.buffers:
            assert not buffers._open
            assert not buffers._arrived
    assert swarm.owed().any()
    group = swarm.group([0.5, 0.5], [0.5, 0.5])
    swarm.open(group, step=9, state=True)
    swarm.contribute(group, step=9)
    assert None not in swarm.aggregate(group, step=9)
    for buffers in swarm.buffers:
        buffers.adopt()
    assert not swarm.owed().any()
