"""Steps of single stages, each with its own gradient: `async`. On the compute thread."""

from __future__ import annotations

import math

import torch

from starlings_worker.core.effects import StepStages
from starlings_worker.core.events import StagesStepped
from starlings_worker.stage import HeldSpan, stage_group


def step_stages(span: HeldSpan, effect: StepStages) -> StagesStepped:
    """Clips and steps each stage; one whose gradient is not finite drops it and stays as it is.

    The factor for a norm n and a limit l is min(1, l / (n + 1e-6)), as in `sync`.
    """
    stages = tuple(step.stage for step in effect.stages)
    norms = tuple(
        float(torch.linalg.vector_norm(span.vectors[stage_group(stage)].gradient, dtype=torch.float64).item())
        for stage in stages
    )
    joint = math.sqrt(math.fsum(norm * norm for norm in norms))
    for step, norm in zip(effect.stages, norms, strict=True):
        if not math.isfinite(norm):
            span.vectors[stage_group(step.stage)].gradient.zero_()
            continue
        limit, of = (
            (effect.joint_clip_limit, joint) if effect.joint_clip_limit > 0 else (step.clip_limit, norm)
        )
        factor = min(1.0, limit / (of + 1e-6)) if limit > 0 else 1.0
        span.step_stage(step.stage, step.number, effect.learning_rate, factor)
    return StagesStepped(stages, norms)
