"""A span of stages on flat vectors against the whole model in plain PyTorch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from starlings_job.description import ModelDescription, describe
from starlings_job.model import build_stage, decode_records, initial_state, loss_sum
from starlings_job.model.tensors import raw_tensor
from starlings_job.records import DatasetMeta
from starlings_protos.messages import Span, Stage
from starlings_worker.errors import EngineFault
from starlings_worker.fitting import Fitting
from starlings_worker.optimizers.adam import AdamW
from starlings_worker.runs import Runner
from starlings_worker.stage import TIED, HeldSpan
from support.small_families import SMALL

torch.set_num_threads(1)

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
META = DatasetMeta("tokens", 100, 10, 16, 64, stride_tokens=16, context_tokens=64)
CPU = torch.device("cpu")
# Blocks: embed, three layers, head; cut into three stages.
STAGES = (Stage(0, 1), Stage(2, 2), Stage(3, 4))


CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    # Experts that no token reaches, and an embedding scale, local layers and a tied output.
    **{f: {**SMALL[f], "vocab_size": 64, "num_hidden_layers": 3} for f in ("qwen3_moe", "gemma3_text")},
}


def _describe(family: str, **changes: object) -> ModelDescription:
    trainable = tuple(changes.pop("trainable", ("*",)))  # type: ignore[arg-type]
    return describe(family, {**CONFIGS[family], **changes}, "test", trainable=trainable)


def _hold(description: ModelDescription, span: Span, version: int = 0) -> HeldSpan:
    held = HeldSpan(description, STAGES, span, lambda a, b: build_stage(description, a, b), AdamW(), CPU)
    state = dict(initial_state(description, seed=1))
    for block in held.blocks:
        tensors = {f"param:{name}": raw_tensor(t) for name, t in state[block].items()}
        held.load_block(block, tensors, version)
    return held


def _batch(seed: int = 0):
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return decode_records(tokens.numpy().tobytes(), META)


def _whole(description: ModelDescription) -> torch.nn.Module:
    module = build_stage(description, 0, 4)
    state = dict(initial_state(description, seed=1))
    with torch.no_grad():
        for block, tensors in module.block_tensors().items():
            for name, parameter in tensors.items():
                parameter.copy_(state[block][name])
    return module


def _pipeline(holders: list[tuple[HeldSpan, Runner]], batch, denominator: float) -> tuple[float, list]:
    """One microbatch forward and back through consecutive holders; returns the loss sum."""
    value, runs = batch.inputs, []
    for held, runner in holders:
        run = runner.forward(
            held.span.first_stage,
            held.span.last_stage,
            value,
            batch=batch,
            loss_denominator=denominator,
            train=True,
        )
        runs.append(run)
        value = run.output.detach() if run.output is not None else None
    gradient = None
    for (_, runner), run in zip(reversed(holders), reversed(runs), strict=True):
        gradient = runner.backward(run, gradient)
    return runs[-1].loss_sum, runs


def _fitting(rows: int | None) -> Fitting:
    """As after memory did not suffice for more."""
    fitting = Fitting(4, lambda: None)
    fitting.rows_most = rows
    return fitting


@pytest.mark.parametrize(("recompute", "rows"), [(False, None), (True, None), (False, 3)])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("gpt2", {"tie_word_embeddings": True}),
        ("llama", {"trainable": ("*.mlp.*", "*norm*")}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"trainable": ("*.experts.*", "*norm*")}),
        ("gemma3_text", {}),
    ],
)
def test_spans_compute_the_whole_models_loss_and_gradient(
    family: str, changes: dict, recompute: bool, rows: int | None
):
    description = _describe(family, **changes)
    whole = _whole(description)
    denominator = 2 * 64.0
    holders = []
    for span in (Span(0, 1), Span(2, 2)):
        held = _hold(description, span)
        runner = Runner(held, loss_sum, recompute=recompute, bf16=False, fitting=_fitting(rows))
        holders.append((held, runner))
    expected = 0.0
    for seed in range(2):
        total, _ = loss_sum(whole(_batch(seed).inputs), _batch(seed))
        (total / denominator).backward()
        expected = total.item()
        got, _ = _pipeline(holders, _batch(seed), denominator)
        assert got == pytest.approx(expected, rel=1e-6)
    tensors = {
        (block, name): parameter
        for block, named in whole.block_tensors().items()
        for name, parameter in named.items()
    }
    checked = 0
    for held, _ in holders:
        for vector in held.vectors.values():
            for slot in vector.slots:
                if vector.group == TIED:
                    continue
                reference = tensors[slot.block, slot.name].grad
                torch.testing.assert_close(vector.gradient_view(slot), reference, rtol=1e-5, atol=1e-7)
                checked += 1
    if description.tied:
        ends = [h.vectors[TIED].gradient_view(h.vectors[TIED].slots[0]) for h, _ in holders]
        (first, second) = description.tied_parameters()
        torch.testing.assert_close(ends[0], tensors[first].grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ends[1], tensors[second].grad, rtol=1e-5, atol=1e-7)
        checked += 2
    trained = sum(description.is_trainable(*key) for key in tensors)
    assert checked == trained > 0


def test_where_memory_does_not_suffice_rows_are_computed_in_smaller_and_smaller_parts() -> None:
    """A real forward pass, on a device that has no memory for more than one row."""
    description, sizes = _describe("llama"), []
    held, whole = (_hold(description, Span(0, 2)) for _ in range(2))
    fitting = _fitting(None)
    runner = Runner(held, loss_sum, recompute=False, bf16=False, fitting=fitting)
    through = runner._through

    def cramped(first: int, last: int, value: torch.Tensor) -> torch.Tensor:
        sizes.append(len(value))
        if len(value) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return through(first, last, value)

    runner._through = cramped  # type: ignore[method-assign]
    batch = _batch()

    def forward(of: Runner):
        return of.forward(0, 2, batch.inputs, batch=batch, loss_denominator=64.0, train=True)

    run = fitting.forward(lambda: forward(runner), train=True)
    assert sizes[:3] == [4, 2, 1]
    assert fitting.rows_most == 1
    runner.backward(run, None)
    plain = Runner(whole, loss_sum, recompute=False, bf16=False)
    expected = forward(plain)
    plain.backward(expected, None)
    assert run.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert run.target_count == expected.target_count
    for name, vector in held.vectors.items():
        torch.testing.assert_close(vector.gradient, whole.vectors[name].gradient, rtol=1e-5, atol=1e-7)


def test_without_memory_for_one_row_it_is_out_of_memory() -> None:
    fitting, freed = Fitting(4, lambda: freed.append(1)), []  # type: ignore[var-annotated]

    def nothing() -> None:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(torch.OutOfMemoryError):
        fitting.forward(nothing, train=True)
    assert (fitting.rows_most, len(freed)) == (1, 2)
    assert not fitting.smaller()
    other = Fitting(4, lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        other.forward(nothing, train=False)
    assert other.rows_most is None


def test_in_parts_too_a_stage_that_is_not_added_passes_the_gradient_on() -> None:
    description, batch = _describe("llama"), _batch()
    entries, gradients = [], []
    for rows in (None, 3):
        held = _hold(description, Span(1, 1))
        runner = Runner(held, loss_sum, recompute=True, bf16=False, streams=True, fitting=_fitting(rows))
        hidden = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(3))
        run = runner.forward(1, 1, hidden, batch=None, loss_denominator=1.0, train=True)
        assert run.output is not None
        entries.append(runner.backward(run, torch.ones_like(run.output), unadded_stages=(1,)))
        gradients.append([vector.gradient.abs().max() for vector in held.vectors.values()])
    assert len(batch.inputs) == 4
    torch.testing.assert_close(entries[0], entries[1], rtol=1e-5, atol=1e-7)
    assert all(largest == 0 for both in gradients for largest in both)


def test_a_holder_of_both_ends_adds_the_tied_gradients():
    description = _describe("gpt2", tie_word_embeddings=True)
    held = _hold(description, Span(0, 2))
    runner = Runner(held, loss_sum, recompute=False, bf16=False)
    whole = _whole(description)
    total, _ = loss_sum(whole(_batch().inputs), _batch())
    total.backward()
    _pipeline([(held, runner)], _batch(), 1.0)
    tensors = whole.block_tensors()
    expected = tensors["embed"]["wte.weight"].grad + tensors["head"]["lm_head.weight"].grad
    tied = held.vectors[TIED]
    torch.testing.assert_close(tied.gradient_view(tied.slots[0]), expected, rtol=1e-5, atol=1e-5)


def test_where_one_stage_is_the_whole_model_its_tied_embedding_steps_with_it():
    """As in `async`, where stages step by themselves: both copies are the same memory, with both ends' gradients."""
    description = _describe("gpt2", tie_word_embeddings=True)
    held = HeldSpan(
        description, (Stage(0, 4),), Span(0, 0), lambda a, b: build_stage(description, a, b), AdamW(), CPU
    )
    state = dict(initial_state(description, seed=1))
    for block in held.blocks:
        held.load_block(block, {f"param:{name}": raw_tensor(t) for name, t in state[block].items()}, 0)
    assert set(held.vectors) == {"stage:0"}
    runner = Runner(held, loss_sum, recompute=False, bf16=False)
    whole = _whole(description)
    total, _ = loss_sum(whole(_batch().inputs), _batch())
    total.backward()
    _pipeline([(held, runner)], _batch(), 1.0)
    tensors = whole.block_tensors()
    expected = tensors["embed"]["wte.weight"].grad + tensors["head"]["lm_head.weight"].grad
    vector = held.vectors["stage:0"]
    (slot,) = (slot for slot in vector.slots if slot.name == "wte.weight")
    assert not any(slot.name == "lm_head.weight" for slot in vector.slots)
    torch.testing.assert_close(vector.gradient_view(slot), expected, rtol=1e-5, atol=1e-5)
    held.step_stage(0, 1, 1e-2, 1.0)
    held.version = 1
    both = [held.block_state(block)["param:" + name] for block, name in description.tied_parameters()]
    assert bytes(both[0].data) == bytes(both[1].data) != bytes(raw_tensor(state["embed"]["wte.weight"]).data)
    again = HeldSpan(
        description, (Stage(0, 4),), Span(0, 0), lambda a, b: build_stage(description, a, b), AdamW(), CPU
    )
    for block in held.blocks:
        again.load_block(block, held.block_state(block), 1)
    assert again.vectors["stage:0"].parameters.equal(vector.parameters)
    assert again.vectors["stage:0"].state["exp_avg"].equal(vector.state["exp_avg"])


