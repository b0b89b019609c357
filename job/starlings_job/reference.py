"""Plain single-process training on the very samples, batches and rates of a job: what a swarm must equal.

Nothing of the swarm's machinery is used: the whole Hugging Face model, torch's own optimizers and clipping.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch
from torch import nn

from starlings_job.checkpoint import read_block
from starlings_job.data.batch import decode_records, loss_sum
from starlings_job.description import ModelDescription
from starlings_job.model.initial import split, whole_model
from starlings_job.model.tensors import torch_tensor
from starlings_job.optimizers import takes_muon
from starlings_job.prepared import load_prepared, weights_url
from starlings_job.records import RecordStore
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_job.sections import TrainSection
from starlings_job.spec import JobSpec
from starlings_job.state import PARAMETER


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """losses: mean loss in nats per target of each step, before its update. state: parameters by (block, name)."""

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    state: dict[tuple[str, str], torch.Tensor]
    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def train_reference(
    job_dir: str | Path,
    steps: int,
    *,
    device: str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> ReferenceRun:
    """Trains `steps` steps from version 0.

    Args:
        job_dir: a prepared directory.
        on_step: told of each step and its loss.
    """
    job = load_prepared(job_dir)
    description = job.description
    model = load_whole(job_dir, description).to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = make_optimizers(model, description, job.train)
    losses, norms = [], []
    begin = time.perf_counter()
    with RecordStore(job_dir) as store:
        for step in range(steps):
            loss = accumulate(model, job, store, step, device)
            norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            if job.train.clip:
                nn.utils.clip_grads_with_norm_(trained, job.train.clip, norm)
            rate = learning_rate(job.train, step, job.steps_total)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("rate_factor", 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            norms.append(float(norm))
            if on_step is not None:
                on_step(step, loss)
    seconds = time.perf_counter() - begin
    state = {
        (block, name): tensor.detach().cpu()
        for block, tensors in split(description, dict(model.state_dict()))
        for name, tensor in tensors.items()
    }
    return ReferenceRun(tuple(losses), tuple(norms), state, seconds, steps * job.tokens_per_step)


def load_whole(
    job_dir: str | Path, description: ModelDescription, version_url: str | None = None
) -> nn.Module:
    """The whole model with version 0 of the weights; frozen parameters do not require a gradient."""
    model = whole_model(description, seed=0)
    # A tied output embedding is the input embedding itself.
    parameters = {description.locate(name): parameter for name, parameter in model.named_parameters()}
    url = version_url or weights_url(job_dir)
    with torch.no_grad():
        for block in description.blocks:
            for name, raw in read_block(url, 0, block).items():
                inner = name.removeprefix(PARAMETER)
                parameter = parameters.get((block, inner))
                if parameter is not None:
                    parameter.copy_(torch_tensor(raw))
                    parameter.requires_grad_(description.is_trainable(block, inner))
    return model


def make_optimizers(
    model: nn.Module, description: ModelDescription, train: TrainSection
) -> list[torch.optim.Optimizer]:
    """torch's own optimizers with the job's settings; weight decay on tensors of two or more dimensions only.

    Two for Muon, which iterates in bfloat16 here. For 8-bit moments AdamW, which they approximate. A group's rate is
    the step's times its "rate_factor".
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    betas, adamw_rate = (train.beta1, train.beta2), 1.0
    optimizers: list[torch.optim.Optimizer] = []
    rest = list(trained.values())
    match train.optimizer:
        case "sgd":
            return [torch.optim.SGD(rest, lr=train.lr, momentum=train.momentum)]
        case "muon":
            matrices = [p for name, p in trained.items() if _takes_muon(description, name, p)]
            chosen = {id(p) for p in matrices}
            rest, adamw_rate = [p for p in rest if id(p) not in chosen], train.muon_adamw_lr
            if matrices:
                muon = torch.optim.Muon(
                    matrices,
                    weight_decay=train.weight_decay,
                    momentum=train.momentum,
                    ns_steps=train.muon_iterations,
                    adjust_lr_fn="match_rms_adamw" if train.muon_scale == "rms" else "original",
                )
                optimizers.append(muon)
        case "adamw" | "adamw8bit" | "nadam":
            pass
        case _:
            assert_never(train.optimizer)
    groups = [
        {
            "params": [p for p in rest if (p.ndim >= 2) == decays],
            "weight_decay": train.weight_decay if decays else 0.0,
            "rate_factor": adamw_rate,
        }
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "nadam":
        nadam = torch.optim.NAdam(
            groups,
            betas=betas,
            eps=train.epsilon,
            momentum_decay=train.momentum_decay,
            decoupled_weight_decay=True,
        )
        return [nadam]
    return [*optimizers, torch.optim.AdamW(groups, betas=betas, eps=train.epsilon)] if groups else optimizers


def _takes_muon(description: ModelDescription, name: str, parameter: nn.Parameter) -> bool:
    place = description.locate(name)
    return place is not None and takes_muon(tuple(parameter.shape), hidden=description.is_hidden(place[0]))


def accumulate(model: nn.Module, job: JobSpec, store: RecordStore, step: int, device: str) -> float:
    """Adds the mean gradient of a step's samples, microbatch by microbatch; returns the mean loss in nats."""
    samples = samples_of_step(job.job.seed, store.population, step, job.train.batch)
    denominator = store.target_count(samples)
    total = 0.0
    for begin in range(0, len(samples), job.train.microbatch):
        ids = samples[begin : begin + job.train.microbatch]
        batch = decode_records(store.read(ids), store.meta).to(device)
        loss, _ = loss_sum(forward(model, batch.inputs), batch)
        (loss / denominator).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total / denominator


def forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Logits of a whole model, Hugging Face or Sequential."""
    sequential = isinstance(model, nn.Sequential)
    out = model(inputs) if sequential else model(inputs, use_cache=False).logits
    assert isinstance(out, torch.Tensor)
    return out


def evaluate(model: nn.Module, store: RecordStore, microbatch: int) -> float:
    """Mean loss in nats over all held-out targets."""
    total, targets = 0.0, 0
    with torch.no_grad():
        for begin in range(0, store.held_out_count, microbatch):
            ids = range(begin, min(begin + microbatch, store.held_out_count))
            batch = decode_records(store.read_held_out(ids), store.meta)
            loss, count = loss_sum(forward(model, batch.inputs), batch)
            total, targets = total + float(loss), targets + count
    return total / targets
