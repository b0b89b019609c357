"""The separately rounded optimizers against torch.optim, and against themselves."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from starlings_worker.digest import bits_digest, squared_norm
from starlings_worker.flat import Entry, FlatVector
from starlings_worker.optimizers.adam import AdamW, NAdam
from starlings_worker.optimizers.elementary import Optimizer
from starlings_worker.optimizers.muon import Muon
from starlings_worker.optimizers.sgd import Sgd

torch.set_num_threads(1)

_SHAPES = [(300, 257), (257,), (3, 5, 7), (), (70_001,)]


def _vector(optimizer: Optimizer, seed: int = 0) -> FlatVector:
    entries = [Entry("layers.0", f"p{i}", shape) for i, shape in enumerate(_SHAPES)]
    vector = FlatVector("stage:0", entries, optimizer.keeps, torch.device("cpu"))
    vector.parameters.normal_(generator=torch.Generator().manual_seed(seed))
    return vector


def _run(optimizer: Optimizer, steps: int = 20, clip: float = 0.7) -> FlatVector:
    vector = _vector(optimizer)
    generator = torch.Generator().manual_seed(1)
    for number in range(1, steps + 1):
        vector.gradient.normal_(generator=generator)
        optimizer.step(vector, number=number, learning_rate=1e-2 / number, clip_factor=clip)
    return vector


def _run_torch(make, start: FlatVector, steps: int = 20, clip: float = 0.7) -> torch.Tensor:
    weights = [torch.nn.Parameter(start.parameter_view(s).clone()) for s in start.slots]
    matrices = [w for w in weights if w.dim() >= 2]
    others = [w for w in weights if w.dim() < 2]
    optimizer = make(matrices, others)
    generator = torch.Generator().manual_seed(1)
    for number in range(1, steps + 1):
        flat = torch.empty(start.size).normal_(generator=generator)
        for weight, slot in zip(weights, start.slots, strict=True):
            weight.grad = (flat[slot.start : slot.stop] * clip).view(slot.shape)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / number
        optimizer.step()
    return torch.cat([w.detach().reshape(-1) for w in weights])


def test_adamw_equals_torch():
    ours = AdamW(weight_decay=0.1)
    theirs = _run_torch(
        lambda matrices, others: torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            betas=(ours.beta1, ours.beta2),
            eps=ours.epsilon,
        ),
        _vector(ours),
    )
    torch.testing.assert_close(_run(ours).parameters, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
def test_sgd_equals_torch(momentum: float, decay: float):
    ours = Sgd(momentum=momentum, weight_decay=decay)
    theirs = _run_torch(
        lambda matrices, others: torch.optim.SGD(
            [{"params": matrices, "weight_decay": decay}, {"params": others}], lr=1.0, momentum=momentum
        ),
        _vector(ours),
    )
    torch.testing.assert_close(_run(ours).parameters, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("beta1", "momentum_decay"), [(0.9, 0.004), (0.99, 0.0)])
def test_nadam_equals_torch(beta1: float, momentum_decay: float):
    """Also with the settings that correct for stale gradients."""
    ours = NAdam(beta1=beta1, weight_decay=0.1, momentum_decay=momentum_decay)
    theirs = _run_torch(
        lambda matrices, others: torch.optim.NAdam(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            betas=(ours.beta1, ours.beta2),
            eps=ours.epsilon,
            momentum_decay=momentum_decay,
            decoupled_weight_decay=True,
        ),
        _vector(ours),
    )
    torch.testing.assert_close(_run(ours).parameters, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("scale", "theirs"), [("rms", "match_rms_adamw"), ("original", "original")])
def test_muon_equals_torch_up_to_its_bfloat16(scale: Literal["rms", "original"], theirs: str):
    """torch iterates in bfloat16, which is off by some hundredths of an update."""
    ours = Muon(AdamW(weight_decay=0.1), scale=scale)
    entries = [
        Entry("layers.0", f"m{i}", shape, True) for i, shape in enumerate(((24, 70), (70, 24), (33, 33)))
    ]
    vector = FlatVector("stage:0", entries, ours.keeps, torch.device("cpu"))
    vector.parameters.normal_(generator=torch.Generator().manual_seed(0))
    start = vector.parameters.clone()
    weights = [torch.nn.Parameter(vector.parameter_view(s).clone()) for s in vector.slots]
    reference = torch.optim.Muon(weights, lr=1e-2, weight_decay=0.1, adjust_lr_fn=theirs)
    generator = torch.Generator().manual_seed(1)
    for number in range(1, 6):
        vector.gradient.normal_(generator=generator)
        for weight, slot in zip(weights, vector.slots, strict=True):
            weight.grad = vector.gradient_view(slot) * 0.7
        ours.step(vector, number=number, learning_rate=1e-2, clip_factor=0.7)
        reference.step()
    for weight, slot in zip(weights, vector.slots, strict=True):
        way = vector.parameter_view(slot) - start[slot.start : slot.stop].view(slot.shape)
        assert float((vector.parameter_view(slot) - weight.detach()).norm() / way.norm()) < 0.02, slot.name


@pytest.mark.parametrize("optimizer", [AdamW(), NAdam(), Sgd(momentum=0.9)])
def test_the_same_gradients_give_the_same_bits(optimizer: Optimizer):
    one, other = _run(optimizer), _run(optimizer)
    assert bits_digest(one.parameters) == bits_digest(other.parameters)
    assert one.state
    for kind, tensor in one.state.items():
        assert torch.equal(tensor, other.state[kind])


def test_every_operation_is_rounded_alone():
    """A dumb twin in float64 that rounds after each operation: equal to the last bit, so nothing was
    fused.
    """
    optimizer = AdamW()
    vector = _vector(optimizer)
    vector.gradient.normal_(generator=torch.Generator().manual_seed(3))
    # In float64 the product or sum of two float32 is exact or correctly rounded twice without harm
    # (53 >= 2 * 24 + 2 bits), also for division and square root.
    p, g = vector.parameters.double(), vector.gradient.double()

    def r(x: torch.Tensor | float) -> torch.Tensor:
        return torch.as_tensor(x, dtype=torch.float64).float().double()

    m = r(g * r(1 - optimizer.beta1))
    v = r(r(g * g) * r(1 - optimizer.beta2))
    decay = r(1 - 1e-3 * optimizer.weight_decay)
    for here in vector.decaying():
        p[here] = r(p[here] * decay)
    scale = r(1.0 / (1 - optimizer.beta2) ** 0.5)
    denominator = r(r(r(torch.sqrt(v)) * scale) + r(optimizer.epsilon))
    p = r(p - r(r(m / denominator) * r(1e-3 / (1 - optimizer.beta1))))
    optimizer.step(vector, number=1, learning_rate=1e-3, clip_factor=1.0)
    assert torch.equal(vector.parameters.double(), p)


def test_only_matrices_decay():
    vector = _vector(AdamW())
    decaying = sum(here.stop - here.start for here in vector.decaying())
    assert decaying == 300 * 257 + 3 * 5 * 7


def test_the_digest_sees_every_bit_and_every_position():
    vector = torch.randn(200_001, generator=torch.Generator().manual_seed(5))
    digest = bits_digest(vector)
    assert bits_digest(vector.clone()) == digest
    for position in (0, 1, 99_999, 131_072, 200_000):
        changed = vector.clone()
        changed.view(torch.int32)[position] ^= 1
        assert bits_digest(changed) != digest
    swapped = vector.clone()
    swapped[[7, 9]] = vector[[9, 7]]
    assert bits_digest(swapped) != digest
    assert bits_digest(vector[1:]) == bits_digest(vector[1:].clone())


def test_the_squared_norm_is_float64():
    vector = torch.full((3_000_000,), 0.1)
    assert squared_norm(vector) == pytest.approx(3_000_000 * float(torch.tensor(0.1)) ** 2, rel=1e-9)
