"""The span that a worker holds: one module per stage, and one flat vector per exchange group.

A stage's vector has its trainable parameters in (block order, name) order. A parameter that the first and the
last stage share (tied embeddings) is in neither's vector but in one of its own, the group "tied"; a worker
that holds both ends has it once, so that autograd adds both ends' gradients by itself. Where one stage is the whole
model, it is in that stage's vector. Frozen parameters and
buffers are held, but are in no vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from starlings_job.description import ModelDescription
from starlings_job.model.tensors import TYPES, raw_tensor
from starlings_job.state import PARAMETER, RawTensor, Tensorlike, block_digest
from starlings_protos.messages import Span, Stage
from starlings_worker.errors import EngineFault
from starlings_worker.flat import Entry, FlatVector, Slot
from starlings_worker.optimizers.elementary import Optimizer

TIED = "tied"


def stage_group(stage: int) -> str:
    """The exchange group of a stage's replicas."""
    return f"stage:{stage}"


class StageModule(Protocol):
    """What `starlings_job.model.build_stage` gives: a run of blocks as one module."""

    def __call__(self, value: Tensor) -> Tensor: ...
    def block_tensors(self) -> Mapping[str, Mapping[str, Tensor]]: ...


# (first block, last block) -> the module, its tensors uninitialised.
BuildStage = Callable[[int, int], StageModule]


@dataclass(frozen=True, slots=True)
class _Trained:
    """A parameter that lies in a vector."""

    vector: FlatVector
    slot: Slot


