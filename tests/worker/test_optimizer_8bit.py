"""Moments of one byte per element: the quantisation by itself, and AdamW with it against AdamW without."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from starlings_worker.blockwise import decode, encode
from starlings_worker.flat import Entry, FlatVector
from starlings_worker.optimizers.adam import AdamW, AdamW8bit, NAdam
from starlings_worker.optimizers.elementary import Optimizer

CPU = torch.device("cpu")
BLOCK = 256
# The last matrix is small; the second one ends with a short block, the first one is longer than a piece.
ENTRIES = [
    Entry("layers.0", "large", (300, 257)),
    Entry("layers.0", "odd", (4099,)),
    Entry("layers.0", "small", (40, 40)),
]
SIGNED, UNSIGNED = "exp_avg_codes", "exp_avg_sq_codes"


def quantised(kind: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(values.numel(), dtype=torch.uint8)
    scales = torch.zeros(-(-values.numel() // BLOCK))
    encode(kind, values, codes, scales)
    return codes, scales


def draw(size: int, seed: int) -> torch.Tensor:
    """Values over eight orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10 ** (-8 * torch.rand(size, generator=generator))


@pytest.mark.parametrize("size", [1, 255, 256, 257, 10_000])
@pytest.mark.parametrize("kind", [SIGNED, UNSIGNED])
def test_values_come_back_nearly(kind: str, size: int) -> None:
    """Within the parts of each decade, which halve in number from one to the next."""
    values = draw(size, 1) if kind == SIGNED else draw(size, 1).square()
    codes, scales = quantised(kind, values)
    back = decode(kind, codes, scales)
    bits = 7 if kind == SIGNED else 8
    for begin in range(0, size, BLOCK):
        block, found = values[begin : begin + BLOCK].double(), back[begin : begin + BLOCK].double()
        largest = block.abs().max()
        assert float(scales[begin // BLOCK]) == float(largest)
        # The largest comes back exactly.
        assert float(found[block.abs().argmax()].abs()) == float(largest)
        ratio = (block.abs() / largest).clamp(min=1e-30)
        decade = (-ratio.log10()).floor().clamp(0, bits - 1)
        allowed = 0.9 * 10**-decade / 2 ** (bits - 1 - decade) * 0.76
        assert bool(((found - block).abs() / largest <= allowed + 1e-7).all())
        assert bool((found * block >= 0).all())


@pytest.mark.parametrize("kind", [SIGNED, UNSIGNED])
def test_quantising_again_changes_nothing(kind: str) -> None:
    """Averages of equal states must be those states; every code comes back as itself."""
    values = draw(5_000, 2) if kind == SIGNED else draw(5_000, 2).square()
    codes, scales = quantised(kind, values)
    again, same_scales = quantised(kind, decode(kind, codes, scales))
    assert torch.equal(again, codes)
    assert torch.equal(same_scales, scales)
    assert len(set(codes.tolist())) > 150


def test_zeros_are_zero_bytes_and_small_squares_are_not_zero() -> None:
    for kind in (SIGNED, UNSIGNED):
        codes, scales = quantised(kind, torch.zeros(300))
        assert not codes.any()
        assert not scales.any()
        assert not decode(kind, codes, scales).any()
    values = torch.full((300,), 1e-30)
    values[7], values[9] = 1.0, 0.0
    back = decode(UNSIGNED, *quantised(UNSIGNED, values))
    assert float(back[9]) == 0
    assert bool((back[:9] > 0).all())


def run(optimizer: Optimizer, steps: int = 30) -> FlatVector:
    """Gradients of very unlike sizes, as different rows of a matrix have. Drawn evenly, because torch's normal numbers
    have other last bits on other processors.
    """
    vector = FlatVector("stage:0", ENTRIES, optimizer.keeps, CPU)
    vector.parameters.copy_(_evenly(vector.size, 0))
    chosen = torch.randint(5, (vector.size,), generator=torch.Generator().manual_seed(5))
    sizes = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])[chosen]
    for number in range(1, steps + 1):
        vector.gradient.copy_(_evenly(vector.size, number)).add_(0.2).mul_(sizes)
        optimizer.step(vector, number=number, learning_rate=1e-2, clip_factor=0.7)
    return vector


def _evenly(size: int, seed: int) -> torch.Tensor:
    """Between -1 and 1."""
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)).mul_(2.0).sub_(1.0)


def test_it_goes_where_adamw_goes() -> None:
    """Small parameters exactly, the others within a few hundredths of the way that AdamW went."""
    plain, eight = run(AdamW()), run(AdamW8bit())
    start = _evenly(plain.size, 0)
    for slot in plain.slots:
        ours, theirs = eight.parameter_view(slot), plain.parameter_view(slot)
        if slot.name == "small":
            assert torch.equal(ours, theirs)
            assert eight.kinds(slot) == ("exp_avg", "exp_avg_sq")
        else:
            way = theirs - start[slot.start : slot.stop].view(slot.shape)
            assert 0 < float((ours - theirs).norm() / way.norm()) < 0.06, slot.name
            assert float((ours - theirs).abs().max()) < 0.2 * float(way.abs().max()), slot.name


def test_the_memory_is_a_quarter() -> None:
    plain, eight = (FlatVector("g", ENTRIES[:2], o.keeps, CPU) for o in (AdamW(), AdamW8bit()))
    bytes_each = (eight.byte_count - 4 * eight.size) / eight.size
    assert plain.byte_count == 12 * plain.size
    assert bytes_each == pytest.approx(2 + 8 / BLOCK, rel=1e-3)


def test_a_state_exchange_moves_values_and_keeps_bits() -> None:
    vector = run(AdamW8bit(), 3)
    whole = vector.whole_state()
    assert whole.dtype is torch.float32
    assert whole.numel() == vector.whole_size == 3 * vector.size
    again = FlatVector("stage:0", ENTRIES, AdamW8bit().keeps, CPU)
    again.adopt(whole * 0.5 + whole * 0.5)
    assert torch.equal(again.parameters, vector.parameters)
    assert all(torch.equal(again.state[kind], vector.state[kind]) for kind in vector.state)


_PRINTED = "import test_optimizer_8bit as t; print('digests', t.digests())"


def digests() -> str:
    found = []
    for optimizer in (AdamW8bit(), NAdam()):
        vector = run(optimizer, 5)
        tensors = [vector.parameters, *vector.state.values()]
        found.append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest())
    return " ".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_every_processor_gets_the_same_bits(capability: str) -> None:
    """Against the best that this one has."""
    if capability == "avx2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this processor has no AVX2")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", _PRINTED]
    done = subprocess.run(
        command,
        cwd=os.path.dirname(__file__),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split("digests ")[1].strip() == digests()
