"""`correction = "predict"`: forward passes on the weights that are expected, everything else on those that are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from starlings_job.description import describe
from starlings_job.model import build_stage, initial_state, loss_sum
from starlings_job.model.tensors import raw_tensor
from starlings_protos.messages import Span, Stage
from starlings_worker.ahead import Ahead, predict
from starlings_worker.errors import EngineFault
from starlings_worker.flat import Entry, FlatVector
from starlings_worker.optimizers.adam import AdamW, NAdam
from starlings_worker.optimizers.elementary import Optimizer
from starlings_worker.optimizers.sgd import Sgd
from starlings_worker.runs import Runner
from starlings_worker.stage import HeldSpan
from support.small_families import SMALL

CPU = torch.device("cpu")
STAGES = (Stage(0, 2), Stage(3, 4))


def held_span(optimizer: Optimizer, seed: int = 1) -> HeldSpan:
    config = {**SMALL["qwen3"], "vocab_size": 64, "num_hidden_layers": 3}
    description = describe("qwen3", config, "test", trainable=("*",))
    held = HeldSpan(
        description, STAGES, Span(0, 0), lambda a, b: build_stage(description, a, b), optimizer, CPU
    )
    state = dict(initial_state(description, seed=seed))
    for block in held.blocks:
        held.load_block(block, {f"param:{name}": raw_tensor(t) for name, t in state[block].items()}, 0)
    return held


def vector_with_state(optimizer: Optimizer) -> tuple[FlatVector, np.random.Generator]:
    rng = np.random.default_rng(5)
    entries = [Entry("b", "w", (5, 4)), Entry("b", "n", (5,))]
    vector = FlatVector("stage:0", entries, optimizer.keeps, CPU)
    vector.parameters.copy_(torch.tensor(rng.standard_normal(vector.size)))
    for kind, state in vector.state.items():
        values = rng.standard_normal(state.numel())
        state.copy_(torch.tensor(values**2 if kind == "exp_avg_sq" else values))
    return vector, rng


def test_adamw_goes_on_along_its_moments() -> None:
    """Guan et al. 2019: w - s lr m^ / (sqrt(v^) + epsilon), and the decay of matrices."""
    optimizer = AdamW(0.9, 0.95, 1e-8, 0.1)
    vector, _ = vector_with_state(optimizer)
    w, m, v = (t.double().numpy() for t in (vector.parameters, *vector.state.values()))
    decays = np.array([1.0] * 20 + [0.0] * 5)
    expected = w * (1 - 0.03 * 0.1 * decays) - 0.03 * (m / (1 - 0.9**7)) / (np.sqrt(v / (1 - 0.95**7)) + 1e-8)
    out = torch.empty_like(vector.parameters)
    predict(vector, optimizer, 7, 0.03, out)
    assert np.allclose(out.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_sgd_goes_on_with_its_velocity_and_others_are_refused() -> None:
    optimizer = Sgd(momentum=0.9)
    vector, _ = vector_with_state(optimizer)
    out = torch.empty_like(vector.parameters)
    predict(vector, optimizer, 7, 0.25, out)
    assert torch.allclose(out, vector.parameters - 0.25 * vector.state["momentum"])
    # With no new gradient and no forgetting, that is where it will be.
    steady = Sgd(momentum=1.0)
    for number in range(4):
        vector.gradient.zero_()
        steady.step(vector, number=number, learning_rate=0.0625, clip_factor=1.0)
    assert torch.allclose(out, vector.parameters)
    with pytest.raises(EngineFault, match="NAdam does not say"):
        predict(vector, NAdam(), 7, 0.25, out)


def test_forward_uses_expected_weights_and_backward_those_that_are_there() -> None:
    held = held_span(AdamW())
    ahead = Ahead(held)
    plain, predicting = (
        Runner(held, loss_sum, recompute=False, bf16=False, streams=True, ahead=a) for a in (None, ahead)
    )
    rng = np.random.default_rng(2)
    tokens = torch.tensor(rng.integers(0, 64, (2, 16)))
    vector = held.vectors["stage:0"]
    vector.gradient.copy_(torch.tensor(rng.standard_normal(vector.size)))
    held.step_stage(0, 1, 1e-2, 1.0)
    weights = vector.parameters.clone()

    def output(runner: Runner) -> torch.Tensor:
        run = runner.forward(0, 0, tokens, batch=None, loss_denominator=1.0, train=True)
        assert run.output is not None
        return run.output.detach().clone()

    now = output(plain)
    assert torch.equal(output(predicting), now), "nothing was measured yet"
    ahead.stepped(0, 1, 2.5, 1e-2)
    found = output(predicting)
    assert torch.equal(vector.parameters, weights)
    expected = torch.empty_like(weights)
    predict(vector, held.optimizer, 1, 2.5e-2, expected)
    vector.parameters.copy_(expected)
    assert torch.allclose(found, output(plain), atol=1e-6)
    assert not torch.allclose(found, now, atol=1e-3)
    vector.parameters.copy_(weights)
    # Who was moved by an exchange predicts anew.
    vector.parameters.add_(0.01)
    assert torch.equal(output(predicting), found)
    ahead.moved()
    assert not torch.allclose(output(predicting), found, atol=1e-4)
    vector.parameters.copy_(weights)
    ahead.moved()
    gradients = []
    for runner in (plain, predicting):
        vector.gradient.zero_()
        run = runner.forward(0, 0, tokens, batch=None, loss_denominator=1.0, train=True)
        runner.backward(run, torch.ones_like(found))
        gradients.append(vector.gradient.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert float(gradients[0].abs().max()) > 0
