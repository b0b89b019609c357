"""Builds a swarm from a scenario, lets faults happen, and runs it until the job ends, waits with a reason, or
hangs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlings_coordinator.core.effects import SaveCheckpoint
from starlings_protos.messages import KEEPER, Assignment, PlanReply, PlanRequest, WorkerId
from starlings_simulator.checker import Checker
from starlings_simulator.coordinator import Coordinator, CoordinatorCore
from starlings_simulator.engine import EngineSpec
from starlings_simulator.host import Host, HostSpec
from starlings_simulator.network import Conditions, Network
from starlings_simulator.plans import draw_plan
from starlings_simulator.scenario import Fault, FaultKind, Scenario
from starlings_simulator.symbolic import Device, Piece, require
from starlings_simulator.transcript import Transcript
from starlings_simulator.world import World
from starlings_worker.core.core import WorkerCore

TARGETS_PER_SAMPLE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: "done", "failed" or "waiting" (with the reason), or "hung"."""

    seed: int
    verdict: str
    reason: str
    phase: str
    highest_version: int
    ended_at_s: float
    events: int
    steps_applied: int
    restarts: int
    rewinds: int
    broken_transfers: int
    transcript: Transcript


class Violation(AssertionError):
    """An invariant broke; says with which seed to see it again, and what came before."""

    def __init__(self, seed: int, cause: BaseException, transcript: Transcript) -> None:
        super().__init__(
            f"seed {seed}: {cause!r}\n"
            f"replay with: python -m starlings_simulator.replay --seed {seed}\n{transcript.tail()}"
        )
        self.seed = seed
        self.cause = cause
        self.transcript = transcript


@dataclass(slots=True)
class SimulatedKeeper:
    """Version 0 and the checkpoints, by block."""

    block_names: tuple[str, ...]
    find_donor: Callable[[WorkerId], Host | None]
    saved: dict[int, dict[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.saved[0] = {block: f"initial:{name}" for block, name in enumerate(self.block_names)}

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self.saved))

    def save(self, effect: SaveCheckpoint) -> bool:
        """Pull each block from the first donor that has it; False when nobody has some block."""
        states: dict[int, str] = {}
        for name, donors, digest in effect.donors:
            block = self.block_names.index(name)
            for donor in donors:
                state = self._snapshot(donor.worker_id, effect.version, block)
                if state is None:
                    continue
                require(
                    not digest or digest == state, f"{name}: {donor.worker_id} offers {state}, not {digest}"
                )
                states[block] = state
                break
        if len(states) < len(self.block_names):
            return False
        self.saved[effect.version] = states
        return True

    def _snapshot(self, worker_id: WorkerId, version: int, block: int) -> str | None:
        host = self.find_donor(worker_id)
        if host is None or host.engine is None or host.engine.device is None:
            return None
        return host.engine.device.snapshots.get(version, {}).get(block)


# (scenario, block names, count of target tokens, log of the lives before) -> a core.
CoreFactory = Callable[
    [Scenario, tuple[str, ...], Callable[[Sequence[int]], int], Sequence[object]], CoordinatorCore
]


