"""What one undisturbed machine would have, in symbols: the state of each block at each version.

A disturbed swarm must have the very same, whatever was killed, cut or begun anew on the way: the same samples in each
step's gradient, in whatever order they were summed and in whichever attempt, the same rate and the same clip factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from starlings_simulator.symbolic import next_state, squared_norm, whole_gradient


class Reference:
    """`rate(step)`: the schedule's learning rate; `clip`: the job's limit on the gradient norm, 0 for none."""

    def __init__(
        self,
        names: Sequence[str],
        microbatches: int,
        rate: Callable[[int], float],
        clip: float,
        numeric_class: str,
        *,
        tied: bool,
    ) -> None:
        self._microbatches = microbatches
        self._rate = rate
        self._clip = clip
        self._class = numeric_class
        self._tied = tied
        self._versions: list[dict[int, str]] = [
            {block: f"initial:{name}" for block, name in enumerate(names)}
        ]

    def state(self, version: int, block: int) -> str:
        while len(self._versions) <= version:
            self._versions.append(self._step(len(self._versions) - 1))
        return self._versions[version][block]

    def _step(self, step: int) -> dict[int, str]:
        old = self._versions[step]
        norm = math.sqrt(squared_norm(step, old, tied=self._tied))
        clip = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        gradient = whole_gradient(self._microbatches)
        rate = self._rate(step)
        return {block: next_state(old[block], gradient, rate, clip, self._class) for block in old}
