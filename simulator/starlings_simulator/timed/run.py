"""Builds a timed simulation from a job, a profile and a swarm, and runs it for some virtual hours."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.core import Core
from starlings_coordinator.planner.plan import make_plan
from starlings_job.profile import Profile
from starlings_job.spec import JobSpec
from starlings_protos.messages import PlanReply, PlanRequest, WorkerId
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.home import Home
from starlings_simulator.timed.machines import Site, Stay, Swarm
from starlings_simulator.timed.owner import Owner
from starlings_simulator.timed.report import Report, report_of
from starlings_simulator.timed.world import World

# Of samples there are as many as anybody could train.
_POPULATION = 1 << 24
_HELD_OUT = 64
# Between two looks of the caller's at how far it is.
PROGRESS_S = 60.0

Planner = Callable[[PlanRequest], PlanReply]


class TimedSimulation:
    """Deterministic by job, profile, swarm and seed."""

    def __init__(
        self, job: JobSpec, profile: Profile, swarm: Swarm, seed: int = 0, plan: Planner | None = None
    ) -> None:
        """`plan`: in place of the planner of live jobs."""
        sites = dict(swarm.sites)
        sites.setdefault(swarm.owner_site, Site(swarm.owner_site))
        swarm = replace(
            swarm, sites=sites, stays=swarm.stays or tuple(Stay(m.worker_id) for m in swarm.machines)
        )
        self.world = World(swarm, Costs(job, profile))
        config = CoreConfig(
            job,
            profile,
            population=_POPULATION,
            held_out_count=_HELD_OUT,
            count_targets=lambda samples: len(samples) * profile.sequence_length,
        )
        planner = plan or (lambda request: make_plan(request, profile))
        self.owner = Owner(self.world, Core(config), planner)
        self.homes = {
            machine.worker_id: Home(
                self.world,
                machine,
                self.owner,
                random.Random(f"{seed}:{machine.worker_id}"),
                self._slowness(machine.worker_id),
            )
            for machine in swarm.machines
        }
        for stay in swarm.stays:
            self._schedule(stay)

    def _slowness(self, worker_id: WorkerId) -> Callable[[], float]:
        own = [slow for slow in self.world.swarm.slowdowns if slow.worker_id == worker_id]

        def slowness() -> float:
            now_s = self.world.clock.now_s
            return max((s.factor for s in own if s.from_s <= now_s < s.until_s), default=1.0)

        return slowness

    def _schedule(self, stay: Stay) -> None:
        clock, home = self.world.clock, self.homes[stay.worker_id]
        clock.at(stay.from_s, home.come)
        if stay.until_s == float("inf"):
            return
        if stay.notice_s > 0:
            notice_at_s = max(stay.from_s, stay.until_s - stay.notice_s)
            clock.at(notice_at_s, lambda: home.notice(stay.until_s - notice_at_s))
        clock.at(stay.until_s, lambda: home.go(silently=stay.vanishes))

    def run(self, seconds: float, progress: Callable[[float], None] = lambda now_s: None) -> Report:
        """Until so many virtual seconds are over, or the job is. `progress` is told of the time now and then."""
        clock = self.world.clock
        over = False

        def end() -> None:
            nonlocal over
            over = True

        def look() -> None:
            progress(clock.now_s)
            clock.after(PROGRESS_S, look)

        clock.at(seconds, end)
        clock.after(PROGRESS_S, look)
        self.owner.start()
        while not over and self.owner.ended is None and clock.step():
            pass
        self.world.books.close()
        return report_of(self.world, self.owner)
