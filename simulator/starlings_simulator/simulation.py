"""Builds a swarm from a scenario, lets faults happen, and runs it until the job ends, waits with a reason, or
hangs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlings_protos.messages import PlanReply, PlanRequest, WorkerId
from starlings_simulator.checker import Checker
from starlings_simulator.coordinator import Coordinator, CoordinatorCore
from starlings_simulator.donations import Donations
from starlings_simulator.engine import EngineSpec
from starlings_simulator.host import Host, HostSpec
from starlings_simulator.keeper import SimulatedKeeper
from starlings_simulator.network import Conditions, Network
from starlings_simulator.plans import draw_plan
from starlings_simulator.reference import Reference
from starlings_simulator.scenario import Scenario
from starlings_simulator.transcript import Transcript
from starlings_simulator.trouble import Trouble
from starlings_simulator.world import World
from starlings_worker.core.core import WorkerCore

TARGETS_PER_SAMPLE = 16
# Until whoever was frozen or cut off has said so, and has been heard.
RECOVERY_S = 5.0


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
    # Spans fetched, and lives begun, by each worker.
    downloads: dict[WorkerId, int]
    admissions: dict[WorkerId, int]
    # Workers whose process runs at the end.
    present: int
    # The state of the blocks at the end, as the newest checkpoint has it.
    final: dict[int, str]
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
        reference: Reference | None = None,
    ) -> None:
        self.scenario = scenario
        names = block_names(scenario.blocks)
        self.hosts: dict[WorkerId, Host] = {}
        checker = Checker(scenario.microbatches, reference)
        self.world = World(names, count_targets, make_worker_core, checker)
        self.world.checker.harmed = partial(self.world.harmed, recovery_s=RECOVERY_S)
        self.world.checker.reached = self._reached
        seed = scenario.seed
        self.network = Network(
            self.world.clock,
            random.Random(f"network:{seed}"),
            Conditions(broken=scenario.broken, duplicated=scenario.duplicated),
        )
        self.keeper = SimulatedKeeper(names, lambda *asked: donations.snapshot(*asked), checker)
        donations = self.world.donations = Donations(
            self.hosts,
            self.keeper.saved,
            self.network,
            checker,
            lambda: self.coordinator.process.alive and not self.coordinator.process.frozen,
        )
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
        self.trouble = Trouble(
            self.world,
            self.network,
            self.keeper,
            self.hosts,
            lambda: self.coordinator,
            random.Random(f"trouble:{seed}"),
        )
        for fault in scenario.faults:
            self.trouble.plan(fault)

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
            scenario.updates_most,
            scenario.passes,
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

    def _reached(self, worker_id: WorkerId, incarnation: int) -> int | None:
        engine = self.hosts[worker_id].engine
        if engine is None or engine.incarnation != incarnation:
            return None
        return engine.device.version if engine.device is not None else -1

    # ------------------------------------------------------------------ running

    def run(self, patience_s: float = 240.0) -> Outcome:
        """Until the job ends, or `patience_s` after the last fault healed. Raises Violation."""
        clock, calm_at_s = self.world.clock, self.scenario.calm_at_s
        try:
            while self.coordinator.ended is None:
                if clock.now_s >= max(calm_at_s, self.trouble.healed_at_s) + patience_s or not clock.step():
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
            dict(self.world.checker.downloads),
            dict(self.world.checker.credit.admissions),
            sum(host.running for host in self.hosts.values()),
            self.keeper.saved[max(self.keeper.saved)],
            self.world.transcript,
        )


def block_names(count: int) -> tuple[str, ...]:
    """ "embed", "layers.0" .., "head", as in starlings_job."""
    return ("embed", *[f"layers.{index}" for index in range(count - 2)], "head")


def count_targets(samples: Sequence[int]) -> int:
    return TARGETS_PER_SAMPLE * len(samples)
