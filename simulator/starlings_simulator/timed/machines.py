"""What a timed simulation is told of its machines: seconds, bytes per second, and when each is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from starlings_protos.messages import WorkerId

# Of a link inside a site that nothing else is said of: a gigabit, less headers.
LAN_BYTES_PER_S = 117e6


@dataclass(frozen=True, slots=True)
class Site:
    """A home, a laboratory, a data centre: its workers share one uplink and one downlink."""

    name: str
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf
    lan_bytes_per_s: float = LAN_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker. Seconds are those of one microbatch through one block, by kind, as a probe measures them."""

    worker_id: WorkerId
    site: str
    forward_seconds: Mapping[str, float]
    backward_seconds: Mapping[str, float]
    memory_bytes: int
    host_id: str = ""
    region: str = ""
    numeric_class: str = "cpu"
    device_class: str = ""
    # What optimizer steps, codecs and averages pass over: bytes of values read and written per second.
    elementwise_bytes_per_s: float = 20e9


@dataclass(frozen=True, slots=True)
class Stay:
    """A worker is there from `from_s` to `until_s`. `vanishes`: at the end it is cut off without a word, as when a
    machine is switched off; else its process ends, and its connections with it.
    """

    worker_id: WorkerId
    from_s: float = 0.0
    until_s: float = inf
    vanishes: bool = False
    # Asked to leave so long before the end, as by a spot market's notice; 0: not asked.
    notice_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From `from_s` to `until_s` everything that the worker computes takes `factor` times as long."""

    worker_id: WorkerId
    from_s: float
    until_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Swarm:
    """All that a timed simulation depends on beside the job and the seed.

    `rtt_s[a, b]`: of sites, either way round; sites that are not listed together are `default_rtt_s` apart, within a
    site it is `lan_rtt_s`.
    """

    sites: Mapping[str, Site]
    machines: tuple[Machine, ...]
    # Empty: everybody is there all the time.
    stays: tuple[Stay, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    # Where coordinator and keeper are.
    owner_site: str = "owner"
    rtt_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    default_rtt_s: float = 0.08
    lan_rtt_s: float = 0.0005

    def __post_init__(self) -> None:
        names = [machine.worker_id for machine in self.machines]
        if len(set(names)) != len(names):
            raise ValueError("two machines have one worker id")
        for machine in self.machines:
            if machine.site not in self.sites:
                raise ValueError(
                    f"{machine.worker_id} is at the site {machine.site!r}, which is not described"
                )
        known = set(names)
        timed = {stay.worker_id for stay in self.stays} | {slow.worker_id for slow in self.slowdowns}
        for worker_id in sorted(timed - known):
            raise ValueError(f"{worker_id} has a time of its own, and no machine")

    def one_way_s(self, here: str, there: str) -> float:
        if here == there:
            return self.lan_rtt_s / 2
        rtt_s = self.rtt_s.get((here, there), self.rtt_s.get((there, here), self.default_rtt_s))
        return rtt_s / 2
