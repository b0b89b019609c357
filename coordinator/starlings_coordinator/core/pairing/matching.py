"""Who meets whom in a slot: a pure function of who is ready, what was before, and a seed.

The first swap of a slot crosses regions as often as any matching can: with n replicas, of whom m are in the largest
region, min(n // 2, n - m) pairs. Where more than half are in one region, those of them cross who have waited longest.
The other swaps are within regions where that is possible, since they are cheap there. In both, replicas of similar
bandwidth are put together, roughly: a slow uplink then slows down few, and chance still mixes everybody. Every
fourth slot bandwidth is left out of it.

Two passes over the pairs follow. Pairs that met in an earlier swap of the same slot change partners with others, and a
pair whose link is known to be slow changes too when that helps. Sorting is the most expensive part: O(n log n).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from starlings_coordinator.core.pairing.links import LinkEstimates
from starlings_protos.messages import WorkerId

Pair = tuple[WorkerId, WorkerId]

# Bandwidths are put in order after each was multiplied by up to this factor, or divided by it.
BANDWIDTH_BLUR = 3.0
# Every so many slots partners are taken without a look at bandwidth, so that all mix.
MIX_EVERY_SLOTS = 4
# Two pairs exchange partners for speed when the slower one gets faster by this factor.
GAIN_FACTOR = 2.0
# How many others a pair that cannot stay tries to exchange partners with; all of them in small groups.
TRIES = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    worker_id: WorkerId
    region: str = ""
    # Slots since it last met somebody of another region.
    waited: int = 0
    # It sat out in the last swap that there was.
    sat_out: bool = False


@dataclass(frozen=True, slots=True)
class SwapMatching:
    # Each sorted; the smaller id first.
    pairs: tuple[Pair, ...]
    # Those who have no partner.
    sitting: tuple[WorkerId, ...]


@dataclass(slots=True)
class _Slot:
    """What one call works with."""

    links: LinkEstimates
    byte_count: int
    rng: random.Random
    mixes: bool
    regions: dict[WorkerId, str]
    used: set[Pair] = field(default_factory=set)

    def crosses(self, pair: Pair) -> bool:
        return self.regions[pair[0]] != self.regions[pair[1]]

    def seconds(self, pair: Pair) -> float:
        return self.links.exchange_s(pair[0], pair[1], self.byte_count)


def match_slot(
    candidates: Iterable[Candidate],
    links: LinkEstimates,
    *,
    job_seed: int,
    stage: int,
    slot: int,
    swaps: int,
    byte_count: int,
) -> tuple[SwapMatching, ...]:
    """Disjoint pairs for each swap of the slot, no pair twice. The order of the candidates does not matter."""
    members = sorted(candidates, key=lambda candidate: candidate.worker_id)
    seed = hashlib.sha256(f"{job_seed}/{stage}/{slot}".encode()).digest()
    slot_state = _Slot(
        links,
        byte_count,
        random.Random(int.from_bytes(seed, "big")),
        mixes=slot % MIX_EVERY_SLOTS == 0,
        regions={member.worker_id: member.region for member in members},
    )
    sat_out = {member.worker_id for member in members if member.sat_out}
    found = []
    for swap in range(swaps):
        matching = _match(members, sat_out, slot_state, across=swap == 0)
        slot_state.used.update(matching.pairs)
        sat_out = set(matching.sitting)
        found.append(matching)
    return tuple(found)


def worst_far_interval(region_sizes: Mapping[str, int]) -> int | None:
    """After how many slots at most a replica has met one of another region; None where there is one region only.

    While the same replicas are ready. In a region with n of N replicas and n > N / 2, N - n cross per slot; elsewhere
    only who sits out, once, does not.
    """
    sizes = sorted(size for size in region_sizes.values() if size > 0)
    if len(sizes) < 2:
        return None
    total, largest = sum(sizes), sizes[-1]
    if 2 * largest > total:
        return math.ceil(largest / (total - largest))
    return 2 if total % 2 else 1


def _match(
    members: Sequence[Candidate], sat_out: Collection[WorkerId], slot: _Slot, *, across: bool
) -> SwapMatching:
    if len(members) < 2:
        return SwapMatching((), tuple(member.worker_id for member in members))
    # Who waited longest first; chance decides among equals.
    order = list(members)
    slot.rng.shuffle(order)
    order.sort(key=lambda member: -member.waited)
    sitting: list[WorkerId] = []
    if len(order) % 2:
        sitter = _sitter(order, sat_out)
        order.remove(sitter)
        sitting.append(sitter.worker_id)
    pairs = _across(order, slot) if across else _adjacent(order, slot)
    _part_those_who_met(pairs, slot)
    _change_slow_links(pairs, slot)
    met = [pair for pair in pairs if pair in slot.used]
    pairs = [pair for pair in pairs if pair not in slot.used]
    sitting += [worker_id for pair in met for worker_id in pair]
    return SwapMatching(tuple(sorted(pairs)), tuple(sorted(sitting)))


def _sitter(order: Sequence[Candidate], sat_out: Collection[WorkerId]) -> Candidate:
    """Of the largest region, so that others keep their chance to cross; who waited least, and not twice in a row."""
    sizes = Counter(member.region for member in order)
    largest = max(sizes, key=lambda region: (sizes[region], region))
    of_largest = [member for member in order if member.region == largest]
    for among in (of_largest, order):
        fresh = [member for member in among if member.worker_id not in sat_out]
        if fresh:
            return fresh[-1]
    return order[-1]


def _across(order: Sequence[Candidate], slot: _Slot) -> list[Pair]:
    """As many pairs between regions as there can be. `order`: an even number, who waits longest first."""
    by_region: dict[str, list[Candidate]] = defaultdict(list)
    for member in order:
        by_region[member.region].append(member)
    largest = max(by_region.values(), key=lambda group: (len(group), group[0].region))
    others = len(order) - len(largest)
    staying: list[Candidate] = []
    if len(largest) > others:
        staying = largest[others:]
        by_region[largest[0].region] = largest[:others]
    pairs = _adjacent(staying, slot)
    # Region after region on a circle, no region longer than half of it: opposite places are in different regions.
    regions = sorted(by_region)
    slot.rng.shuffle(regions)
    circle = [member for region in regions for member in _by_bandwidth(by_region[region], slot)]
    half = len(circle) // 2
    return pairs + [_pair(circle[i].worker_id, circle[i + half].worker_id) for i in range(half)]


def _adjacent(members: Sequence[Candidate], slot: _Slot) -> list[Pair]:
    """Neighbours in the order of region and bandwidth."""
    by_region: dict[str, list[Candidate]] = defaultdict(list)
    for member in sorted(members, key=lambda member: member.worker_id):
        by_region[member.region].append(member)
    regions = sorted(by_region)
    slot.rng.shuffle(regions)
    row = [member.worker_id for region in regions for member in _by_bandwidth(by_region[region], slot)]
    return [_pair(row[i], row[i + 1]) for i in range(0, len(row) - 1, 2)]


def _by_bandwidth(members: Sequence[Candidate], slot: _Slot) -> list[Candidate]:
    blur = math.log(BANDWIDTH_BLUR)
    keys = {}
    for member in sorted(members, key=lambda member: member.worker_id):
        known = 0.0 if slot.mixes else math.log(max(1.0, slot.links.rate_bytes_per_s(member.worker_id)))
        keys[member.worker_id] = known + slot.rng.uniform(-blur, blur)
    return sorted(members, key=lambda member: (keys[member.worker_id], member.worker_id))


def _part_those_who_met(pairs: list[Pair], slot: _Slot) -> None:
    """Whoever met in an earlier swap of the slot exchanges partners with another pair; rather without a pair across
    regions less, else with.
    """
    for at in range(len(pairs)):
        if pairs[at] not in slot.used:
            continue
        places = [place for place in range(len(pairs)) if place != at]
        if len(places) > TRIES:
            places = slot.rng.sample(places, TRIES)
        found = [
            (_crossing(changed, slot), place, changed)
            for place in places
            for changed in _exchanged(pairs[at], pairs[place])
            if not slot.used.intersection(changed)
        ]
        if found:
            _, place, changed = max(
                found, key=lambda option: option[0] - _crossing((pairs[option[1]],), slot)
            )
            pairs[at], pairs[place] = changed


def _change_slow_links(pairs: list[Pair], slot: _Slot) -> None:
    """One look per pair at one other: exchange partners when the slower of both gets much faster by that."""
    if len(pairs) < 2 or slot.mixes:
        return
    for at in range(len(pairs)):
        place = slot.rng.randrange(len(pairs) - 1)
        place += place >= at
        before = (pairs[at], pairs[place])
        slowest_s = max(map(slot.seconds, before))
        for changed in _exchanged(*before):
            if (
                not slot.used.intersection(changed)
                and _crossing(changed, slot) >= _crossing(before, slot)
                and GAIN_FACTOR * max(map(slot.seconds, changed)) < slowest_s
            ):
                pairs[at], pairs[place] = changed
                break


def _crossing(pairs: Iterable[Pair], slot: _Slot) -> int:
    return sum(map(slot.crosses, pairs))


def _exchanged(one: Pair, other: Pair) -> tuple[tuple[Pair, Pair], tuple[Pair, Pair]]:
    """Both ways to pair the same four anew."""
    (a, b), (c, d) = one, other
    return (_pair(a, c), _pair(b, d)), (_pair(a, d), _pair(b, c))


def _pair(one: WorkerId, other: WorkerId) -> Pair:
    return (one, other) if one < other else (other, one)