class HeldSpan:
    """Weights, gradients and optimizer state of the stages of one worker, at one committed version."""

    def __init__(
        self,
        description: ModelDescription,
        stages: Sequence[Stage],
        span: Span,
        build: BuildStage,
        optimizer: Optimizer,
        device: torch.device,
    ) -> None:
        """Builds the modules with zero weights; `load_block` fills them.

        Args:
            stages: the whole cut.
            span: the stages to hold.
        """
        self.description = description
        self.span = span
        self.stage_count = len(stages)
        self._block_counts = [len(stage.blocks) for stage in stages]
        self.optimizer = optimizer
        self.device = device
        self.version = 0
        # By stage; where no step joins the replicas, each counts its own.
        self.optimizer_steps: dict[int, int] = dict.fromkeys(span.stages, 0)
        self._stage_of = {description.blocks[b]: s for s in span.stages for b in stages[s].blocks}
        self.modules: dict[int, StageModule] = {}
        self.vectors: dict[str, FlatVector] = {}
        self.blocks: tuple[str, ...] = tuple(
            description.blocks[b] for stage in span.stages for b in stages[stage].blocks
        )
        # Tensors in no vector: frozen parameters and buffers.
        self._frozen: dict[tuple[str, str], Tensor] = {}
        self._trained: dict[tuple[str, str], _Trained] = {}
        tied: tuple[tuple[str, str], ...] = description.tied_parameters() or ()
        # Where one stage has both ends, the second copy is another name of the first.
        joined = bool(tied) and len(stages) == 1
        tied_here: list[tuple[str, str]] = []
        for stage in span.stages:
            blocks = stages[stage].blocks
            module = build(blocks[0], blocks[-1])
            self.modules[stage] = module
            entries = []
            for block, name, tensor in _ordered(module, description.blocks):
                if not isinstance(tensor, nn.Parameter) or not description.is_trainable(block, name):
                    continue
                if (block, name) in tied and not joined:
                    tied_here.append((block, name))
                elif not (joined and (block, name) == tied[-1]):
                    entries.append(Entry(block, name, tuple(tensor.shape), description.is_hidden(block)))
            self._bind(FlatVector(stage_group(stage), entries, optimizer.keeps, device))
        if tied_here:
            self._bind_tied(tied_here)
        if joined and tied[0] in self._trained:
            self._trained[tied[-1]] = self._trained[tied[0]]
        for stage, module in self.modules.items():
            self._rebind(stage, module)

    def block_share(self, first_stage: int, last_stage: int) -> float:
        """The part of the model's blocks that is in a run of stages."""
        return sum(self._block_counts[first_stage : last_stage + 1]) / sum(self._block_counts)

    # ---------------------------------------------------------------- building

    def _bind(self, vector: FlatVector) -> None:
        self.vectors[vector.group] = vector
        for slot in vector.slots:
            self._trained[slot.block, slot.name] = _Trained(vector, slot)

    def _bind_tied(self, copies: Sequence[tuple[str, str]]) -> None:
        """One vector of one parameter, whose copies in both blocks are views of it."""
        shapes = {
            tuple(t.shape)
            for module in self.modules.values()
            for block, name, t in _ordered(module, self.description.blocks)
            if (block, name) in copies
        }
        (shape,) = shapes
        block, name = copies[0]
        vector = FlatVector(TIED, [Entry(block, name, shape)], self.optimizer.keeps, self.device)
        self.vectors[TIED] = vector
        for block, name in copies:
            self._trained[block, name] = _Trained(vector, vector.slots[0])

    def _rebind(self, stage: int, module: StageModule) -> None:
        """Makes the module's parameters views of the vectors, their gradients too."""
        assert isinstance(module, nn.Module)
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for child in module.modules():
            for attribute, parameter in child._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((child, attribute))
        for block, name, tensor in _ordered(module, self.description.blocks):
            trained = self._trained.get((block, name))
            if trained is None:
                self._frozen[block, name] = self._materialise(tensor, owners)
                continue
            view = nn.Parameter(trained.vector.parameter_view(trained.slot), requires_grad=True)
            view.grad = trained.vector.gradient_view(trained.slot)
            for owner, attribute in owners[id(tensor)]:
                setattr(owner, attribute, view)

    def _materialise(self, tensor: Tensor, owners: Mapping[int, list[tuple[nn.Module, str]]]) -> Tensor:
        """A frozen parameter or a buffer, on the device; frozen parameters need no gradient."""
        if isinstance(tensor, nn.Parameter):
            held = nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device), False)
            for owner, attribute in owners[id(tensor)]:
                setattr(owner, attribute, held)
            return held
        if tensor.device != self.device:
            raise EngineFault(f"a buffer was built on {tensor.device}, not on {self.device}")
        return tensor

    # ---------------------------------------------------------------- state by block

    def load_block(self, block: str, tensors: Mapping[str, Tensorlike], version: int) -> None:
        """Copies a fetched block to the device. At version 0 optimizer state starts at zero.

        Raises:
            EngineFault: a tensor is missing, unknown, or of another shape or type.
        """
        expected = dict(self._targets(block, version))
        unknown = sorted(set(tensors) - set(expected))
        missing = sorted(set(expected) - set(tensors))
        if unknown or missing:
            raise EngineFault(
                f"block {block} came with unknown tensors {unknown[:3]} and without {missing[:3]}"
            )
        for name, target in expected.items():
            target.copy_(_to_tensor(name, tensors[name], target))
        if version == 0:
            for name, target in self._targets(block, 1):
                if name not in expected:
                    target.zero_()

    def note_optimizer_steps(self, block: str, steps: int) -> None:
        """Of the state that the block came with. A stage has the most of its blocks': its next steps are rather a
        little small than too large.
        """
        stage = self._stage_of[block]
        self.optimizer_steps[stage] = max(self.optimizer_steps[stage], steps)

    def optimizer_steps_of(self, block: str) -> int:
        return self.optimizer_steps[self._stage_of[block]]

    def places(self, block: str, version: int) -> dict[str, RawTensor] | None:
        """Where a block's tensors lie in host memory, writable, by state name: a span that is not used yet is filled
        there without a copy. None on a device that is not the host.
        """
        if self.device.type != "cpu":
            return None
        targets = dict(self._targets(block, version))
        if not all(target.is_contiguous() for target in targets.values()):
            return None
        return {name: raw_tensor(target) for name, target in targets.items()}

    def block_state(self, block: str) -> dict[str, RawTensor]:
        """The block's tensors at the present version, by state name. On a CPU views without a copy: use them
        before the next step.
        """
        return {name: raw_tensor(tensor) for name, tensor in self._targets(block, self.version)}

    def block_digests(self) -> dict[str, str]:
        """SHA-256 of every held block."""
        return {block: block_digest(self.block_state(block)) for block in self.blocks}

    def _targets(self, block: str, version: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the block's state, by state name; optimizer state from version 1 on."""
        for (owner, name), frozen in self._frozen.items():
            if owner == block:
                yield PARAMETER + name, frozen.detach()
        for (owner, name), trained in self._trained.items():
            if owner != block:
                continue
            yield PARAMETER + name, trained.vector.parameter_view(trained.slot)
            if version > 0:
                for kind in trained.vector.kinds(trained.slot):
                    yield f"{kind}:{name}", trained.vector.state_view(kind, trained.slot)

    # ---------------------------------------------------------------- steps

    def zero_gradients(self) -> None:
        for vector in self.vectors.values():
            vector.gradient.zero_()

    def apply_step(self, step: int, learning_rate: float, clip_factor: float) -> None:
        """One optimizer step on every vector; the accumulators are zero afterwards and the version is `step
        + 1`.
        """
        for vector in self.vectors.values():
            self.optimizer.step(vector, number=step + 1, learning_rate=learning_rate, clip_factor=clip_factor)
        self.zero_gradients()
        self.version = step + 1
        self.optimizer_steps = dict.fromkeys(self.optimizer_steps, self.version)

    def step_stage(self, stage: int, number: int, learning_rate: float, clip_factor: float) -> None:
        """One optimizer step of one stage, where each counts its own; its accumulators are zero afterwards."""
        vector = self.vectors[stage_group(stage)]
        self.optimizer.step(vector, number=number, learning_rate=learning_rate, clip_factor=clip_factor)
        vector.gradient.zero_()
        self.optimizer_steps[stage] = number


def _ordered(module: StageModule, block_order: Iterable[str]) -> Iterator[tuple[str, str, Tensor]]:
    """(block, name, tensor) of every tensor in (block order, name) order: the same on every worker."""
    tensors = module.block_tensors()
    for block in block_order:
        for name in sorted(tensors.get(block, {})):
            yield block, name, tensors[block][name]


def _to_tensor(name: str, raw: Tensorlike, target: Tensor) -> Tensor:
    """A view of the bytes, checked against where they shall go."""
    dtype = TYPES.get(raw.data_type)
    if tuple(raw.shape) != tuple(target.shape) or dtype is not target.dtype:
        raise EngineFault(
            f"{name} came as {raw.data_type} of shape {tuple(raw.shape)}, "
            f"expected {target.dtype} of shape {tuple(target.shape)}"
        )
    if raw.data.nbytes == 0:
        return torch.empty(target.shape, dtype=dtype)
    # frombuffer warns about memory that it may not write.
    data = memoryview(bytearray(raw.data)) if raw.data.readonly else raw.data
    return torch.frombuffer(data, dtype=dtype).view(target.shape)
