"""Muon against torch's own and against its formulas in float64, and what it takes and leaves."""

from __future__ import annotations

import math

import pytest
import torch

from starlings_worker.flat import Entry, FlatVector
from starlings_worker.optimizers.adam import AdamW
from starlings_worker.optimizers.muon import Muon, orthogonal

CPU = torch.device("cpu")
STEPS = 5
# The first three are Muon's.
ENTRIES = [
    Entry("layers.0", "lying", (24, 70), True),
    Entry("layers.0", "norm", (70,), True),
    Entry("layers.0", "standing", (70, 24), True),
    Entry("layers.1", "square", (33, 33), True),
    Entry("layers.1", "experts", (3, 8, 9), True),
    Entry("head", "table", (40, 24), False),
]


def run(optimizer: Muon | AdamW, entries: list[Entry], clip: float = 0.7) -> FlatVector:
    """Some steps on gradients that are the same for each entry by name."""
    vector = FlatVector("stage:0", entries, optimizer.keeps, CPU)
    for slot in vector.slots:
        vector.parameter_view(slot).normal_(generator=torch.Generator().manual_seed(_seed(slot.name)))
    for number in range(1, STEPS + 1):
        for slot in vector.slots:
            vector.gradient_view(slot).copy_(_gradient(slot.name, slot.shape, number))
        optimizer.step(vector, number=number, learning_rate=0.02 / number, clip_factor=clip)
    return vector


def _seed(name: str) -> int:
    return sum(map(ord, name))


def _gradient(name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(_seed(name) * 100 + number))


def _start(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape).normal_(generator=torch.Generator().manual_seed(_seed(entry.name)))


def twin(entry: Entry, muon: Muon, clip: float) -> torch.Tensor:
    """The formulas in float64, written down from the two papers."""
    weight, velocity = _start(entry).double(), torch.zeros(entry.shape, dtype=torch.float64)
    for number in range(1, STEPS + 1):
        rate, gradient = 0.02 / number, _gradient(entry.name, entry.shape, number).double() * clip
        velocity = muon.momentum * velocity + gradient
        x = gradient + muon.momentum * velocity
        x = x / torch.linalg.matrix_norm(x)
        for _ in range(muon.iterations):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        rows, columns = entry.shape
        scale = (
            0.2 * math.sqrt(max(rows, columns)) if muon.scale == "rms" else math.sqrt(max(1, rows / columns))
        )
        weight = weight * (1 - rate * muon.adamw.weight_decay) - rate * scale * x
    return weight


@pytest.mark.parametrize("scale", ["rms", "original"])
def test_matrices_follow_the_papers(scale: str) -> None:
    muon = Muon(scale=scale)  # type: ignore[arg-type]
    vector = run(muon, ENTRIES)
    for entry, slot in zip(ENTRIES, vector.slots, strict=True):
        if vector.kinds(slot) == ("momentum",):
            distance = vector.parameter_view(slot).double() - twin(entry, muon, 0.7)
            assert float(distance.abs().max()) < 1e-5, entry.name


def test_everything_else_is_adamw() -> None:
    """At its own rate; each slot has the state of its own optimizer and nothing beside it."""
    muon = Muon(AdamW(weight_decay=0.1), adamw_rate=1.0)
    vector, plain = run(muon, ENTRIES), run(AdamW(weight_decay=0.1), ENTRIES)
    kinds = {slot.name: vector.kinds(slot) for slot in vector.slots}
    assert {name for name, kept in kinds.items() if kept == ("momentum",)} == {"lying", "standing", "square"}
    assert {kept for name, kept in kinds.items() if name in ("norm", "experts", "table")} == {
        ("exp_avg", "exp_avg_sq")
    }
    for ours, theirs in zip(vector.slots, plain.slots, strict=True):
        equal = torch.equal(vector.parameter_view(ours), plain.parameter_view(theirs))
        assert equal == (kinds[ours.name] != ("momentum",)), ours.name
        if equal:
            for kind in kinds[ours.name]:
                assert torch.equal(vector.state_view(kind, ours), plain.state_view(kind, theirs))
    slower = run(Muon(AdamW(weight_decay=0.1), adamw_rate=0.5), ENTRIES)
    assert not torch.equal(slower.parameter_view(slower.slots[1]), vector.parameter_view(vector.slots[1]))
    assert torch.equal(slower.parameter_view(slower.slots[0]), vector.parameter_view(vector.slots[0]))


def test_the_bits_do_not_depend_on_threads_or_neighbours() -> None:
    """Nor on where in a vector, and so at which address, a matrix lies: another cut of the model moves it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(Muon(), ENTRIES)
        torch.set_num_threads(2)
        two = run(Muon(), ENTRIES)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one.parameters, two.parameters)
    assert all(torch.equal(one.state[kind], two.state[kind]) for kind in one.state)
    moved = run(Muon(), [Entry("layers.0", "bias", (3,), True), *ENTRIES[2:]])
    for ours, theirs in zip(one.slots[2:], moved.slots[1:], strict=True):
        assert torch.equal(one.parameter_view(ours), moved.parameter_view(theirs)), ours.name
        for kind in one.kinds(ours):
            assert torch.equal(one.state_view(kind, ours), moved.state_view(kind, theirs)), (ours.name, kind)


def test_singular_values_become_about_one() -> None:
    matrix = torch.randn(40, 60, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.25
    assert torch.equal(orthogonal(matrix.t()), orthogonal(matrix).t())
    assert not orthogonal(torch.zeros(4, 6)).any()


def test_the_whole_state_survives_an_exchange() -> None:
    vector = run(Muon(), ENTRIES)
    whole = vector.whole_state()
    hidden, other = 24 * 70 * 2 + 33 * 33, 70 + 3 * 8 * 9 + 40 * 24
    assert whole.numel() == vector.whole_size == vector.size + hidden + 2 * other
    again = FlatVector("stage:0", ENTRIES, Muon().keeps, CPU)
    again.adopt(whole)
    assert torch.equal(again.parameters, vector.parameters)
    assert all(torch.equal(again.state[kind], vector.state[kind]) for kind in vector.state)
