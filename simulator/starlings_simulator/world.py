"""What all simulated parts share: the clock, the transcript, the checker, and where state comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlings_protos.messages import WorkerId
from starlings_simulator.checker import Checker
from starlings_simulator.clock import Clock
from starlings_simulator.faults import Moment
from starlings_simulator.transcript import Transcript
from starlings_worker.core.core import WorkerCore

if TYPE_CHECKING:
    from starlings_simulator.donations import Donations


@dataclass(slots=True)
class World:
    """`donations` is set once there are hosts."""

    block_names: tuple[str, ...]
    count_targets: Callable[[Sequence[int]], int]
    make_worker_core: Callable[[WorkerId, int], WorkerCore]
    checker: Checker
    donations: Donations = field(init=False)
    clock: Clock = field(default_factory=Clock)
    transcript: Transcript = field(default_factory=Transcript)
    events: int = 0
    harmed_until_s: dict[WorkerId, float] = field(default_factory=dict)
    # Told of every moment that a fault could be waiting for; `worker_id` is None for the coordinator's own.
    on_moment: Callable[[Moment, WorkerId | None], None] | None = None

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def note(self, actor: str, mark: str, what: object) -> None:
        self.transcript.add(self.clock.now_s, actor, mark, what)

    def reached(self, moment: Moment, worker_id: WorkerId | None) -> None:
        if self.on_moment is not None:
            self.on_moment(moment, worker_id)

    def harm(self, *worker_ids: WorkerId, for_s: float = 0.0) -> None:
        """Something that may cost them their place happens now, and is over after `for_s`."""
        for worker_id in worker_ids:
            until_s = self.clock.now_s + for_s
            self.harmed_until_s[worker_id] = max(self.harmed_until_s.get(worker_id, 0.0), until_s)

    def harmed(self, worker_id: WorkerId, since_s: float, recovery_s: float = 0.0) -> bool:
        """Whether something happened to it since then; it counts as happening for a while longer than it lasts."""
        return self.harmed_until_s.get(worker_id, -1.0) + recovery_s >= since_s

    def happened(self) -> None:
        self.events += 1
