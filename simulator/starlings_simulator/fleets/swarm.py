"""A fleet file's workers one by one: names, sites, speeds for a model, distances. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from starlings_job.devices import DEVICES
from starlings_job.memory import GPU_CONTEXT_BYTES
from starlings_job.profile import Profile
from starlings_protos.messages import PlanWorker, WorkerId
from starlings_simulator.fleets.file import FleetFileError
from starlings_simulator.fleets.networks import ACCESS, region_rtt_ms
from starlings_simulator.fleets.sections import FleetSpec, Line, WorkersSection

# A backward multiplies by the weights and by the inputs, a forward by the weights alone.
BACKWARD_BY_FORWARD = 2.0
# Between workers of one site: a switch.
SAME_SITE_MS = 0.2
BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True)
class Site:
    """Rates in bytes/s, infinite where nothing limits them; `delay_s` to the first exchange point and back."""

    name: str
    region: str
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    delay_s: float


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """`flops_per_s` is what training gets; unused where `forward_seconds` (per kind of block and microbatch) is there.

    `price_per_hour` and `watts` are None where nobody said anything.
    """

    worker_id: WorkerId
    device: str
    site: str
    region: str
    memory_bytes: int
    flops_per_s: float
    forward_seconds: Mapping[str, float] | None
    backward_seconds: Mapping[str, float] | None
    price_per_hour: float | None
    watts: float | None
    lifetime_s: float


class Swarm:
    """The workers and sites of a fleet file."""

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.sites: dict[str, Site] = {}
        self.workers: tuple[FleetWorker, ...] = tuple(self._numbered())
        self._site_of = {worker.worker_id: self.sites[worker.site] for worker in self.workers}
        self._bounded_by_paths()

    def _numbered(self) -> Iterator[FleetWorker]:
        totals: Counter[str] = Counter()
        for group in self.spec.workers:
            totals[_base_name(group)] += group.count
        taken = {name for name, count in totals.items() if count == 1}
        seen: Counter[str] = Counter()
        for group in self.spec.workers:
            base = _base_name(group)
            for _ in range(group.count):
                seen[base] += 1
                name = base if totals[base] == 1 else f"{base}-{seen[base]}"
                if totals[base] > 1 and name in taken:
                    raise FleetFileError(f"two workers are called {name!r}: give one of them another name")
                yield self._worker(group, name)

    def _worker(self, group: WorkersSection, name: str) -> FleetWorker:
        site = group.site or name
        line = self.spec.sites[group.site] if group.site is not None else group
        if group.site is None and site in self.spec.sites:
            raise FleetFileError(
                f"[sites.{site}] has a worker's name: rename it, or write site = {site!r} there"
            )
        self.sites.setdefault(site, _site(site, line))
        device = DEVICES.get(group.class_ or "")
        memory = group.memory or (device.memory_bytes - GPU_CONTEXT_BYTES if device is not None else 0)
        flops = group.tflops * 1e12 if group.tflops is not None else device.flops_per_s if device else 0.0
        watts = group.watts if group.watts is not None else float(device.watts) if device else None
        return FleetWorker(
            WorkerId(name),
            group.class_ or "",
            site,
            line.region,
            memory,
            flops * group.speed,
            _scaled(group.forward_seconds, 1 / group.speed),
            _scaled(group.backward_seconds, 1 / group.speed),
            self._price(group, watts),
            watts,
            group.lifetime_hours * 3600 if group.lifetime_hours is not None else math.inf,
        )

    def _price(self, group: WorkersSection, watts: float | None) -> float | None:
        if group.price_per_hour is not None:
            return group.price_per_hour
        energy = self.spec.fleet.price_per_kwh
        return None if energy is None or watts is None else energy * watts / 1000

    def _bounded_by_paths(self) -> None:
        """A site sends no more than all its paths together carry. Which path carries what is for the router."""
        paths = self.spec.path_mbit_per_s
        if paths is None:
            return
        rates = {
            (one, other): rate * BYTES_PER_MBIT
            for one, source in self.sites.items()
            for other, target in self.sites.items()
            if one != other
            and (rate := paths.between((one, source.region), (other, target.region)) or 0.0) > 0
        }
        for name, site in self.sites.items():
            out = [rates.get((name, other), math.inf) for other in self.sites if other != name]
            into = [rates.get((other, name), math.inf) for other in self.sites if other != name]
            self.sites[name] = Site(
                name,
                site.region,
                min(site.uplink_bytes_per_s, sum(out) if out else math.inf),
                min(site.downlink_bytes_per_s, sum(into) if into else math.inf),
                site.delay_s,
            )

    # ------------------------------------------------------------------ for planner and simulator

    def rtt_s(self, one: WorkerId, other: WorkerId) -> float:
        """There and back between two workers."""
        return self.site_rtt_s(self._site_of[one], self._site_of[other])

    def site_rtt_s(self, one: Site, other: Site) -> float:
        if one.name == other.name:
            return SAME_SITE_MS / 1000
        given = self.spec.rtt_ms
        if given is not None:
            found = given.between((one.name, one.region), (other.name, other.region))
            if found is not None:
                return found / 1000
        return one.delay_s + other.delay_s + region_rtt_ms(one.region, other.region) / 1000

    def plan_workers(self, profile: Profile, microbatch: int) -> tuple[PlanWorker, ...]:
        """What each worker would measure when it joins, for that model.

        Raises:
            FleetFileError: `forward_seconds` lacks a kind of block that the model has.
        """
        return tuple(
            plan_worker(worker, self.sites[worker.site], profile, microbatch) for worker in self.workers
        )


def plan_worker(worker: FleetWorker, site: Site, profile: Profile, microbatch: int) -> PlanWorker:
    """What the worker would measure when it joins. A rate of 0 says that nothing limits a link.

    Raises:
        FleetFileError: `forward_seconds` lacks a kind of block that the model has.
    """
    if worker.forward_seconds is not None:
        missing = sorted(set(profile.kinds) - set(worker.forward_seconds))
        if missing:
            raise FleetFileError(
                f"worker {worker.worker_id}: forward_seconds lacks {', '.join(missing)}; the model's kinds of blocks "
                f"are {', '.join(sorted(profile.kinds))}"
            )
        forward = {kind: worker.forward_seconds[kind] for kind in profile.kinds}
    else:
        forward = {
            kind: profile.blocks[block].flops_per_sample * microbatch / worker.flops_per_s
            for kind, block in profile.kinds.items()
        }
    backward = {kind: seconds * BACKWARD_BY_FORWARD for kind, seconds in forward.items()}
    if worker.backward_seconds is not None:
        backward = {kind: worker.backward_seconds[kind] for kind in profile.kinds}
    return PlanWorker(
        worker.worker_id,
        forward,
        backward,
        worker.memory_bytes,
        site.uplink_bytes_per_s if math.isfinite(site.uplink_bytes_per_s) else 0.0,
        site.downlink_bytes_per_s if math.isfinite(site.downlink_bytes_per_s) else 0.0,
        site=site.name,
        region=site.region,
    )


def _base_name(group: WorkersSection) -> str:
    return group.name or group.class_ or "worker"


def _scaled(seconds: Mapping[str, float] | None, factor: float) -> Mapping[str, float] | None:
    return None if seconds is None else {kind: value * factor for kind, value in seconds.items()}


def _site(name: str, line: Line) -> Site:
    known = ACCESS.get(line.access or "")
    up = line.uplink_mbit_per_s or (known.up_mbit_per_s if known else math.inf)
    down = line.downlink_mbit_per_s or (known.down_mbit_per_s if known else math.inf)
    delay = line.delay_ms if line.delay_ms is not None else known.delay_ms if known else 0.0
    return Site(name, line.region, up * BYTES_PER_MBIT, down * BYTES_PER_MBIT, delay / 1000)
