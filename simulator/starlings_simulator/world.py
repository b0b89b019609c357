"""What all simulated parts share: the clock, the transcript, the checker, and where state comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlings_protos.messages import Assignment, WorkerId
from starlings_simulator.checker import Checker
from starlings_simulator.clock import Clock
from starlings_simulator.symbolic import Piece
from starlings_simulator.transcript import Transcript
from starlings_worker.core.core import WorkerCore


@dataclass(slots=True)
class World:
    """`fetch(assignment, worker)` gives the states of the span's blocks, or None when no donor answers."""

    block_names: tuple[str, ...]
    count_targets: Callable[[Sequence[int]], int]
    make_worker_core: Callable[[WorkerId, int], WorkerCore]
    fetch: Callable[[Assignment, WorkerId], dict[int, str] | None]
    checker: Checker
    # (donor, step, group) -> what that group exchanged then, if the donor can be reached and keeps it.
    fetch_update: Callable[[WorkerId, int, str], Piece | None] = lambda *_: None
    clock: Clock = field(default_factory=Clock)
    transcript: Transcript = field(default_factory=Transcript)
    events: int = 0

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def note(self, actor: str, mark: str, what: object) -> None:
        self.transcript.add(self.clock.now_s, actor, mark, what)

    def happened(self) -> None:
        self.events += 1
