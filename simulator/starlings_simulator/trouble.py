"""The hand that lets faults happen to a simulated swarm, and takes them away again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

from starlings_coordinator.core.records import PlanAdopted, StepRecorded
from starlings_protos.messages import WorkerId
from starlings_simulator.coordinator import Coordinator
from starlings_simulator.faults import HARMLESS, Fault, FaultKind, Moment
from starlings_simulator.host import Host
from starlings_simulator.keeper import SimulatedKeeper
from starlings_simulator.network import Network
from starlings_simulator.world import World

MONTH_S = 30 * 86_400.0
# A stalled connection is given up after this much silence, by either end on its own.
KEEPALIVE_S = (4.0, 12.0)
LEAVING_WITHIN_S = 20.0


class Trouble:
    def __init__(
        self,
        world: World,
        network: Network,
        keeper: SimulatedKeeper,
        hosts: Mapping[WorkerId, Host],
        coordinator: Callable[[], Coordinator],
        rng: random.Random,
    ) -> None:
        self._world = world
        self._network = network
        self._keeper = keeper
        self._hosts = hosts
        self._coordinator_of = coordinator
        self._rng = rng
        # Faults that lie in wait for a moment.
        self._armed: list[Fault] = []
        self._slow = 0
        self._full = 0
        # When everything that has happened so far is over.
        self.healed_at_s = 0.0
        self.struck = 0
        world.on_moment = self._reached

    @property
    def _coordinator(self) -> Coordinator:
        return self._coordinator_of()

    def plan(self, fault: Fault) -> None:
        call = (lambda: self.strike(fault)) if fault.moment is None else (lambda: self._armed.append(fault))
        self._world.clock.at(fault.at_s, call)

    def _reached(self, moment: Moment, worker_id: WorkerId | None) -> None:
        """At most one fault per moment; those of workers strike a little later, in the middle of what goes on."""
        fault = next((fault for fault in self._armed if fault.moment is moment), None)
        if fault is None:
            return
        self._armed.remove(fault)
        if worker_id is None:
            self._note("coordinator", fault)
            kind = StepRecorded if moment is Moment.COMMIT_WRITTEN else PlanAdopted
            self._coordinator.crash_after(kind)
            self._later(2.0 + fault.duration_s, self._start_coordinator)
            return
        hit = replace(fault, worker_id=worker_id)
        self._world.clock.after(self._rng.uniform(0.0, 0.03), lambda: self.strike(hit))

    # ------------------------------------------------------------------ one fault

    def strike(self, fault: Fault) -> None:
        host = self._hosts[fault.worker_id]
        self._note(fault.worker_id, fault)
        self._harm(fault)
        match fault.kind:
            case FaultKind.KILL:
                host.kill()
                self._later(fault.duration_s, host.start)
            case FaultKind.KILL_FOR_GOOD:
                host.kill()
            case FaultKind.KILL_ENGINE:
                host.kill_engine("simulated crash")
            case FaultKind.FREEZE:
                self._freeze(host, fault.duration_s)
            case FaultKind.CUT_CONTROL:
                self._cut([(fault.worker_id, "coordinator")], fault.duration_s)
                if host.stream is not None:
                    host.stream.break_off()
            case FaultKind.CUT_PEERS:
                others = [other for other in self._hosts if other != fault.worker_id]
                self._cut([(fault.worker_id, other) for other in others], fault.duration_s)
            case FaultKind.PARTITION:
                self._part(fault)
            case FaultKind.DRAIN:
                host.drain(LEAVING_WITHIN_S)
            case FaultKind.LEAVE:
                host.drain(LEAVING_WITHIN_S)
                self._later(fault.duration_s, lambda: self._back(host))
            case FaultKind.CRASH_COORDINATOR:
                self._coordinator.crash()
                self._later(2.0 + fault.duration_s, self._start_coordinator)
            case FaultKind.FREEZE_COORDINATOR:
                process = self._coordinator.process
                process.freeze()
                self._later(fault.duration_s, process.thaw)
            case FaultKind.RESTART_EVERYTHING:
                self._restart_everything(fault.duration_s)
            case FaultKind.SLOW:
                self._slow_down(+1)
                self._later(fault.duration_s, lambda: self._slow_down(-1))
            case FaultKind.DISK_FULL:
                self._fill_disk(+1)
                self._later(fault.duration_s, lambda: self._fill_disk(-1))
            case FaultKind.WALL_JUMP:
                self._jump(fault.worker_id)

    def _harm(self, fault: Fault) -> None:
        """From the beginning of a fault until it has healed, those whom it hits may be taken for lost."""
        if fault.kind in HARMLESS and fault.kind is not FaultKind.SLOW:
            return
        everybody = (FaultKind.SLOW, FaultKind.RESTART_EVERYTHING, FaultKind.FREEZE_COORDINATOR)
        hit = tuple(self._hosts) if fault.kind in everybody else (fault.worker_id, *fault.side)
        self._world.harm(*hit, for_s=fault.duration_s)

    def _note(self, actor: str, fault: Fault) -> None:
        self.struck += 1
        self._world.note(actor, "!!", fault.words())

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.healed_at_s = max(self.healed_at_s, self._world.now_s + delay_s)
        self._world.clock.after(delay_s, call)

    def _freeze(self, host: Host, duration_s: float) -> None:
        if host.running and not host.process.frozen:
            host.freeze()
            frozen = host.process
            self._later(duration_s, lambda: host.thaw() if host.process is frozen else None)

    def _cut(self, pairs: list[tuple[str, str]], duration_s: float) -> None:
        self._network.cut(pairs)
        self._later(duration_s, lambda: self._network.mend(pairs))

    def _part(self, fault: Fault) -> None:
        far = list(fault.side)
        near = ["coordinator", *[worker_id for worker_id in self._hosts if worker_id not in far]]
        pairs = list(product(far, near))
        self._network.cut(pairs)
        stalled = [stream for worker_id in far if (stream := self._hosts[worker_id].stream) is not None]
        for stream in stalled:
            stream.stall((self._rng.uniform(*KEEPALIVE_S), self._rng.uniform(*KEEPALIVE_S)))

        def heal() -> None:
            self._world.note("network", "!!", "is whole again")
            self._network.mend(pairs)
            for stream in stalled:
                stream.heal()

        self._later(fault.duration_s, heal)

    def _back(self, host: Host) -> None:
        """As soon as it has left; that is bounded, or the job says why it waits."""
        if not host.come_back():
            self._world.clock.after(1.0, lambda: self._back(host))

    def _start_coordinator(self) -> None:
        if not self._coordinator.process.alive:
            self._coordinator.start()

    def _restart_everything(self, duration_s: float) -> None:
        self._coordinator.crash_now()
        for host in self._hosts.values():
            was_running = host.running
            host.kill()
            if was_running:
                self._later(duration_s + self._rng.uniform(0.0, 3.0), host.start)
        self._later(duration_s, self._start_coordinator)

    def _slow_down(self, change: int) -> None:
        self._slow += change
        self._network.slowness = 10.0 if self._slow else 1.0

    def _fill_disk(self, change: int) -> None:
        self._full += change
        self._keeper.full = self._full > 0

    def _jump(self, worker_id: WorkerId) -> None:
        """On either side, in either direction."""
        offset_s = self._rng.choice([-MONTH_S, MONTH_S])
        if self._rng.random() < 0.5:
            self._coordinator.wall_offset_s += offset_s
        else:
            self._hosts[worker_id].wall_offset_s += offset_s
