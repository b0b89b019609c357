"""What codecs are measured on: drawn values, and what a real training run sends.

The run is the `tiny` preset on Python's own sources, trained by the product's own prepare, stages, runner and optimizer
as two stages in this process. Of its last step come the gradients of all matrices, the activations that crossed the
boundary, and their gradients on the way back.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from starlings import template
from starlings_job.checkpoint import read_block
from starlings_job.data.batch import decode_records, loss_sum
from starlings_job.model import build_stage
from starlings_job.prepare import prepare
from starlings_job.prepared import load_prepared, weights_url
from starlings_job.records import RecordStore
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_job.spec import JobSpec
from starlings_protos.messages import Span, Stage
from starlings_worker.computer import make_optimizer
from starlings_worker.runs import Runner
from starlings_worker.stage import HeldSpan

BATCH, MICROBATCH, LENGTH = 16, 4, 128
# Smaller tensors travel exactly.
SMALLEST_ELEMENTS = 1024
CPU = torch.device("cpu")


def drawn(side: int) -> dict[str, list[Tensor]]:
    """Normal, and heavy-tailed values (Student's t, three degrees of freedom), as a square matrix."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(side, side, generator=generator)
    # t is a normal value over the root of a mean of squares of others.
    squares = torch.randn(3, side, side, generator=generator).square().mean(0)
    return {"normal": [normal], "heavy": [torch.randn(side, side, generator=generator) / squares.sqrt()]}


@dataclass
class Captured:
    """What one step sent. Losses are those of its first and last step, nats per target."""

    gradient: list[Tensor] = field(default_factory=list)
    activation: list[Tensor] = field(default_factory=list)
    activation_gradient: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def tensors(self) -> dict[str, list[Tensor]]:
        return {
            "gradient": self.gradient,
            "activation": self.activation,
            "activation gradient": self.activation_gradient,
        }


def captured(steps: int) -> Captured:
    """Trains `steps` steps and keeps what the last one sends between two stages, and to other replicas."""
    with tempfile.TemporaryDirectory(prefix="starlings-codecs-") as scratch:
        file, directory = Path(scratch) / "job.toml", Path(scratch) / "job"
        file.write_text(_job_text(steps))
        prepare(file, directory)
        job = load_prepared(directory)
        holders = _holders(job, weights_url(directory))
        found = Captured()
        with RecordStore(directory) as store:
            for step in range(steps):
                found.activation.clear()
                found.activation_gradient.clear()
                found.losses.append(_accumulate(holders, job, store, step, found))
                vectors = [vector for held, _ in holders for vector in held.vectors.values()]
                if step == steps - 1:
                    found.gradient = [
                        vector.gradient_view(slot).clone()
                        for vector in vectors
                        for slot in vector.slots
                        if len(slot.shape) >= 2 and slot.stop - slot.start >= SMALLEST_ELEMENTS
                    ]
                norm = float(torch.stack([v.gradient.norm() for v in vectors]).norm())
                factor = min(1.0, job.train.clip / norm) if job.train.clip else 1.0
                for held, _ in holders:
                    held.apply_step(step, learning_rate(job.train, step, job.steps_total), factor)
    return found


def _job_text(steps: int) -> str:
    return template.render(
        {
            # As at the same step of a job that goes on for long.
            "job": {"name": "codecs", "tokens": max(steps, 1000) * BATCH * LENGTH},
            "model": {"preset": "tiny"},
            "data": {"source": "stdlib", "limit": "2M", "sequence_length": LENGTH, "held_out": 8},
            "train": {"batch": BATCH, "microbatch": MICROBATCH, "lr": 2e-3, "warmup": 10},
        },
        comments=False,
    )


def _holders(job: JobSpec, weights: str) -> list[tuple[HeldSpan, Runner]]:
    """Both halves of the model, as two workers would hold them."""
    description = job.description
    middle = len(description.blocks) // 2
    stages = (Stage(0, middle - 1), Stage(middle, len(description.blocks) - 1))
    holders = []
    for number in range(len(stages)):
        held = HeldSpan(
            description,
            stages,
            Span(number, number),
            lambda first, last: build_stage(description, first, last),
            make_optimizer(job.train),
            CPU,
        )
        for block in held.blocks:
            held.load_block(block, read_block(weights, 0, block), 0)
        holders.append((held, Runner(held, loss_sum, recompute=False, bf16=False)))
    return holders


def _accumulate(
    holders: list[tuple[HeldSpan, Runner]], job: JobSpec, store: RecordStore, step: int, found: Captured
) -> float:
    """Forward and backward of a step's microbatches; keeps what crosses the boundary. Returns the mean loss."""
    (_, first), (_, last) = holders
    samples = samples_of_step(job.job.seed, store.population, step, job.train.batch)
    denominator = store.target_count(samples)
    total = 0.0
    for begin in range(0, len(samples), job.train.microbatch):
        batch = decode_records(store.read(samples[begin : begin + job.train.microbatch]), store.meta)
        ahead = first.forward(0, 0, batch.inputs, batch=None, loss_denominator=denominator, train=True)
        assert ahead.output is not None
        found.activation.append(ahead.output.detach().clone())
        behind = last.forward(
            1, 1, ahead.output.detach(), batch=batch, loss_denominator=denominator, train=True
        )
        gradient = last.backward(behind, None)
        assert gradient is not None
        found.activation_gradient.append(gradient.clone())
        first.backward(ahead, gradient)
        total += behind.loss_sum
    return total / denominator
