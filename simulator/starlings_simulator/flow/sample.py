"""What slots, queues, round trips, barriers and rounds leave of the linear programme's flow: measured on a few holders.

The programme knows devices and links, and neither that a worker may have few microbatches under way, nor that nobody
begins a step before all have ended the last. Both depend on what the cores do, so a part of the holders, drawn so that
spans and speeds have the shares that they have in the whole, is played event by event for a while (`timed`); the ratio
of what flowed there to what the programme says of the same few holds for all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from starlings_job.spec import JobSpec
from starlings_protos.messages import PlanReply, PlanRequest, Stage
from starlings_simulator.flow.holders import Holder
from starlings_simulator.flow.rates import rates_of
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.machines import Site, Swarm
from starlings_simulator.timed.run import TimedSimulation

HOLDERS = 48
# Microbatches that are played, and rounds of each slot, steps in `sync`.
MICROBATCHES, TURNS, STEPS = 500, 4.0, 12
# Before it counts, until everybody is at work.
WARM_TURNS = 2.0
# A swarm this many times bigger or smaller is looked at anew.
ANEW = 1.5
# If nothing has begun by then it never will.
BEGIN_MOST_S = 24 * 3600.0


class Sampler:
    """Deterministic by what it was made with; remembers what it has measured."""

    def __init__(self, costs: Costs, swarm: Swarm, seed: int) -> None:
        self._costs = costs
        self._swarm = swarm
        self._seed = seed
        self._known: dict[tuple[tuple[Stage, ...], int], float] = {}

    def kept(self, stages: tuple[Stage, ...], holders: Sequence[Holder], rtt_s: float) -> float:
        """The part of the programme's rate that is had."""
        key = stages, round(math.log(len(holders)) / math.log(ANEW))
        if key not in self._known:
            few = drawn(holders, len(stages), HOLDERS)
            self._known[key] = self._measure(stages, few, len(few) / len(holders), rtt_s)
        return self._known[key]

    def _measure(self, stages: tuple[Stage, ...], few: Sequence[Holder], part: float, rtt_s: float) -> float:
        job, swarm = _scaled(self._costs.job, part), self._swarm_of(few)
        promised = rates_of(Costs(job, self._costs.profile), swarm, stages, few, rtt_s)
        planned = {holder.machine.worker_id: holder.planned for holder in few}

        def plan(request: PlanRequest) -> PlanReply:
            return PlanReply(request.request_id, stages, tuple(planned[w.worker_id] for w in request.workers))

        simulation = TimedSimulation(job, self._costs.profile, swarm, self._seed, plan)
        warm_s = WARM_TURNS * promised.latency_s
        seconds = max(MICROBATCHES / promised.rate, TURNS * promised.latency_s)
        if not job.train.streams:
            step_s = job.microbatches_per_step / promised.rate + promised.latency_s
            warm_s, seconds = step_s, max(seconds, STEPS * step_s)
        rate = _play(simulation, warm_s, seconds) / (job.train.microbatch * job.tokens_per_sample)
        return min(1.0, rate / promised.rate)

    def _swarm_of(self, few: Sequence[Holder]) -> Swarm:
        """Whose site has others too has its part of the link."""
        here = Counter(holder.machine.site for holder in few)
        everybody = Counter(machine.site for machine in self._swarm.machines)
        sites = {}
        for name, count in here.items():
            site, part = self._swarm.sites[name], count / everybody[name]
            sites[name] = replace(
                site, up_bytes_per_s=part * site.up_bytes_per_s, down_bytes_per_s=part * site.down_bytes_per_s
            )
        owner = self._swarm.owner_site
        sites.setdefault(owner, Site(owner))
        # Weights come in no time: what is measured is training.
        machines = tuple(holder.machine for holder in few)
        return replace(self._swarm, sites=sites, machines=machines, stays=(), slowdowns=())


def drawn(holders: Sequence[Holder], stages: int, count: int) -> list[Holder]:
    """At least `count` of them, or all, evenly over spans and within a span over speeds, and every stage among them."""
    ranked = sorted(
        holders,
        key=lambda h: (h.span.first_stage, h.span.last_stage, float(h.seconds.sum()), h.machine.worker_id),
    )
    while True:
        count = min(count, len(ranked))
        few = [ranked[int((n + 0.5) * len(ranked) / count)] for n in range(count)]
        covered = {stage for holder in few for stage in holder.span.stages}
        if len(covered) == stages or count == len(ranked):
            return few
        count *= 2


def _scaled(job: JobSpec, part: float) -> JobSpec:
    """Steps as many times smaller as the swarm is, and no end."""
    train = job.train
    batch = max(train.microbatch, round(part * train.batch / train.microbatch) * train.microbatch)
    update: dict[str, object] = {"batch": batch}
    if train.streams and not train.inner_batch:
        update["inner_batch"] = train.microbatches_per_inner_step
    endless = job.job.model_copy(update={"tokens": 10**15})
    swarm = job.swarm.model_copy(update={"min_workers": 1})
    return job.model_copy(update={"train": train.model_copy(update=update), "job": endless, "swarm": swarm})


def _play(simulation: TimedSimulation, warm_s: float, seconds: float) -> float:
    """Tokens/s after `warm_s` of training, over `seconds`."""
    clock, owner = simulation.world.clock, simulation.owner
    owner.start()

    def until(at_s: float) -> None:
        while clock.now_s < at_s and owner.ended is None and clock.step():
            pass

    while not owner.core.state.tokens and clock.now_s < BEGIN_MOST_S and clock.step():
        pass
    until(clock.now_s + warm_s)
    begun_s, begun = clock.now_s, owner.core.state.tokens
    until(begun_s + seconds)
    return (owner.core.state.tokens - begun) / max(1e-9, clock.now_s - begun_s)
