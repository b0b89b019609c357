"""How many bytes a stage needs on a device: shared by planner, probe and emulation, so that all agree.

The terms are those of the design's section 5. Bytes per trained parameter:

    4 weights + 4 gradients + optimizer (AdamW and NAdam 8, Muon 4, SGD with momentum 4, 8-bit AdamW 2.03, SGD 0)
    + 4 optimizer temporaries + 8 error feedback (lossy exchange) + 2 autocast copy + 4 per extra version
    + 8 starting point and outer momentum (NoLoCo, gossip 12), per fragment two payloads decoded (exchanges in pairs)
    + 12 starting point, residual and outer momentum, and per fragment 12 (exchanges in groups)

and per frozen parameter 4 (+ 2). Per microbatch in flight: the stage's input and its activations; with
`recompute` the input alone, and one stage's activations once. The last stage adds the logits, their softmax
and their gradient in float32, once, because it goes backward at once. Then the device's own context, then
10 %. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlings_job.codecs import keeps_residual
from starlings_job.exchange_rules import ExchangeRules
from starlings_job.optimizers import OptimizerName, state_bytes_per_parameter
from starlings_job.profile import Profile

HEADROOM = 0.10
# What CUDA or ROCm and its libraries take on a device before anything is allocated.
GPU_CONTEXT_BYTES = 768 << 20
_FLOAT_BYTES = 4


class OptimizerSettings(Protocol):
    """The part of `[train]` that memory depends on."""

    @property
    def optimizer(self) -> OptimizerName: ...
    @property
    def momentum(self) -> float: ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A stage's need in bytes, by cause; `total` includes the headroom."""

    weights: int
    # Gradients, optimizer state and its temporaries, error feedback, copies.
    training: int
    # Inputs and activations of all microbatches in flight.
    activations: int
    # Logits, softmax and their gradient; 0 except in the last stage.
    loss: int
    context: int

    @property
    def total(self) -> int:
        plain = self.weights + self.training + self.activations + self.loss + self.context
        return int(plain * (1 + HEADROOM))


def bytes_per_parameter(
    train: OptimizerSettings,
    exchange_codec: str = "exact",
    *,
    pair_rules: ExchangeRules | None = None,
    autocast: bool = False,
    extra_versions: int = 0,
) -> float:
    """Bytes that a trained parameter takes, weights included.

    Args:
        exchange_codec: of sums of gradients; lossy ones keep what they dropped, twice until a step has committed.
        pair_rules: of replicas that exchange in pairs, and then there are no such sums.
        autocast: forward and backward in bfloat16 beside float32 master weights.
        extra_versions: further copies of the weights, such as a snapshot that is being served.
    """
    optimizer = state_bytes_per_parameter(train.optimizer, train.momentum)
    exchange = 8.0 if pair_rules is None and keeps_residual(exchange_codec) else 0.0
    if pair_rules is not None:
        travelling = 1 if pair_rules.momentum_codec is None else 2
        # NoLoCo sends neither of them, but a third vector.
        # Quasi-global momentum remembers where the weights were.
        third = pair_rules.preset == "noloco" or (
            pair_rules.preset == "gossip" and pair_rules.quasi_global != "none"
        )
        kept = 12 if third else 8
        exchange = kept + 2 * 4 * travelling / pair_rules.fragments
        if pair_rules.topology == "all":
            # Starting point, residual, and where there is one, momentum; per fragment what is sent, decoded, came back.
            exchange = (12 if pair_rules.main.outer_momentum > 0 else 8) + 3 * 4 / pair_rules.fragments
    return 4 + 4 + optimizer + 4 + exchange + (2 if autocast else 0) + 4 * extra_versions


def stage_memory(
    profile: Profile,
    first_block: int,
    last_block: int,
    *,
    per_parameter: float,
    microbatch: int,
    slots: int,
    recompute: bool = False,
    context_bytes: int = 0,
) -> MemoryUse:
    """What a holder of blocks first..last needs (a stage, or the blocks of a whole span).

    Args:
        per_parameter: `bytes_per_parameter`.
        microbatch: samples per microbatch.
        slots: microbatches held at once, at least 1.
        context_bytes: the device's own context; GPU_CONTEXT_BYTES on a GPU.
    """
    blocks = profile.blocks[first_block : last_block + 1]
    parameters = sum(block.parameter_count for block in blocks)
    trained = sum(block.trainable_count for block in blocks)
    entry = (
        profile.record_bytes
        if first_block == 0
        else profile.blocks[first_block - 1].boundary_bytes_per_sample
    )
    kept = sum(block.activation_bytes_per_sample for block in blocks)
    # The output waits until it is sent on, and comes back as a gradient of the same size.
    leaving = blocks[-1].boundary_bytes_per_sample if last_block + 1 < len(profile.blocks) else 0
    per_microbatch = (entry + leaving + (0 if recompute else kept)) * microbatch
    activations = per_microbatch * max(1, slots) + (kept * microbatch if recompute else 0)
    loss = 0
    if last_block + 1 == len(profile.blocks):
        rows = profile.sequence_length * microbatch
        loss = 3 * rows * profile.vocabulary_size * _FLOAT_BYTES
    return MemoryUse(
        weights=_FLOAT_BYTES * parameters,
        training=int((per_parameter - _FLOAT_BYTES) * trained),
        activations=activations,
        loss=loss,
        context=context_bytes,
    )


def slots_that_fit(
    profile: Profile,
    first_block: int,
    last_block: int,
    *,
    per_parameter: float,
    microbatch: int,
    memory_bytes: int,
    slots_wanted: int,
    recompute: bool = False,
    context_bytes: int = 0,
) -> int:
    """The most microbatches, up to `slots_wanted`, that fit beside the stage; 0 when not even one does."""

    def need(slots: int) -> int:
        return stage_memory(
            profile,
            first_block,
            last_block,
            per_parameter=per_parameter,
            microbatch=microbatch,
            slots=slots,
            recompute=recompute,
            context_bytes=context_bytes,
        ).total

    if need(1) > memory_bytes:
        return 0
    each = max(1, need(2) - need(1))
    slots = max(1, min(slots_wanted, 1 + (memory_bytes - need(1)) // each))
    # The headroom is rounded, so the division can be one off.
    while slots < slots_wanted and need(slots + 1) <= memory_bytes:
        slots += 1
    while slots > 1 and need(slots) > memory_bytes:
        slots -= 1
    return slots
