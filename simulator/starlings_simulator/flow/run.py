"""Coming, going, planning and copying of a big swarm; between them what flows is constant."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from starlings_coordinator.core.config import Timings
from starlings_job.profile import Profile
from starlings_job.spec import JobSpec
from starlings_protos.messages import PlannedWorker, PlanReply, PlanRequest, PlanWorker, Stage, WorkerId
from starlings_simulator.clock import Clock
from starlings_simulator.flow.accounts import Accounts
from starlings_simulator.flow.copies import finish_s
from starlings_simulator.flow.placing import plan_of
from starlings_simulator.flow.training import Training
from starlings_simulator.timed import figures
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.home import ENGINE_START_S, PROBE_S, START_S
from starlings_simulator.timed.machines import Site, Stay, Swarm
from starlings_simulator.timed.owner import PLAN_S, PLAN_S_PER_WORKER, POINT_S
from starlings_simulator.timed.pushes import TIMEOUT_S
from starlings_simulator.timed.report import Report
from starlings_simulator.timed.run import PROGRESS_S

# Those who copy from others have of an uplink what training leaves, and at least this part.
COPIES_LEAST = 0.02
DONORS = 2

Planner = Callable[[PlanRequest], PlanReply]


class FlowSimulation:
    """Deterministic by job, profile, swarm and seed."""

    def __init__(
        self, job: JobSpec, profile: Profile, swarm: Swarm, seed: int = 0, plan: Planner | None = None
    ) -> None:
        """`plan`: in place of `placing.plan_of`."""
        sites = {swarm.owner_site: Site(swarm.owner_site), **swarm.sites}
        stays = swarm.stays or tuple(Stay(machine.worker_id) for machine in swarm.machines)
        self.swarm = replace(swarm, sites=sites, stays=stays)
        self.job, self.profile = job, profile
        self.costs = Costs(job, profile)
        self.clock = Clock()
        self.machines = {machine.worker_id: machine for machine in swarm.machines}
        self.accounts = Accounts(self.clock, list(self.machines))
        self.training = Training(self.costs, self.swarm, self.accounts, seed)
        self.plans = 0
        self._plan = plan or (lambda request: plan_of(request, profile, job.pipeline.codec))
        self._rng = random.Random(f"flow:{seed}")
        self._seed = seed
        # Measured and there; of each, its life: what was asked of an earlier one does not happen.
        self._ready: set[WorkerId] = set()
        self._life: dict[WorkerId, int] = {}
        self._measuring = 0
        # On their way to a place: what they will hold.
        self._loading: dict[WorkerId, PlannedWorker] = {}
        self._changed_s = 0.0
        self._asked = False
        # A new plan's holders copy, and nobody trains yet.
        self._beginning = False
        self._look_at_s = -1.0
        self._patience_s = Timings().gather_most_s
        self._waiting_since_s: float | None = None
        for stay in stays:
            self._schedule(stay)

    def _schedule(self, stay: Stay) -> None:
        self.clock.at(stay.from_s, lambda: self._come(stay.worker_id))
        if stay.until_s == float("inf"):
            return
        if stay.notice_s > 0:
            self.clock.at(
                max(stay.from_s, stay.until_s - stay.notice_s), lambda: self._left(stay.worker_id, 0.0)
            )
        silent_s = TIMEOUT_S if stay.vanishes else 0.0
        self.clock.at(stay.until_s, lambda: self._left(stay.worker_id, silent_s))

    def run(self, seconds: float, progress: Callable[[float], None] = lambda now_s: None) -> Report:
        """Until so many virtual seconds are over, or the job is. `progress` is told of the time now and then."""
        clock = self.clock
        over = False

        def end() -> None:
            nonlocal over
            over = True

        def look() -> None:
            progress(clock.now_s)
            clock.after(PROGRESS_S, look)

        def point() -> None:
            self.training.flow_until_now()
            self.accounts.point(len(self.training.holders) if self.training.started else 0)
            clock.after(POINT_S, point)

        clock.at(seconds, end)
        clock.after(PROGRESS_S, look)
        point()
        while not over and not self.training.done and clock.step():
            self.training.refresh()
        self.training.flow_until_now()
        ended = "the tokens are trained" if self.training.done else ""
        return self.accounts.report(
            self.training.spans,
            self.plans,
            ended=ended,
            training=self.training.started and not self.training.bare,
        )

    # ------------------------------------------------------------------ coming and going

    def _later(self, worker_id: WorkerId, after_s: float, call: Callable[[], None]) -> None:
        life = self._life[worker_id]
        self.clock.after(after_s, lambda: call() if self._life[worker_id] == life else None)

    def _come(self, worker_id: WorkerId) -> None:
        if self.accounts.is_there(worker_id):
            return
        rng = self._rng
        self._life[worker_id] = self._life.get(worker_id, 0) + 1
        self.training.flow_until_now()
        self.accounts.begin(worker_id, figures.START)
        self._measuring += 1
        start_s = rng.uniform(*START_S) + rng.uniform(*ENGINE_START_S)
        self._later(worker_id, start_s, lambda: self.accounts.begin(worker_id, figures.NO_PLACE))
        self._later(worker_id, start_s + rng.uniform(*PROBE_S), lambda: self._measured(worker_id))

    def _measured(self, worker_id: WorkerId) -> None:
        self._measuring -= 1
        self._ready.add(worker_id)
        self._membership_changed()

    def _left(self, worker_id: WorkerId, silent_s: float) -> None:
        """`silent_s`: how long others still wait for it."""
        if not self.accounts.is_there(worker_id):
            return
        self.training.flow_until_now()
        self._life[worker_id] += 1
        if worker_id in self._ready:
            self._ready.remove(worker_id)
        else:
            self._measuring -= 1
        self._loading.pop(worker_id, None)
        self.accounts.gone(worker_id)
        self._start_if_all_are_there()
        if self.training.lose(worker_id, silent_s):
            self.accounts.note("lost", str(worker_id))
        self._membership_changed()

    def _membership_changed(self) -> None:
        self._changed_s = self.clock.now_s
        self._look_after(self.job.swarm.settle_s)

    def _look_after(self, after_s: float) -> None:
        at_s = self.clock.now_s + after_s
        if self._look_at_s < at_s:
            self._look_at_s = at_s
            self.clock.at(at_s, self._look)

    # ------------------------------------------------------------------ planning

    def _look(self) -> None:
        now_s = self.clock.now_s
        waiting = [w for w in self._ready if w not in self.training.holders and w not in self._loading]
        if self._asked or self._beginning or not waiting:
            self._waiting_since_s = None
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        settled = not self._measuring and now_s >= self._changed_s + self.job.swarm.settle_s - 1e-6
        if not settled and now_s - self._waiting_since_s <= self._patience_s:
            self._look_after(1.0)
            return
        if not self.training.started and len(self._ready) < self.job.swarm.min_workers:
            return
        self._waiting_since_s, self._asked = None, True
        anew = self.training.bare
        held = {} if anew else {w: h.span for w, h in self.training.holders.items()}
        held |= (
            {}
            if anew
            else {w: planned.span for w, planned in self._loading.items() if planned.span is not None}
        )
        request = PlanRequest(
            self.plans,
            tuple(replace(self._measure(w), held=held.get(w)) for w in sorted(self._ready)),
            self._seed,
            self.job.train.microbatch,
            self.job.microbatches_per_step,
            self.job.bytes_per_parameter,
            () if not self.training.stages else self.training.stages,
            stages_most=self.job.stages_most,
        )
        seconds = PLAN_S + PLAN_S_PER_WORKER * len(request.workers)
        self.clock.after(seconds, lambda: self._planned(request, self._plan(request), anew=anew))

    def _measure(self, worker_id: WorkerId) -> PlanWorker:
        machine = self.machines[worker_id]
        site = self.swarm.sites[machine.site]
        up, down = (r if r < float("inf") else 0.0 for r in (site.up_bytes_per_s, site.down_bytes_per_s))
        return PlanWorker(
            worker_id,
            machine.forward_seconds,
            machine.backward_seconds,
            machine.memory_bytes,
            up,
            down,
            host_id=machine.host_id,
            site=machine.site,
            region=machine.region,
        )

    def _planned(self, request: PlanRequest, reply: PlanReply, *, anew: bool) -> None:
        self._asked = False
        if reply.impossible:
            self.accounts.note("waiting", reply.impossible)
            return
        self.plans += 1
        if anew:
            self.training.begin(reply.stages)
            self._loading, self._beginning = {}, True
        new = [
            planned
            for planned in reply.workers
            if planned.span is not None
            and planned.worker_id in self._ready
            and planned.worker_id not in self._loading
            and planned.worker_id not in self.training.holders
        ]
        self.accounts.note("plan", f"{len(new)} workers take places" + (" in a new plan" if anew else ""))
        self._copy(new, reply.stages, anew=anew)

    def _copy(self, new: list[PlannedWorker], stages: tuple[Stage, ...], *, anew: bool) -> None:
        if not new:
            return
        self._loading |= {planned.worker_id: planned for planned in new}
        sizes, caps = [], []
        for planned in new:
            assert planned.span is not None
            self.accounts.begin(planned.worker_id, figures.STATE)
            own = stages[planned.span.first_stage : planned.span.last_stage + 1]
            sizes.append(self.costs.state_bytes(own, fresh=anew and not self.training.trained))
            caps.append(self._downlink(planned.worker_id))
        if anew:
            keeper = self.swarm.sites[self.swarm.owner_site].up_bytes_per_s
            took = finish_s(np.array(sizes), np.array(caps), keeper)
            for planned, seconds in zip(new, took, strict=True):
                self._arrive(planned, float(seconds))
            self.accounts.sent["state"] += round(sum(sizes))
            return
        for planned, size, cap in zip(new, sizes, caps, strict=True):
            assert planned.span is not None
            give = self.training.uplink_left(planned.span, DONORS, self._rng, COPIES_LEAST)
            self.accounts.sent["state"] += round(size)
            self._arrive(planned, size / max(1.0, min(cap, give)))

    def _downlink(self, worker_id: WorkerId) -> float:
        site = self.swarm.sites[self.machines[worker_id].site]
        return float(site.down_bytes_per_s)

    def _arrive(self, planned: PlannedWorker, after_s: float) -> None:
        def loaded() -> None:
            if self._loading.pop(planned.worker_id, None) is None:
                return
            self.training.flow_until_now()
            self.training.admit(self.machines[planned.worker_id], planned)
            self._start_if_all_are_there()

        self._later(planned.worker_id, after_s + self._rng.uniform(0.05, 0.2), loaded)

    def _start_if_all_are_there(self) -> None:
        """All begin together: nothing is trained before every stage of a new plan is there."""
        if self._beginning and not self._loading:
            self._beginning = False
            self.training.start()
            self._membership_changed()
