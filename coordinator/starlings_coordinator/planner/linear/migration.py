"""What bringing state to those who take new stages takes: bytes, seconds, and what training loses meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from starlings_coordinator.planner.linear.problem import Floats

# Of a link that training fills, what copies take all the same: else a swarm bound by its links would never change.
LEAST_SHARE = 0.2
# What the owner's machine serves at, of stages that nobody holds: a rented server's 100 Mbit/s.
KEEPER_BYTES_PER_S = 12.5e6


@dataclass(frozen=True, slots=True)
class Taking:
    """A worker's site, and the stages that it takes and has not."""

    site: int
    stages: Sequence[int]


@dataclass(frozen=True, eq=False)
class Migration:
    """`seconds` until the last copy is there; `lost`: microbatches/s that full links carry less meanwhile."""

    bytes: float
    seconds: float
    lost: float


@dataclass(frozen=True, eq=False)
class Links:
    """Per site, bytes/s: rates and what training uses of them; what a whole link is worth in microbatches/s."""

    up: Floats
    down: Floats
    up_used: Floats
    down_used: Floats
    up_worth: Floats
    down_worth: Floats

    def with_more(self, up: Floats, down: Floats) -> Links:
        """With further sites, whose links are idle and worth nothing yet."""
        idle = np.zeros(len(up))
        own = (self.up, self.down, self.up_used, self.down_used, self.up_worth, self.down_worth)
        more = (up, down, idle, idle, idle, idle)
        return Links(*(np.append(a, b) for a, b in zip(own, more, strict=True)))

    def room(self, *, down: bool) -> Floats:
        rate, used = (self.down, self.down_used) if down else (self.up, self.up_used)
        with np.errstate(invalid="ignore"):
            return np.maximum(np.where(np.isfinite(rate), rate - used, np.inf), LEAST_SHARE * rate)


def migrate(
    links: Links,
    taking: Sequence[Taking],
    donors: Mapping[int, Sequence[int]],
    copied: Floats,
    *,
    keeper_bytes_per_s: float = KEEPER_BYTES_PER_S,
) -> Migration:
    """Each copy comes from all donors of its stage at once, in proportion to the room of their uplinks.

    Within a site copies take no time. A stage without donors comes from the owner's machine.

    Args:
        donors: by stage, the sites of its holders, one entry per holder.
        copied: per stage, bytes of a copy.
    """
    out, into = np.zeros(len(links.up)), np.zeros(len(links.up))
    room = links.room(down=False)
    from_keeper, total = 0.0, 0.0
    for take in taking:
        for stage in take.stages:
            size = float(copied[stage])
            total += size
            sites = list(donors.get(stage, ()))
            if take.site in sites:
                continue
            into[take.site] += size
            if not sites:
                from_keeper += size
                continue
            weight = np.minimum(room[sites], 1e15)
            np.add.at(out, sites, size * weight / weight.sum())
    seconds = from_keeper / keeper_bytes_per_s
    lost = 0.0
    for moved, rate, free, used, worth in (
        (out, links.up, room, links.up_used, links.up_worth),
        (into, links.down, links.room(down=True), links.down_used, links.down_worth),
    ):
        busy = np.flatnonzero((moved > 0) & np.isfinite(rate))
        if not len(busy):
            continue
        seconds = max(seconds, float(np.max(moved[busy] / free[busy])))
        taken = np.maximum(0.0, free[busy] - (rate[busy] - used[busy])) / rate[busy]
        lost += float(np.sum(taken * worth[busy]))
    return Migration(total, seconds, lost)
