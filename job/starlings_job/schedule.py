"""The learning rate of each step: linear warm-up, then half a cosine. Pure."""

from __future__ import annotations

import math
from typing import Protocol


class ScheduleSettings(Protocol):
    """The part of `[train]` that the learning rate depends on."""

    @property
    def lr(self) -> float: ...
    @property
    def lr_end(self) -> float: ...
    @property
    def decay(self) -> str: ...
    @property
    def warmup(self) -> float: ...


def warmup_steps(train: ScheduleSettings, steps_total: int) -> int:
    """`warmup` as steps: a number below 1 is a fraction of all steps. Warm-up never exceeds the job."""
    steps = round(train.warmup * steps_total) if train.warmup < 1 else int(train.warmup)
    return min(steps, steps_total)


def learning_rate(train: ScheduleSettings, step: float, steps_total: int) -> float:
    """The rate for optimizer step `step` (the first is 0; between two steps where nothing joins those of replicas).

    Warm-up rises to `lr` in equal parts, none of them zero; the cosine ends at `lr * lr_end` after the last.
    """
    warm = warmup_steps(train, steps_total)
    if step < warm:
        return train.lr * (step + 1) / warm
    if train.decay == "none":
        return train.lr
    progress = min(1.0, (step - warm) / max(1, steps_total - warm))
    return train.lr * (train.lr_end + (1.0 - train.lr_end) * 0.5 * (1.0 + math.cos(math.pi * progress)))
