"""A fleet file's swarm as a timed simulation takes it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from starlings_job.profile import Profile
from starlings_simulator.fleets import swarm as fleets
from starlings_simulator.timed.machines import Machine, Site, Stay, Swarm

# Where nothing else is said the owner is at a well connected place.
OWNER = "owner"
# What a device's memory does for vectors, in relation to its arithmetic in training: an RTX 3090 moves 936 GB/s beside
# about 40 TFLOP/s (NVIDIA, Ampere GA102 white paper, table 2), a third of which is lost to copies and launches.
_BYTES_PER_FLOP = 0.015
_LEAST_BYTES_PER_S = 5e9


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose machine coordinator and keeper run on: its line, and round trips to everybody where no region is known."""

    up_bytes_per_s: float = 125e6
    down_bytes_per_s: float = 125e6
    rtt_s: float = 0.05


def swarm_of(
    fleet: fleets.Swarm,
    profile: Profile,
    microbatch: int,
    *,
    stays: tuple[Stay, ...] = (),
    owner: Owner | None = None,
) -> Swarm:
    """Sites, machines and round trips. `stays` as in `Swarm`.

    Raises:
        FleetFileError: `forward_seconds` lacks a kind of block that the model has.
    """
    owner = owner or Owner()
    sites = {
        name: Site(name, site.uplink_bytes_per_s, site.downlink_bytes_per_s)
        for name, site in fleet.sites.items()
    }
    sites[OWNER] = Site(OWNER, owner.up_bytes_per_s, owner.down_bytes_per_s)
    measured = {worker.worker_id: worker for worker in fleet.plan_workers(profile, microbatch)}
    machines = []
    for worker in fleet.workers:
        seconds = measured[worker.worker_id]
        machines.append(
            Machine(
                worker.worker_id,
                worker.site,
                seconds.forward_seconds,
                seconds.backward_seconds,
                worker.memory_bytes,
                region=worker.region,
                device_class=worker.device,
                elementwise_bytes_per_s=max(_LEAST_BYTES_PER_S, _BYTES_PER_FLOP * worker.flops_per_s),
            )
        )
    rtt_s = {
        (one.name, other.name): fleet.site_rtt_s(one, other)
        for one, other in combinations(fleet.sites.values(), 2)
    }
    return Swarm(sites, tuple(machines), stays, owner_site=OWNER, rtt_s=rtt_s, default_rtt_s=owner.rtt_s)
