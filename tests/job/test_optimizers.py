"""What optimizers keep, which settings are theirs, and what that takes in memory."""

from __future__ import annotations

import pytest

from starlings_job.description import describe
from starlings_job.memory import bytes_per_parameter
from starlings_job.optimizers import (
    QUANTISED_LEAST_ELEMENTS,
    Kept,
    OptimizerName,
    kept_tensor,
    kinds_kept,
    state_bytes_per_parameter,
    takes_muon,
)
from starlings_job.presets import PRESETS
from starlings_job.sections import TrainSection

BOTH = ("exp_avg", "exp_avg_sq")
QUANTISED = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")


def test_what_is_kept_of_a_parameter() -> None:
    matrix, norm = (128, 64), (64,)
    assert (
        kinds_kept("adamw", 0.0, matrix, hidden=True) == kinds_kept("nadam", 0.0, norm, hidden=True) == BOTH
    )
    assert kinds_kept("sgd", 0.9, matrix, hidden=True) == ("momentum",)
    assert kinds_kept("sgd", 0.0, matrix, hidden=True) == ()
    assert kinds_kept("muon", 0.95, matrix, hidden=True) == ("momentum",)
    for shape, hidden in ((norm, True), (matrix, False), ((8, 3, 3, 3), True), ((4, 8, 8), True)):
        assert kinds_kept("muon", 0.95, shape, hidden=hidden) == BOTH
    assert kinds_kept("adamw8bit", 0.0, matrix, hidden=True) == QUANTISED
    assert kinds_kept("adamw8bit", 0.0, (QUANTISED_LEAST_ELEMENTS - 1,), hidden=True) == BOTH


def test_how_it_looks() -> None:
    assert kept_tensor("exp_avg_sq_codes", (3, 100)) == Kept("exp_avg_sq_codes", "U8", (3, 100))
    assert kept_tensor("exp_avg_scales", (3, 100)) == Kept("exp_avg_scales", "F32", (2,))
    assert kept_tensor("momentum", ()) == Kept("momentum", "F32", ())
    for strange in ("", "param", "momentum_codes", "exp_avg_codes_scales", "exp", "scales"):
        assert kept_tensor(strange, (3,)) is None


def test_muon_takes_the_matrices_between_the_ends() -> None:
    described = describe("llama", PRESETS["micro"].config, "preset")
    hidden = [block for block in described.blocks if described.is_hidden(block)]
    assert hidden == [f"layers.{i}" for i in range(described.layer_count)]
    assert takes_muon((4, 4), hidden=True)
    shapes = PRESETS["shapes"]
    convolutions = describe(shapes.family, shapes.config, "preset")
    assert not convolutions.is_hidden(convolutions.blocks[-1])


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "muon", "adamw8bit"])
def test_bytes_follow_from_what_is_kept(optimizer: OptimizerName) -> None:
    shape = (512, 512)
    kinds = kinds_kept(optimizer, 0.9, shape, hidden=True)
    tensors = [kept for kind in kinds if (kept := kept_tensor(kind, shape)) is not None]
    size = sum(
        (4 if t.data_type == "F32" else 1) * (shape[0] * shape[1] if len(t.shape) == 2 else t.shape[0])
        for t in tensors
    )
    assert state_bytes_per_parameter(optimizer, 0.9) == size / (512 * 512)


def test_memory_by_optimizer() -> None:
    found = {
        name: bytes_per_parameter(TrainSection.model_validate({"optimizer": name}))
        for name in ("adamw", "nadam", "muon", "adamw8bit", "sgd")
    }
    assert found == {"adamw": 20, "nadam": 20, "muon": 16, "adamw8bit": 12 + 2 + 8 / 256, "sgd": 12}
