"""Exchanges by compiled loops, which write and fingerprint in one pass: the bits and the culprits of the eager path."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_compression import compiled
from starlings_protos.messages import ExchangeGroup, ExchangeHeader
from starlings_worker.core.events import Leg
from starlings_worker.digest import Fingerprint, fingerprint
from starlings_worker.exchange import RefusedPart
from support.exchange_swarm import GROUP, Swarm

torch.set_num_threads(1)
CHUNK = 1 << 16
SIZE = 4 * CHUNK + 1000

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang", "g++", "clang++"))), reason="needs a C compiler"
)


@pytest.fixture(scope="module")
def kernels() -> dict[int, compiled.Kernels]:
    """Compiled once; not in use yet."""
    assert compiled.prepare("int8:128") is None
    assert compiled.prepare("int8:24") is None
    found = dict(compiled._kernels)
    compiled.forget()
    return found


@pytest.fixture(autouse=True)
def _eager_again() -> Iterator[None]:
    yield
    compiled.forget()


def use(kernels: dict[int, compiled.Kernels]) -> None:
    compiled._kernels.update(kernels)


def run(codec: str, shares: list[float], weights: list[float]) -> list[tuple[object, bytes, bytes]]:
    """Of three steps: what was assembled, the vector's bits, and what is owed."""
    swarm, found = Swarm([SIZE - 77, 77], len(shares), codec), []
    for step in range(3):
        for number, vector in enumerate(swarm.vectors):
            vector.gradient.normal_(generator=torch.Generator().manual_seed(10 * step + number))
            vector.gradient[: CHUNK + 5] *= 1e3
        results = swarm.exchange(weights, shares, step)
        assert len(set(results)) == 1
        vectors = [v.gradient for v in swarm.vectors]
        assert all(torch.equal(v, vectors[0]) for v in vectors)
        assert results[0] == fingerprint(vectors[0].clone())
        swarm.commit(step)
        found.append((results[0][0], vectors[0].numpy().tobytes(), swarm.owed().numpy().tobytes()))
    return found


def up_to_the_sum(swarm: Swarm, group: ExchangeGroup, attempt: int) -> None:
    swarm.open(group, attempt=attempt)
    swarm.contribute(group, attempt=attempt)
    swarm.buffers[0].reduce(0, attempt, GROUP)


def culprit(work: Callable[[], object]) -> tuple[str, bool]:
    """Who is blamed, and whether for values that are not finite."""
    with pytest.raises(RefusedPart) as refused:
        work()
    return refused.value.culprit, "NaN or infinite values" in str(refused.value)


@needs_a_compiler
@pytest.mark.parametrize("codec", ["exact", "int8:128", "int8:24", "fp16", "lowrank:2"])
@pytest.mark.parametrize(
    ("shares", "weights"),
    [
        ([0.5, 0.5], [1.0, 1.0]),
        ([1.0, 0.0], [1.0, 0.25]),
        # Parts that begin within a chunk, one of them smaller than one, and a member that contributes nothing.
        ([0.45, 0.05, 0.5], [3.0, 1.0, 0.0]),
        ([0.0, 0.7, 0.3], [0.0, 0.0, 1.0]),
    ],
)
def test_both_paths_give_the_same_bits(
    kernels: dict[int, compiled.Kernels], codec: str, shares: list[float], weights: list[float]
) -> None:
    eager = run(codec, shares, weights)
    use(kernels)
    assert run(codec, shares, weights) == eager


@needs_a_compiler
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [3, CHUNK + 700, SIZE // 2 - 1])
@pytest.mark.parametrize("compiled_too", [False, True])
@pytest.mark.parametrize("codec", ["exact", "int8:128"])
def test_who_brings_what_is_not_finite_is_named(
    kernels: dict[int, compiled.Kernels], codec: str, compiled_too: bool, at: int, bad: float
) -> None:
    """An owner's own values are looked at in the sum, a peer's by both; whatever was overwritten until then."""
    if compiled_too:
        use(kernels)
    swarm = Swarm([SIZE], 2, codec)
    for number, vector in enumerate(swarm.vectors):
        vector.gradient.normal_(generator=torch.Generator().manual_seed(number))
    group = swarm.group([1.0, 1.0], [0.5, 0.5])
    swarm.vectors[0].gradient[at] = bad
    assert culprit(lambda: up_to_the_sum(swarm, group, 0)) == ("w0", True)
    if codec != "exact":
        return
    # A peer that does not look: in its contribution, and as an owner in its aggregate.
    swarm.vectors[0].gradient[at] = 0.5
    for attempt, leg in ((1, Leg.CONTRIBUTION), (2, Leg.AGGREGATE)):
        swarm.open(group, attempt=attempt)
        swarm.contribute(group, attempt=attempt)
        part = 0 if leg is Leg.CONTRIBUTION else 1
        begin, end = swarm.buffers[0]._open[0, attempt, GROUP].present.bounds[part]
        values = torch.ones(end - begin)
        values[min(at, end - begin - 1)] = bad
        header, forged = ExchangeHeader(0, attempt, GROUP, part, 1), values.numpy().tobytes()
        swarm.buffers[0].keep(leg, header, swarm.ids[1], forged)
        if leg is Leg.AGGREGATE:
            swarm.buffers[0].reduce(0, attempt, GROUP)
        work = swarm.buffers[0].reduce if leg is Leg.CONTRIBUTION else swarm.buffers[0].assemble
        assert culprit(lambda work=work, attempt=attempt: work(0, attempt, GROUP)) == ("w1", True)


@needs_a_compiler
@pytest.mark.parametrize("compiled_too", [False, True])
@pytest.mark.parametrize("codec", ["exact", "int8:128"])
def test_a_sum_beyond_float32_is_refused_and_nobody_else_is_blamed(
    kernels: dict[int, compiled.Kernels], codec: str, compiled_too: bool
) -> None:
    if compiled_too:
        use(kernels)
    swarm = Swarm([SIZE], 2, codec)
    for vector in swarm.vectors:
        vector.gradient.fill_(1.0)
        vector.gradient[CHUNK + 9] = 3e38
    group = swarm.group([1.0, 1.0], [1.0, 0.0])
    swarm.open(group)
    swarm.contribute(group)
    assert culprit(lambda: swarm.buffers[0].reduce(0, 0, GROUP))[0] == "w0"


@needs_a_compiler
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, SIZE), max_size=6), st.randoms(use_true_random=False), st.booleans())
def test_a_fingerprint_does_not_depend_on_the_order_of_writing(
    kernels: dict[int, compiled.Kernels], cuts: list[int], rng, compiled_too: bool
) -> None:
    compiled.forget()
    if compiled_too:
        use(kernels)
    final = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    vector = torch.full((SIZE,), math.nan)
    result = Fingerprint(vector)
    bounds = [0, *sorted(cuts), SIZE]
    pieces = list(pairwise(bounds))
    if rng.random() < 0.7:
        rng.shuffle(pieces)
    for start, stop in pieces:
        vector[start:stop] = final[start:stop]
        result.take(start, stop)
    assert result.finish() == fingerprint(final)