class Simulation:
    """One run. `make_core` builds the coordinator's core; `make_worker_core` may plant a mutant."""

    def __init__(
        self,
        scenario: Scenario,
        make_core: CoreFactory,
        make_worker_core: Callable[[WorkerId, int], WorkerCore] = WorkerCore,
        plan: Callable[[PlanRequest], PlanReply] | None = None,
    ) -> None:
        self.scenario = scenario
        names = block_names(scenario.blocks)
        self.world = World(
            names,
            count_targets,
            make_worker_core,
            self._fetch,
            Checker(scenario.microbatches),
            self._fetch_update,
        )
        seed = scenario.seed
        self.network = Network(
            self.world.clock,
            random.Random(f"network:{seed}"),
            Conditions(broken=scenario.broken, duplicated=scenario.duplicated),
        )
        self.keeper = SimulatedKeeper(names, lambda worker_id: self.hosts.get(worker_id))
        self.hosts: dict[WorkerId, Host] = {}
        self._plan = plan or (
            lambda request: draw_plan(request, scenario.blocks, scenario.stages, scenario.least_workers)
        )
        self._sessions = itertools.count(1)
        self.coordinator = Coordinator(
            self.world,
            lambda log: make_core(scenario, names, count_targets, log),
            self._plan,
            self.keeper,
            random.Random(f"coordinator:{seed}"),
        )
        for member in scenario.fleet:
            self._add_host(member.worker_id)
        for fault in scenario.faults:
            self.world.clock.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _add_host(self, worker_id: WorkerId) -> None:
        scenario = self.scenario
        member = next(member for member in scenario.fleet if member.worker_id == worker_id)
        engine = EngineSpec(
            worker_id,
            member.seconds_per_block,
            member.numeric_class,
            scenario.compute_failure,
            scenario.load_failure,
            scenario.exchange_failure,
        )
        spec = HostSpec(
            engine,
            member.host_id,
            1 << 33,
            {"block": member.seconds_per_block},
            {"block": 2 * member.seconds_per_block},
        )
        host = self.hosts[worker_id] = Host(
            self.world,
            self.network,
            spec,
            lambda: self.coordinator if self.coordinator.process.alive else None,
            lambda: next(self._sessions),
            random.Random(f"{worker_id}:{scenario.seed}"),
        )
        self.world.clock.at(member.starts_at_s, host.start)

    def _fetch(self, assignment: Assignment, worker_id: WorkerId) -> dict[int, str] | None:
        blocks = [block for stage in assignment.span.stages for block in assignment.stages[stage].blocks]
        found: dict[int, str] = {}
        for donor in assignment.donors:
            if donor.worker_id == KEEPER:
                found |= self.keeper.saved.get(assignment.version) or {}
            elif (device := self._device_of(donor.worker_id)) is not None:
                found |= device.snapshots.get(assignment.version) or {}
        return {block: found[block] for block in blocks} if set(blocks) <= set(found) else None

    def _fetch_update(self, donor: WorkerId, step: int, group: str) -> Piece | None:
        device = self._device_of(donor)
        return device.history.get(step, {}).get(group) if device is not None else None

    def _device_of(self, worker_id: WorkerId) -> Device | None:
        """What a living engine holds."""
        host = self.hosts.get(worker_id)
        engine = host.engine if host is not None else None
        return engine.device if engine is not None and engine.process.alive else None

    # ------------------------------------------------------------------ faults

    def _strike(self, fault: Fault) -> None:
        host = self.hosts[fault.worker_id]
        clock = self.world.clock
        match fault.kind:
            case FaultKind.CRASH_COORDINATOR:
                self.coordinator.crash()
                clock.after(2.0 + fault.duration_s, self._start_coordinator)
            case FaultKind.SLOW:
                self.network.slowness = 10.0
                self.world.note("network", "!!", f"is slow for {fault.duration_s:.1f} s")
                clock.after(fault.duration_s, self._speed_up)
            case FaultKind.KILL:
                host.kill()
                clock.after(fault.duration_s, host.start)
            case FaultKind.KILL_FOR_GOOD:
                host.kill()
            case FaultKind.KILL_ENGINE:
                host.kill_engine("simulated crash")
            case FaultKind.FREEZE:
                if host.running and not host.process.frozen:
                    host.freeze()
                    frozen = host.process
                    clock.after(fault.duration_s, lambda: host.thaw() if host.process is frozen else None)
            case FaultKind.CUT_CONTROL:
                self._cut([(fault.worker_id, "coordinator")], fault)
                if host.stream is not None:
                    host.stream.break_off()
            case FaultKind.CUT_PEERS:
                others = [other for other in self.hosts if other != fault.worker_id]
                self._cut([(fault.worker_id, other) for other in others], fault)
            case FaultKind.DRAIN:
                host.drain(20.0)

    def _start_coordinator(self) -> None:
        if not self.coordinator.process.alive:
            self.coordinator.start()

    def _speed_up(self) -> None:
        self.network.slowness = 1.0

    def _cut(self, pairs: Sequence[tuple[str, str]], fault: Fault) -> None:
        both = [*pairs, *[(there, here) for here, there in pairs]]
        self.world.note(fault.worker_id, "!!", f"{fault.kind.value} for {fault.duration_s:.1f} s")
        self.network.cuts.update(both)
        self.world.clock.after(fault.duration_s, lambda: self.network.cuts.difference_update(both))

    # ------------------------------------------------------------------ running

    def run(self, patience_s: float = 240.0) -> Outcome:
        """Until the job ends, or `patience_s` after the last fault healed. Raises Violation."""
        deadline_s = self.scenario.calm_at_s + patience_s
        clock = self.world.clock
        try:
            while self.coordinator.ended is None and clock.now_s < deadline_s:
                if not clock.step():
                    break
        except AssertionError as cause:
            raise Violation(self.scenario.seed, cause, self.world.transcript) from cause
        return self._outcome()

    def _outcome(self) -> Outcome:
        ended = self.coordinator.ended
        if ended is not None:
            verdict, reason = ("done" if ended.exit_code == 0 else "failed"), ended.reason
        else:
            reason = self.coordinator.core.waiting_words()
            verdict = "waiting" if reason else "hung"
        restarts = sum(
            host.engine.core.counters["restarts"] for host in self.hosts.values() if host.engine is not None
        )
        return Outcome(
            self.scenario.seed,
            verdict,
            reason,
            str(getattr(self.coordinator.core.phase, "value", self.coordinator.core.phase)),
            self.world.checker.highest_version,
            self.world.now_s,
            self.world.events,
            self.world.checker.steps_applied,
            restarts,
            self.world.checker.rewinds,
            self.network.broken_transfers,
            self.world.transcript,
        )


def block_names(count: int) -> tuple[str, ...]:
    """ "embed", "layers.0" .., "head", as in starlings_job."""
    return ("embed", *[f"layers.{index}" for index in range(count - 2)], "head")


def count_targets(samples: Sequence[int]) -> int:
    return TARGETS_PER_SAMPLE * len(samples)