def test_state_goes_out_and_comes_back_bit_for_bit():
    description = _describe("gpt2", tie_word_embeddings=True)
    held = _hold(description, Span(0, 2))
    runner = Runner(held, loss_sum, recompute=False, bf16=False)
    before = held.block_digests()
    for step in range(3):
        _pipeline([(held, runner)], _batch(step), 64.0)
        held.apply_step(step, 1e-2, 1.0)
    assert held.version == 3
    digests = held.block_digests()
    assert not set(digests.values()) & set(before.values())
    other = HeldSpan(
        description, STAGES, Span(0, 2), lambda a, b: build_stage(description, a, b), AdamW(), CPU
    )
    other.version = 3
    for block in held.blocks:
        other.load_block(block, held.block_state(block), 3)
    assert other.block_digests() == digests
    # And it goes on alike.
    other_runner = Runner(other, loss_sum, recompute=False, bf16=False)
    for h, r in ((held, runner), (other, other_runner)):
        _pipeline([(h, r)], _batch(9), 64.0)
        h.apply_step(3, 1e-2, 0.5)
    assert other.block_digests() == held.block_digests()


def test_a_block_with_another_shape_or_a_missing_tensor_is_refused():
    description = _describe("llama")
    held = _hold(description, Span(0, 0))
    state = held.block_state("layers.0")
    name = next(iter(state))
    with pytest.raises(EngineFault, match="without"):
        held.load_block("layers.0", {k: v for k, v in state.items() if k != name}, 0)
    wrong = {**state, name: dataclasses.replace(state[name], shape=(state[name].data.nbytes // 4, 1))}
    with pytest.raises(EngineFault, match="expected"):
        held.load_block("layers.0", wrong, 0)


def test_a_loss_that_is_not_finite_fails_the_microbatch():
    description = _describe("llama")
    held = _hold(description, Span(0, 2))
    held.vectors["stage:2"].parameters.fill_(float("nan"))
    runner = Runner(held, loss_sum, recompute=False, bf16=False)
    with pytest.raises(EngineFault, match="loss"):
        _pipeline([(held, runner)], _batch(), 1.0)


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_autocast_keeps_float32_weights_and_gradients(family: str):
    description = _describe(family)
    held = _hold(description, Span(0, 2))
    plain, _ = _pipeline([(held, Runner(held, loss_sum, recompute=False, bf16=False))], _batch(), 64.0)
    exact = {name: v.gradient.clone() for name, v in held.vectors.items()}
    held.zero_gradients()
    rough, _ = _pipeline([(held, Runner(held, loss_sum, recompute=True, bf16=True))], _batch(), 64.0)
    assert rough == pytest.approx(plain, rel=2e-2)
    assert rough != plain
    for name, vector in held.vectors.items():
        assert vector.gradient.dtype is torch.float32
        relative = float((vector.gradient - exact[name]).norm() / exact[name].norm())
        assert 0 < relative < 0.05


def test_evaluation_and_generation_keep_nothing():
    description = _describe("llama")
    held = _hold(description, Span(0, 2))
    runner = Runner(held, loss_sum, recompute=False, bf16=False)
    run = runner.forward(0, 2, _batch().inputs, batch=_batch(), loss_denominator=1.0, train=False)
    assert run.loss is None
    assert run.target_count == 64
    prompt = _batch().inputs[:1, :5]
    run = runner.forward(0, 2, prompt, batch=None, loss_denominator=1.0, train=False, next_token=True)
    logits = _whole(description)(prompt)
    assert run.next_token == int(logits[0, -1].argmax())


def test_idle_experts_step_like_all_others():
    """Their gradient is zero, not absent: moments and weight decay go on, as everywhere in the vector."""
    description = _describe("qwen3_moe")
    held, whole = _hold(description, Span(0, 2)), _whole(description)
    # Of two opposite rows one is positive, so that two of the first eight beat the zeros of all others.
    half = 10 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    router = torch.cat([half, -half, torch.zeros(16, 32)])
    tensors = whole.block_tensors()["layers.0"]
    slots = {slot.name: slot for slot in held.vectors["stage:0"].slots if slot.block == "layers.0"}
    with torch.no_grad():
        tensors["mlp.gate.weight"].copy_(router)
    held.vectors["stage:0"].parameter_view(slots["mlp.gate.weight"]).copy_(router)
    # Settings of AdamW(), which `_hold` uses.
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in whole.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in whole.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    runner = Runner(held, loss_sum, recompute=False, bf16=False)
    before = tensors["mlp.experts.down_proj"][8:].clone()
    for step in range(2):
        total, _ = loss_sum(whole(_batch(step).inputs), _batch(step))
        (total / 64).backward()
        _pipeline([(held, runner)], _batch(step), 64.0)
        for name in description.rules.stacked:
            gradient = held.vectors["stage:0"].gradient_view(slots[name])
            assert not gradient[8:].any()
            assert gradient[:8].any()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
        optimizer.zero_grad()
        held.apply_step(step, 1e-3, 1.0)
    for name, slot in slots.items():
        torch.testing.assert_close(
            held.vectors["stage:0"].parameter_view(slot), tensors[name].detach(), rtol=1e-4, atol=1e-6
        )
    kept = held.vectors["stage:0"].parameter_view(slots["mlp.experts.down_proj"])[8:]
    torch.testing.assert_close(kept, before * (1 - 1e-3 * 0.1) ** 2)
