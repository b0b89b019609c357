"""A control stream:

ordered both ways, and when it breaks, what was under way is lost and both ends hear of it.
"""

from __future__ import annotations

from typing import Protocol

from starlings_protos.messages import Hello, ToCoordinator, ToWorker, WorkerId
from starlings_simulator.clock import Call
from starlings_simulator.network import Network, Process
from starlings_simulator.world import World


class CoordinatorEnd(Protocol):
    @property
    def process(self) -> Process: ...

    def dialled(self, stream: ControlStream) -> None: ...

    def connected(self, stream: ControlStream, hello: Hello) -> None: ...

    def said(self, stream: ControlStream, message: ToCoordinator) -> None: ...

    def disconnected(self, stream: ControlStream) -> None: ...


class WorkerEnd(Protocol):
    @property
    def process(self) -> Process: ...

    def heard(self, stream: ControlStream, message: ToWorker) -> None: ...

    def lost(self, stream: ControlStream) -> None: ...


class ControlStream:
    """`up` and `down` deliver in order after a delay.

    `break_off` ends it, and both ends hear of it later. While the network is stalled between the ends (a partition)
    nothing arrives: what was said waits in the senders' buffers, until either end has missed its keepalive.
    """

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
        # What arrives when the network works again; None while it does.
        self._stalled_up: list[Call] | None = None
        self._stalled_down: list[Call] | None = None
        self._worker_knows = False
        self._coordinator_knows = False

    def begin(self, hello: Hello) -> None:
        self._coordinator.dialled(self)
        self._send_up(lambda: self._coordinator.connected(self, hello))

    def up(self, message: ToCoordinator) -> None:
        if self.open and not self._worker_knows:
            self._send_up(lambda: self._coordinator.said(self, message))

    def down(self, message: ToWorker) -> None:
        if self.open and not self._coordinator_knows:
            self._send_down(lambda: self._worker.heard(self, message))

    def _send_up(self, call: Call) -> None:
        self._up_at_s = max(self._up_at_s, self._world.now_s + self._network.delay_s())
        self._world.clock.at(self._up_at_s, lambda: self._arrive_up(call))

    def _send_down(self, call: Call) -> None:
        self._down_at_s = max(self._down_at_s, self._world.now_s + self._network.delay_s())
        self._world.clock.at(self._down_at_s, lambda: self._arrive_down(call))

    def _arrive_up(self, call: Call) -> None:
        if self._stalled_up is not None:
            self._stalled_up.append(call)
        else:
            heard = lambda: call() if self.open and not self._coordinator_knows else None  # noqa: E731
            self._coordinator.process.deliver(heard)

    def _arrive_down(self, call: Call) -> None:
        if self._stalled_down is not None:
            self._stalled_down.append(call)
        else:
            heard = lambda: call() if self.open and not self._worker_knows else None  # noqa: E731
            self._worker.process.deliver(heard)

    # ------------------------------------------------------------------ partitions

    def stall(self, keepalive_s: tuple[float, float]) -> None:
        """Nothing arrives until `heal`; each end gives up by itself after its own seconds of silence."""
        if self._stalled_up is not None:
            return
        self._stalled_up, self._stalled_down = [], []
        up_s, down_s = keepalive_s
        self._world.clock.after(up_s, lambda: self._miss_keepalive(self._tell_coordinator))
        self._world.clock.after(down_s, lambda: self._miss_keepalive(self._tell_worker))

    def _miss_keepalive(self, tell: Call) -> None:
        if self._stalled_up is not None:
            tell()

    def heal(self) -> None:
        """What waited arrives at last, in order: perhaps after what a newer stream brings."""
        if self._stalled_up is not None:
            self._world.clock.after(self._network.delay_s() * 60, self._flow_again)

    def _flow_again(self) -> None:
        up, self._stalled_up = self._stalled_up or [], None
        down, self._stalled_down = self._stalled_down or [], None
        for call in up:
            self._arrive_up(call)
        for call in down:
            self._arrive_down(call)
        if not self.open or self._worker_knows or self._coordinator_knows:
            # A reset answers whatever the other end still says.
            self.open = True
            self.break_off()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """By the coordinator, in order: what it sent before still arrives."""
        self._world.clock.after(self._network.delay_s(), self._tell_coordinator)
        # Not as `down` does: by then the coordinator's end is closed.
        self._down_at_s = max(self._down_at_s, self._world.now_s) + self._network.delay_s()
        self._world.clock.at(self._down_at_s, self._arrive_end)

    def _arrive_end(self) -> None:
        if self._stalled_down is not None:
            self._stalled_down.append(self.break_off)
        else:
            self.break_off()

    def break_off(self) -> None:
        if not self.open:
            return
        self.open = False
        for tell in (self._tell_coordinator, self._tell_worker):
            self._world.clock.after(self._network.delay_s() * 3, lambda tell=tell: self._unless_stalled(tell))  # type: ignore[misc]

    def _unless_stalled(self, tell: Call) -> None:
        if self._stalled_up is None:
            tell()

    def _tell_coordinator(self) -> None:
        if not self._coordinator_knows:
            self._coordinator_knows = True
            self._coordinator.process.deliver(lambda: self._coordinator.disconnected(self))

    def _tell_worker(self) -> None:
        if not self._worker_knows:
            self._worker_knows = True
            self._worker.process.deliver(lambda: self._worker.lost(self))
