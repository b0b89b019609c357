"""Gradients of all replicas at once are those of the engines' own passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from inprocess.stacked import Stacked
from inprocess.swarm import Setup, Swarm
from inprocess.text import Text

from starlings_job.data.batch import Batch
from starlings_job.model import initial_state
from starlings_worker.optimizers.adam import AdamW

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
REPLICAS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(tmp_path_factory.mktemp("text"), held_out=8, source=f"{DOCUMENTS}/*.md")


def make_swarm(text: Text, stages: int) -> Swarm:
    """Replicas whose weights differ."""
    state = dict(initial_state(text.description, 0))
    swarm = Swarm(text.description, state, Setup(AdamW(), replicas=REPLICAS, stages=stages, recompute=True))
    generator = torch.Generator().manual_seed(1)
    for worker in swarm.workers:
        for vector in worker.held.vectors.values():
            vector.parameters.add_(torch.randn(vector.size, generator=generator), alpha=0.02)
    return swarm


def batches(text: Text) -> list[Batch]:
    return [text.batch(range(2 * replica, 2 * replica + 2)) for replica in range(REPLICAS)]


def assert_same_gradients(swarm: Swarm, other: Swarm) -> None:
    for one, two in zip(swarm.workers, other.workers, strict=True):
        for group, vector in one.held.vectors.items():
            came = two.held.vectors[group]
            for slot in vector.slots:
                expected = vector.gradient_view(slot)
                torch.testing.assert_close(
                    came.gradient_view(slot), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
                )


# Compiling takes a minute.
@pytest.mark.parametrize(
    ("stages", "compiled"), [(1, False), (3, False), pytest.param(1, True, marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_the_engines_passes(text: Text, stages: int, compiled: bool) -> None:
    swarm, stacked = make_swarm(text, stages), make_swarm(text, stages)
    denominators = [100.0, 200.0, 300.0]
    expected = swarm.train_all(batches(text), denominators)
    compute = Stacked(stacked, compiled=compiled)
    assert compute.train(batches(text), denominators) == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(swarm, stacked)
    # A second microbatch is added to the first one's.
    swarm.train_all(batches(text)[::-1], denominators)
    compute.train(batches(text)[::-1], denominators)
    assert_same_gradients(swarm, stacked)


def test_stage_by_stage_it_is_the_same_gradient(text: Text) -> None:
    swarm, stacked = make_swarm(text, 3), make_swarm(text, 3)
    denominators = [128.0] * REPLICAS
    expected = swarm.train_all(batches(text), denominators)
    compute = Stacked(stacked)
    values = [torch.stack([batch.inputs for batch in batches(text)])]
    for stage in (0, 1):
        values.append(compute.forward(stage, values[-1]))
    losses, gradient = compute.end(values.pop(), batches(text), denominators)
    assert losses == pytest.approx(expected, rel=1e-6)
    for stage in (1, 0):
        assert gradient is not None
        gradient = compute.backward(stage, values.pop(), gradient)
    assert gradient is None
    assert_same_gradients(swarm, stacked)
