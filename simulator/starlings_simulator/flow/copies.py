"""When everybody has its copy, of all who draw on one link at once. Pure."""

from __future__ import annotations

import numpy as np

from starlings_coordinator.planner.linear.problem import Floats

# Steps in which the last bytes of many are counted together.
STEPS = 400


def finish_s(sizes: Floats, caps: Floats, rate: float) -> Floats:
    """Seconds until each has its `sizes` bytes: all have equal parts of `rate`, but no more than their own `caps`
    (water filling)."""
    left, done = sizes.astype(float).copy(), np.zeros(len(sizes))
    waiting = np.arange(len(sizes))
    now_s = 0.0
    while len(waiting):
        speed = _levels(caps[waiting], rate)
        need = left[waiting] / speed
        # Whoever is done within the shortest, and many at a time where there are many.
        step_s = float(np.partition(need, k)[k]) if (k := len(waiting) // STEPS) else float(need.min())
        now_s += step_s
        over = need <= step_s * (1 + 1e-9)
        done[waiting[over]] = now_s
        left[waiting] = np.maximum(0.0, left[waiting] - speed * step_s)
        waiting = waiting[~over]
    return done


def _levels(caps: Floats, rate: float) -> Floats:
    if not np.isfinite(rate) or caps.sum() <= rate:
        return np.where(np.isfinite(caps), caps, 1e15)
    ranked = np.sort(caps)
    below = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
    level = (rate - below) / np.arange(len(caps), 0, -1)
    return np.asarray(np.minimum(caps, level[np.flatnonzero(ranked >= level)[0]]))
