"""Every optimizer trains a small model as the plain reference does, and its state goes over to another replica."""

from __future__ import annotations

import pytest
import torch

from starlings_job.data.batch import Batch, decode_records, loss_sum
from starlings_job.description import describe
from starlings_job.model import build_stage, initial_state, raw_tensor
from starlings_job.model.initial import whole_model
from starlings_job.optimizers import OptimizerName
from starlings_job.records import DatasetMeta
from starlings_job.reference import make_optimizers
from starlings_job.sections import TrainSection
from starlings_protos.messages import Span, Stage
from starlings_worker.optimizers.choice import make_optimizer
from starlings_worker.runs import Runner
from starlings_worker.stage import HeldSpan

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
META = DatasetMeta("tokens", 100, 10, 16, 64, stride_tokens=16, context_tokens=32)
DESCRIPTION = describe("llama", CONFIG, "test")
STEPS, RATE = 12, 3e-3


def batch(step: int) -> Batch:
    """Tokens that count upwards from anywhere: something can be learnt."""
    begin = torch.randint(0, 64, (4, 1), generator=torch.Generator().manual_seed(step))
    return decode_records(((begin + torch.arange(17)) % 64).to(torch.uint8).numpy().tobytes(), META)


def hold(train: TrainSection, cut: tuple[Stage, ...]) -> HeldSpan:
    """All stages of a cut, with empty weights."""

    def build(first: int, last: int):
        return build_stage(DESCRIPTION, first, last)

    everything = Span(0, len(cut) - 1)
    return HeldSpan(DESCRIPTION, cut, everything, build, make_optimizer(train), torch.device("cpu"))


@pytest.mark.parametrize(("optimizer", "allowed"), [("nadam", 1e-5), ("muon", 2e-2), ("adamw8bit", 5e-2)])
def test_training_follows_the_reference_and_is_copied_exactly(
    optimizer: OptimizerName, allowed: float
) -> None:
    """The copy has another cut and begins half-way, as somebody does who joins late or loads a checkpoint.

    allowed: of the way that the weights went. The reference of Muon iterates in bfloat16, that of 8-bit moments has
    float32 ones.
    """
    train = TrainSection.model_validate({"optimizer": optimizer})
    held, copy = hold(train, (Stage(0, 3),)), hold(train, (Stage(0, 1), Stage(2, 3)))
    state = dict(initial_state(DESCRIPTION, seed=1))
    for block in held.blocks:
        held.load_block(block, {f"param:{name}": raw_tensor(t) for name, t in state[block].items()}, 0)
    whole = whole_model(DESCRIPTION, seed=1)
    start = {name: p.detach().clone() for name, p in whole.named_parameters()}
    reference = make_optimizers(whole, DESCRIPTION, train)
    runner = Runner(held, loss_sum, recompute=False, bf16=False)
    losses = []
    for step in range(STEPS):
        here = batch(step)
        run = runner.forward(
            0, 0, here.inputs, batch=here, loss_denominator=64.0, train=True, next_token=False
        )
        runner.backward(run, None)
        if step >= STEPS // 2:
            if step == STEPS // 2:
                for block in held.blocks:
                    copy.load_block(block, held.block_state(block), step)
            joined = torch.cat([copy.vectors[group].gradient for group in ("stage:0", "stage:1")])
            assert not joined.any()
            whole_gradient = held.vectors["stage:0"].gradient
            half = copy.vectors["stage:0"].size
            copy.vectors["stage:0"].gradient.copy_(whole_gradient[:half])
            copy.vectors["stage:1"].gradient.copy_(whole_gradient[half:])
            copy.apply_step(step, RATE, 0.8)
        held.apply_step(step, RATE, 0.8)
        total, _ = loss_sum(whole(here.inputs, use_cache=False).logits, here)
        (total / 64).backward()
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.8)
        for plain in reference:
            for group in plain.param_groups:
                group["lr"] = RATE
            plain.step()
            plain.zero_grad()
        losses.append(float(total.detach()) / 64)
    assert losses[-1] < losses[0] - 0.5
    assert copy.block_digests() == held.block_digests()
    off = way = 0.0
    for name, parameter in whole.named_parameters():
        place = DESCRIPTION.locate(name)
        assert place is not None
        (slot,) = (s for s in held.vectors["stage:0"].slots if (s.block, s.name) == place)
        ours = held.vectors["stage:0"].parameter_view(slot)
        off += float((ours - parameter.detach()).square().sum())
        way += float((parameter.detach() - start[name]).square().sum())
    print(f"{optimizer}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {(off / way) ** 0.5:.1e} of the way off")
    assert (off / way) ** 0.5 < allowed
