"""Where everybody's seconds went, for very many: one row of numbers each, settled when something changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from starlings_coordinator.planner.linear.problem import Floats, Ints
from starlings_protos.messages import Span, WorkerId
from starlings_simulator.clock import Clock
from starlings_simulator.timed.figures import CAUSES, COMPUTE, PIPELINE, Point
from starlings_simulator.timed.report import Report, WorkerReport

_AWAY = -1


class Accounts:
    """A worker that is there is in exactly one of `CAUSES`; a holder waits (`PIPELINE`) but for what `worked` says."""

    def __init__(self, clock: Clock, workers: Sequence[WorkerId]) -> None:
        self.clock = clock
        self.workers = workers
        self.number = {worker_id: n for n, worker_id in enumerate(workers)}
        self.tokens = 0.0
        self.tokens_of: Floats = np.zeros(len(workers))
        self.repeated = 0.0
        self.sent: Counter[str] = Counter()
        self.points: list[Point] = []
        self.events: list[tuple[float, str, str]] = []
        self._seconds: Floats = np.zeros((len(workers), len(CAUSES)))
        self._cause: Ints = np.full(len(workers), _AWAY)
        self._since_s: Floats = np.zeros(len(workers))

    def is_there(self, worker_id: WorkerId) -> bool:
        return bool(self._cause[self.number[worker_id]] != _AWAY)

    @property
    def present(self) -> int:
        return int((self._cause != _AWAY).sum())

    def begin(self, worker_id: WorkerId, cause: str) -> None:
        number = self.number[worker_id]
        self._settle(number)
        self._cause[number] = CAUSES.index(cause)

    def gone(self, worker_id: WorkerId) -> None:
        number = self.number[worker_id]
        self._settle(number)
        self._cause[number] = _AWAY

    def worked(self, numbers: Ints, seconds: Floats, tokens: Floats) -> None:
        """Of holders: seconds of work since the last time, and what they began and finished."""
        self._seconds[numbers, CAUSES.index(COMPUTE)] += seconds
        self._seconds[numbers, CAUSES.index(PIPELINE)] -= seconds
        self.tokens_of[numbers] += tokens

    def note(self, kind: str, text: str) -> None:
        self.events.append((self.clock.now_s, kind, text))

    def point(self, holders: int) -> None:
        self.points.append(Point(self.clock.now_s, round(self.tokens), self.present, holders))

    def _settle(self, number: int) -> None:
        cause = self._cause[number]
        if cause != _AWAY:
            self._seconds[number, cause] += self.clock.now_s - self._since_s[number]
        self._since_s[number] = self.clock.now_s

    def report(self, spans: Mapping[WorkerId, Span], plans: int, *, ended: str, training: bool) -> Report:
        for number in range(len(self.workers)):
            self._settle(number)
        now_s = self.clock.now_s
        begun = next((point for point in self.points if point.tokens > 0), None)
        begun_s, begun_tokens = (begun.at_s, begun.tokens) if begun is not None else (now_s, 0)
        workers = []
        for number, worker_id in enumerate(self.workers):
            spent = {cause: float(s) for cause, s in zip(CAUSES, self._seconds[number], strict=True)}
            span = spans.get(worker_id)
            held = "" if span is None else f"{span.first_stage}-{span.last_stage}"
            tokens = round(float(self.tokens_of[number]))
            workers.append(WorkerReport(worker_id, held, sum(spent.values()), spent, tokens))
        total = dict(zip(CAUSES, self._seconds.sum(axis=0).tolist(), strict=True))
        whole_s = sum(total.values())
        return Report(
            phase="done" if ended else "training" if training else "waiting",
            ended=ended,
            virtual_s=now_s,
            tokens=round(self.tokens),
            tokens_per_s=self.tokens / now_s if now_s > 0 else 0.0,
            tokens_per_s_training=(self.tokens - begun_tokens) / (now_s - begun_s)
            if now_s > begun_s
            else 0.0,
            samples_repeated=round(self.repeated),
            samples_unmerged=0,
            utilisation=total[COMPUTE] / whole_s if whole_s > 0 else 0.0,
            seconds=total,
            sent_bytes={kind: round(sent) for kind, sent in sorted(self.sent.items())},
            plans=plans,
            events=tuple(self.events),
            points=tuple(self.points),
            workers=tuple(workers),
        )
