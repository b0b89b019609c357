"""What trains: holders of a cut, the rates at which microbatches flow through them, and what has flowed."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from starlings_coordinator.planner.linear.problem import Floats, Ints
from starlings_protos.messages import PlannedWorker, Span, Stage, WorkerId
from starlings_simulator.flow.accounts import Accounts
from starlings_simulator.flow.holders import Holder, holder_of
from starlings_simulator.flow.pace import exchange_bytes_per_s
from starlings_simulator.flow.rates import Rates, rates_of
from starlings_simulator.flow.sample import Sampler
from starlings_simulator.timed import figures
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.machines import Machine, Swarm

# Holders who come or go before rates are computed anew, as a part of all; what goes meanwhile is taken off.
CHANGED_MOST = 0.01
# Pairs of sites whose round trips are looked at for a typical one.
PAIRS = 400


class Training:
    def __init__(self, costs: Costs, swarm: Swarm, accounts: Accounts, seed: int) -> None:
        self.costs = costs
        self.swarm = swarm
        self.accounts = accounts
        self.stages: tuple[Stage, ...] = ()
        self.holders: dict[WorkerId, Holder] = {}
        # The first plan's holders are all there, and whether anything was trained ever.
        self.started = False
        self.trained = False
        self._rates: Rates | None = None
        self._numbers: Ints = np.zeros(0, dtype=np.int64)
        self._place: dict[WorkerId, int] = {}
        self._tokens_per_s = 0.0
        self._swaps_per_s = 0.0
        # What of the programme's rates is had.
        self._kept = 1.0
        self._changes = 0
        self._until_s = 0.0
        self._stalled_until_s = 0.0
        self._rtt_s = _typical_rtt_s(swarm)
        self._sampler = Sampler(costs, swarm, seed)

    @property
    def done(self) -> bool:
        return self.accounts.tokens >= self.costs.job.job.tokens

    @property
    def bare(self) -> bool:
        """Whether no plan is in force, or some stage has no holder: then what follows is a new plan."""
        covered = {stage for holder in self.holders.values() for stage in holder.span.stages}
        return len(covered) < max(1, len(self.stages))

    @property
    def spans(self) -> Mapping[WorkerId, Span]:
        return {worker_id: holder.span for worker_id, holder in self.holders.items()}

    # ------------------------------------------------------------------ who holds what

    def begin(self, stages: tuple[Stage, ...]) -> None:
        """A new plan: whoever held something copies anew."""
        for worker_id in self.holders:
            self.accounts.begin(worker_id, figures.NO_PLACE)
        self.stages, self.holders = stages, {}
        self.started = False
        self._rates = None

    def admit(self, machine: Machine, planned: PlannedWorker) -> None:
        self.holders[machine.worker_id] = holder_of(self.costs, machine, self.stages, planned)
        self.accounts.begin(machine.worker_id, figures.PIPELINE)
        self._changes += 1

    def start(self) -> None:
        self.started = True
        self._changes = len(self.holders)

    def lose(self, worker_id: WorkerId, silent_s: float) -> bool:
        """Whether it held anything. Its microbatches under way are trained again by others, who wait for it so long."""
        holder = self.holders.pop(worker_id, None)
        if holder is None:
            return False
        self._changes += 1
        number = self._place.get(worker_id)
        if self._rates is None or number is None:
            return True
        per_microbatch = self.costs.job.train.microbatch * self.costs.job.tokens_per_sample
        mine = float(self._rates.at_stage[number].max())
        if self.costs.job.train.streams:
            lost = mine * (self._rates.latency_s + silent_s)
        else:
            # Half a step is done on average when somebody who has accumulated goes.
            lost = 0.5 * self.costs.job.microbatches_per_step
            self._stalled_until_s = max(self._stalled_until_s, self._until_s + silent_s)
        self.accounts.tokens = max(0.0, self.accounts.tokens - lost * per_microbatch)
        self.accounts.repeated += lost * self.costs.job.train.microbatch
        if self._kept * self._rates.rate > 0:
            self._tokens_per_s = max(0.0, self._tokens_per_s * (1 - mine / (self._kept * self._rates.rate)))
        self._rates.at_stage[number] = 0.0
        self._rates.load[number] = 0.0
        return True

    # ------------------------------------------------------------------ what flows

    def refresh(self) -> None:
        """Rates anew where enough has changed."""
        if not self.started or not self._changes:
            return
        bare = self.bare
        if not bare and self._rates is not None and self._changes <= CHANGED_MOST * len(self.holders):
            return
        self.flow_until_now()
        self._changes = 0
        self._rates = None
        self._tokens_per_s = self._swaps_per_s = 0.0
        if bare:
            return
        ordered = list(self.holders.items())
        holders = [holder for _, holder in ordered]
        self._place = {worker_id: n for n, (worker_id, _) in enumerate(ordered)}
        self._numbers = np.array([self.accounts.number[worker_id] for worker_id, _ in ordered])
        rates = rates_of(self.costs, self.swarm, self.stages, holders, self._rtt_s)
        self._rates, self.trained = rates, True
        job = self.costs.job
        kept = self._sampler.kept(self.stages, holders, self._rtt_s)
        rates.at_stage[:] *= kept
        rates.load[:] *= kept
        self._kept = kept
        self._tokens_per_s = kept * rates.rate * job.train.microbatch * job.tokens_per_sample
        replicas = [
            (stage, float(rates.at_stage[n, stage])) for n, h in enumerate(holders) for stage in h.span.stages
        ]
        if self._tokens_per_s > 0:
            # So that the end is an event too.
            left_s = (job.job.tokens - self.accounts.tokens) / self._tokens_per_s
            self.accounts.clock.after(left_s + 1e-6, self.flow_until_now)
        self._swaps_per_s = exchange_bytes_per_s(
            self.costs, self.stages, replicas, round(self.accounts.tokens)
        )

    def flow_until_now(self) -> None:
        """Account for what has flowed since the last time."""
        now_s = self.accounts.clock.now_s
        seconds = now_s - max(self._until_s, min(now_s, self._stalled_until_s))
        self._until_s = now_s
        rates = self._rates
        if rates is None or seconds <= 0 or self._tokens_per_s <= 0:
            return
        left = self.costs.job.job.tokens - self.accounts.tokens
        tokens = min(left, self._tokens_per_s * seconds)
        self.accounts.tokens += tokens
        first = rates.at_stage[:, 0]
        part = first / max(float(first.sum()), 1e-300)
        self.accounts.worked(self._numbers, np.minimum(1.0, rates.load) * seconds, tokens * part)
        full = tokens / (self._tokens_per_s * seconds)
        sent = self.accounts.sent
        for kind, per_s in (
            ("forward", self._kept * rates.forward_bytes_per_s),
            ("backward", self._kept * rates.backward_bytes_per_s),
            ("exchange", self._swaps_per_s),
        ):
            sent[kind] += per_s * seconds * full  # type: ignore[assignment]

    def uplink_left(self, span: Span, donors: int, rng: random.Random, least: float) -> float:
        """Bytes/s that some donors of each stage of a span could give together beside what they train."""
        total: list[float] = []
        for stage in span.stages:
            there = [h for h in self.holders.values() if stage in h.span]
            some = rng.sample(there, min(donors, len(there)))
            give = 0.0
            for holder in some:
                rate = self.swarm.sites[holder.machine.site].up_bytes_per_s
                used = 0.0
                number = self._place.get(holder.machine.worker_id)
                if self._rates is not None and number is not None and np.isfinite(rate):
                    used = self._up_bytes_per_s(number, holder)
                give += max(least * rate, rate - used) if np.isfinite(rate) else 1e12
            total.append(give)
        keeper = self.swarm.sites[self.swarm.owner_site].up_bytes_per_s
        return min((give or keeper for give in total), default=keeper)

    def _up_bytes_per_s(self, number: int, holder: Holder) -> float:
        """At most: as if it took everything in at the first stage of its span, and passed all on behind the last."""
        assert self._rates is not None
        first, last = holder.span.first_stage, holder.span.last_stage
        used = 0.0
        if last + 1 < len(self.stages):
            used += float(self._rates.at_stage[number, last]) * self.costs.boundary_bytes(
                self.stages[last], backward=False
            )
        if first > 0:
            used += float(self._rates.at_stage[number, first]) * self.costs.boundary_bytes(
                self.stages[first - 1], backward=True
            )
        return used


def _typical_rtt_s(swarm: Swarm) -> float:
    sites = sorted({machine.site for machine in swarm.machines})
    if len(sites) < 2:
        return swarm.lan_rtt_s
    rng = random.Random("sites")
    pairs: list[tuple[str, str]] = []
    for _ in range(PAIRS):
        one, other = rng.sample(sites, 2)
        pairs.append((one, other))
    trips: Floats = np.array([2 * swarm.one_way_s(a, b) for a, b in pairs])
    return float(trips.mean())
