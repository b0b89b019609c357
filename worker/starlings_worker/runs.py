"""Forward and backward of a microbatch through a run of held stages, as one autograd graph or with
recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from starlings_job.data.batch import Batch
from starlings_worker.ahead import Ahead
from starlings_worker.errors import EngineFault
from starlings_worker.fitting import Fitting
from starlings_worker.stage import HeldSpan

LossSum = Callable[[Tensor, Batch], tuple[Tensor, int]]


@dataclass(slots=True)
class Run:
    """What one ComputeForward leaves behind for its backward pass."""

    first_stage: int
    last_stage: int
    # The boundary input, a leaf that takes a gradient; None where the model's own inputs entered.
    entry: Tensor | None = None
    # What leaves the run; its graph is what backward walks. None when the run ended in the loss.
    output: Tensor | None = None
    loss: Tensor | None = None
    # With recomputation: the input of each stage, in order, instead of a graph.
    inputs: list[Tensor] = field(default_factory=list)
    loss_sum: float = 0.0
    target_count: int = 0
    next_token: int = 0
    # Computed in parts of rows, each with its inputs; of one that ends in the loss, what that is over.
    parts: list[Run] = field(default_factory=list)
    batch: Batch | None = None
    loss_denominator: float = 1.0


class Runner:
    """Computes on the device; to be called from one thread."""

    def __init__(
        self,
        held: HeldSpan,
        loss_sum: LossSum,
        *,
        recompute: bool,
        bf16: bool,
        streams: bool = False,
        ahead: Ahead | None = None,
        fitting: Fitting | None = None,
    ) -> None:
        """
        Args:
            streams: weights may change between a forward pass and its backward pass, unless the loss is its end: then
                backward comes at once. No graph outlives a change of the weights that it points to.
            ahead: makes the forward passes to which that may happen.
            fitting: how many rows are computed at a time; None: all.
        """
        self._ahead = ahead
        self.held = held
        self.recompute = recompute
        self._streams = streams
        self._loss_sum = loss_sum
        self._bf16 = bf16
        self._fitting = fitting

    def forward(
        self,
        first_stage: int,
        last_stage: int,
        value: Tensor,
        *,
        batch: Batch | None,
        loss_denominator: float,
        train: bool,
        next_token: bool = False,
    ) -> Run:
        """Stages first..last on `value`: the model's inputs at stage 0, else a boundary tensor.

        Args:
            batch: labels; needed when the run ends in the model's last stage (unless `next_token`).
            train: keep what backward needs.
            next_token: the last stage gives the most likely token after the last position instead of a loss.

        Raises:
            EngineFault: the loss, or the output, is not finite.
        """
        run = Run(first_stage, last_stage)
        ends = last_stage == self.held.stage_count - 1
        rows = self._fitting.rows_most if self._fitting is not None else None
        if train and rows is not None and len(value) > rows:
            return self._forward_in_parts(run, value, batch if ends else None, loss_denominator, ends, rows)
        if train and first_stage > 0:
            run.entry = value = value.detach().requires_grad_()
        if not train:
            with torch.no_grad():
                result = self._through(first_stage, last_stage, value)
        elif self.recompute or (self._streams and not ends):
            result = self._forward_recomputing(run, value, ends)
        else:
            with torch.enable_grad():
                result = self._through(first_stage, last_stage, value)
        if not ends:
            run.output = result
        elif next_token:
            run.next_token = int(result[0, -1].argmax().item())
        else:
            self._close(run, result, batch, loss_denominator, train)
        return run

    def _close(
        self, run: Run, logits: Tensor, batch: Batch | None, loss_denominator: float, train: bool
    ) -> None:
        if batch is None:
            raise EngineFault("the last stage got no labels")
        with torch.set_grad_enabled(train), self._autocast():
            total, run.target_count = self._loss_sum(logits, batch)
        run.loss_sum = float(total.item())
        if not math.isfinite(run.loss_sum):
            raise EngineFault(f"the loss is {run.loss_sum}")
        if train:
            run.loss = total / loss_denominator

    def backward(
        self, run: Run, gradient: Tensor | None, unadded_stages: Collection[int] = ()
    ) -> Tensor | None:
        """Adds to the accumulators; returns the gradient at the run's entry, None at the model's input.

        Args:
            gradient: of the run's output; None when the run ended in the loss.
            unadded_stages: of those that are recomputed; they pass the gradient on, and their accumulators stay.
        """
        if run.parts:
            return self._backward_in_parts(run, gradient, unadded_stages)
        if run.loss is not None:
            run.loss.backward()  # type: ignore[no-untyped-call]
            run.loss = None
        elif gradient is None:
            raise EngineFault("no gradient has arrived for the microbatch")
        elif run.output is not None and not run.inputs:
            if run.output.requires_grad:
                run.output.backward(gradient.to(run.output.dtype))  # type: ignore[no-untyped-call]
            run.output = None
        if run.inputs:
            return self._backward_recomputing(run, gradient, unadded_stages)
        return run.entry.grad if run.entry is not None else None

    # ---------------------------------------------------------------- recomputation

    def _forward_recomputing(self, run: Run, value: Tensor, ends: bool) -> Tensor:
        """No graph; but where the loss follows, the last stage's graph is kept, because backward comes at
        once.
        """
        for stage in range(run.first_stage, run.last_stage + 1):
            run.inputs.append(value)
            if ends and stage == run.last_stage:
                if stage > 0:
                    run.inputs[-1] = value = value.detach().requires_grad_()
                with torch.enable_grad():
                    return self._through(stage, stage, value)
            with torch.no_grad():
                if self._ahead is None or ends:
                    value = self._through(stage, stage, value)
                else:
                    with self._autocast():
                        value = self._ahead.through(stage, value)
        return value

    def _backward_recomputing(
        self, run: Run, gradient: Tensor | None, unadded_stages: Collection[int]
    ) -> Tensor | None:
        stage = run.last_stage
        if gradient is None:
            # The loss's backward has gone through the last stage already.
            gradient = run.inputs.pop().grad
            stage -= 1
        while stage >= run.first_stage:
            value = run.inputs.pop()
            if stage in unadded_stages:
                gradient = self._pass_on(stage, value, gradient) if stage > 0 else None
                stage -= 1
                continue
            if stage > 0:
                value = value.detach().requires_grad_()
            with torch.enable_grad():
                result = self._through(stage, stage, value)
            if result.requires_grad and gradient is not None:
                result.backward(gradient.to(result.dtype))  # type: ignore[no-untyped-call]
            gradient = value.grad
            stage -= 1
        return gradient

    def _pass_on(self, stage: int, value: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient at the stage's input, and none of its parameters."""
        value = value.detach().requires_grad_()
        with torch.enable_grad():
            result = self._through(stage, stage, value)
        if not result.requires_grad or gradient is None:
            return None
        (passed,) = torch.autograd.grad(result, value, gradient.to(result.dtype))
        return passed

    # ---------------------------------------------------------------- in parts of rows

    def _forward_in_parts(
        self, run: Run, value: Tensor, batch: Batch | None, loss_denominator: float, ends: bool, rows: int
    ) -> Run:
        """Without any graph: what backward needs is computed again, part by part. Rows don't know of each other, so
        outputs, losses and gradients are those of the whole, up to the order of sums.
        """
        if ends and batch is None:
            raise EngineFault("the last stage got no labels")
        outputs = []
        for first in range(0, len(value), rows):
            part = Run(run.first_stage, run.last_stage, loss_denominator=loss_denominator)
            part.batch = batch.rows(first, first + rows) if batch is not None else None
            result = value[first : first + rows]
            for stage in range(run.first_stage, run.last_stage + 1):
                part.inputs.append(result)
                with torch.no_grad():
                    if self._ahead is None or ends:
                        result = self._through(stage, stage, result)
                    else:
                        with self._autocast():
                            result = self._ahead.through(stage, result)
            if part.batch is not None:
                self._close(part, result, part.batch, loss_denominator, train=False)
                run.loss_sum += part.loss_sum
                run.target_count += part.target_count
            else:
                outputs.append(result)
            run.parts.append(part)
        if outputs:
            run.output = torch.cat(outputs)
        return run

    def _backward_in_parts(
        self, run: Run, gradient: Tensor | None, unadded_stages: Collection[int]
    ) -> Tensor | None:
        ends = run.parts[0].batch is not None
        if gradient is None and not ends:
            raise EngineFault("no gradient has arrived for the microbatch")
        entries: list[Tensor] = []
        first = 0
        while run.parts:
            part = run.parts.pop(0)
            count = len(part.inputs[0])
            own = gradient[first : first + count] if gradient is not None else None
            first += count
            if part.batch is not None:
                self._backward_from_loss(part)
            entry = self._backward_recomputing(part, own, unadded_stages)
            if entry is not None:
                entries.append(entry)
        run.output = None
        return torch.cat(entries) if entries else None

    def _backward_from_loss(self, part: Run) -> None:
        """Through the last stage; the gradient at its input stays there."""
        assert part.batch is not None
        value, stage = part.inputs[-1], part.last_stage
        if stage > 0:
            part.inputs[-1] = value = value.detach().requires_grad_()
        with torch.enable_grad():
            logits = self._through(stage, stage, value)
            with self._autocast():
                total, _ = self._loss_sum(logits, part.batch)
            (total / part.loss_denominator).backward()  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------- the stages themselves

    def _through(self, first_stage: int, last_stage: int, value: Tensor) -> Tensor:
        with self._autocast():
            for stage in range(first_stage, last_stage + 1):
                value = self.held.modules[stage](value)
        return value

    def _autocast(self) -> AbstractContextManager[object]:
        if not self._bf16:
            return nullcontext()
        return torch.autocast(self.held.device.type, dtype=torch.bfloat16)
