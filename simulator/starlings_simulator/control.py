"""A control stream:

ordered both ways, and when it breaks, what was under way is lost and both ends hear of it.
"""

from __future__ import annotations

from typing import Protocol

from starlings_protos.messages import Hello, ToCoordinator, ToWorker, WorkerId
from starlings_simulator.network import Network, Process
from starlings_simulator.world import World


class CoordinatorEnd(Protocol):
    @property
    def process(self) -> Process: ...

    def connected(self, stream: ControlStream, hello: Hello) -> None: ...

    def said(self, stream: ControlStream, message: ToCoordinator) -> None: ...

    def disconnected(self, stream: ControlStream) -> None: ...


class WorkerEnd(Protocol):
    @property
    def process(self) -> Process: ...

    def heard(self, stream: ControlStream, message: ToWorker) -> None: ...

    def lost(self, stream: ControlStream) -> None: ...


class ControlStream:
    """`up` and `down` deliver in order after a delay; `break_off` ends it, and both ends hear of it later."""

    def __init__(
        self,
        world: World,
        network: Network,
        worker_id: WorkerId,
        worker: WorkerEnd,
        coordinator: CoordinatorEnd,
        session: int,
    ) -> None:
        self._world = world
        self._network = network
        self.worker_id = worker_id
        self._worker = worker
        self._coordinator = coordinator
        self.session = session
        self.open = True
        self._up_at_s = 0.0
        self._down_at_s = 0.0

    def begin(self, hello: Hello) -> None:
        self._up_at_s = self._world.now_s + self._network.delay_s()
        self._world.clock.at(
            self._up_at_s,
            lambda: self._coordinator.process.deliver(
                lambda: self._coordinator.connected(self, hello) if self.open else None
            ),
        )

    def up(self, message: ToCoordinator) -> None:
        if not self.open:
            return
        self._up_at_s = max(self._up_at_s, self._world.now_s + self._network.delay_s())
        self._world.clock.at(
            self._up_at_s,
            lambda: self._coordinator.process.deliver(
                lambda: self._coordinator.said(self, message) if self.open else None
            ),
        )

    def down(self, message: ToWorker) -> None:
        if not self.open:
            return
        self._down_at_s = max(self._down_at_s, self._world.now_s + self._network.delay_s())
        self._world.clock.at(
            self._down_at_s,
            lambda: self._worker.process.deliver(
                lambda: self._worker.heard(self, message) if self.open else None
            ),
        )

    def close(self) -> None:
        """By the coordinator, in order: what it sent before still arrives."""
        at_s = max(self._down_at_s, self._world.now_s) + self._network.delay_s()
        self._world.clock.at(at_s, self.break_off)

    def break_off(self) -> None:
        if not self.open:
            return
        self.open = False
        clock, coordinator, worker = self._world.clock, self._coordinator, self._worker
        clock.after(
            self._network.delay_s() * 3,
            lambda: coordinator.process.deliver(lambda: coordinator.disconnected(self)),
        )
        clock.after(self._network.delay_s() * 3, lambda: worker.process.deliver(lambda: worker.lost(self)))
