"""Tokens per second, of the job and of each worker, over a sliding window of committed steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from starlings_protos.messages import WorkerId

WINDOW_STEPS = 16


class Rates:
    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, dict[WorkerId, int]]] = deque(maxlen=WINDOW_STEPS + 1)

    def start(self, now_s: float) -> None:
        """Training begins (again): what was before says nothing about the rate."""
        self._steps.clear()
        self._steps.append((now_s, 0, {}))

    def step(self, now_s: float, tokens: int, credits: Iterable[tuple[WorkerId, int]]) -> None:
        self._steps.append((now_s, tokens, dict(credits)))

    def _seconds(self) -> float:
        return self._steps[-1][0] - self._steps[0][0] if len(self._steps) > 1 else 0.0

    def tokens_per_s(self) -> float:
        seconds = self._seconds()
        return sum(tokens for _, tokens, _ in list(self._steps)[1:]) / seconds if seconds > 0 else 0.0

    def worker_tokens_per_s(self, worker_id: WorkerId) -> float:
        seconds = self._seconds()
        if seconds <= 0:
            return 0.0
        return sum(by_worker.get(worker_id, 0) for _, _, by_worker in list(self._steps)[1:]) / seconds
