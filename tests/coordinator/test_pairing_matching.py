"""Who meets whom: disjoint, seeded, across regions as often as can be, nobody out twice in a row."""

from __future__ import annotations

import random
import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_coordinator.core.pairing.links import PassiveEstimates, Place
from starlings_coordinator.core.pairing.matching import (
    Candidate,
    SwapMatching,
    match_slot,
    worst_far_interval,
)
from starlings_protos.messages import WorkerId

regions_of_members = st.lists(st.sampled_from(["eu", "us", "asia", "af"]), min_size=0, max_size=24)


def members(regions: list[str]) -> list[Candidate]:
    return [Candidate(WorkerId(f"w{i:02}"), region) for i, region in enumerate(regions)]


def links_of(candidates: list[Candidate], seed: int = 0) -> PassiveEstimates:
    rng = random.Random(seed)
    links = PassiveEstimates()
    for candidate in candidates:
        links.place(candidate.worker_id, Place("", candidate.region, rng.choice([1e6, 1e7, 1e8])))
    return links


def matched(
    candidates: list[Candidate], *, slot: int = 1, swaps: int = 2, links: PassiveEstimates | None = None
) -> tuple[SwapMatching, ...]:
    known = links or links_of(candidates)
    return match_slot(candidates, known, job_seed=7, stage=0, slot=slot, swaps=swaps, byte_count=10**6)


class Season:
    """Slots one after another, as `rounds.py` keeps their history."""

    def __init__(self, regions: list[str]) -> None:
        self.region = {c.worker_id: c.region for c in members(regions)}
        self.far: dict[WorkerId, int] = dict.fromkeys(self.region, 0)
        self.sitting: tuple[WorkerId, ...] = ()
        self.slot = 0

    def play(self, swaps: int) -> tuple[SwapMatching, ...]:
        self.slot += 1
        candidates = [
            Candidate(w, r, self.slot - self.far[w], w in self.sitting) for w, r in self.region.items()
        ]
        found = matched(candidates, slot=self.slot, swaps=swaps)
        for matching in found:
            for one, other in matching.pairs:
                if self.region[one] != self.region[other]:
                    self.far[one] = self.far[other] = self.slot
            self.sitting = matching.sitting
        return found


@given(regions=regions_of_members, slot=st.integers(1, 10**6), swaps=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_pairs_are_disjoint_and_nobody_meets_the_same_one_twice_in_a_slot(
    regions: list[str], slot: int, swaps: int
) -> None:
    everybody = members(regions)
    found = matched(everybody, slot=slot, swaps=swaps)
    assert len(found) == swaps
    met: Counter[tuple[WorkerId, WorkerId]] = Counter()
    for number, matching in enumerate(found):
        placed = [w for pair in matching.pairs for w in pair] + list(matching.sitting)
        assert sorted(placed) == sorted(member.worker_id for member in everybody)
        met.update(matching.pairs)
        if number == 0:
            assert len(matching.sitting) == len(everybody) % 2
        elif len(everybody) >= 2 * swaps + 2:
            # Enough others to have a new partner in every swap.
            assert len(matching.sitting) <= 2 + len(everybody) % 2
    assert set(met.values()) <= {1}


@given(regions=regions_of_members, order=st.randoms(use_true_random=False), slot=st.integers(1, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_order_of_those_who_are_ready_does_not_matter(
    regions: list[str], order: random.Random, slot: int
) -> None:
    everybody = members(regions)
    shuffled = list(everybody)
    order.shuffle(shuffled)
    links = links_of(everybody)
    assert matched(everybody, slot=slot, links=links) == matched(shuffled, slot=slot, links=links)


def test_job_stage_and_slot_seed_the_matching() -> None:
    everybody = members(["eu"] * 16)
    links = links_of(everybody)

    def pairs(job_seed: int, stage: int, slot: int) -> tuple[SwapMatching, ...]:
        return match_slot(everybody, links, job_seed=job_seed, stage=stage, slot=slot, swaps=1, byte_count=1)

    found = {pairs(1, 0, 5), pairs(2, 0, 5), pairs(1, 1, 5), pairs(1, 0, 6)}
    assert len(found) == 4
    assert pairs(1, 0, 5) in found


@given(regions=regions_of_members, slot=st.integers(1, 10**6))
@settings(max_examples=150, deadline=None)
def test_the_first_swap_crosses_as_often_as_any_matching_can(regions: list[str], slot: int) -> None:
    everybody = members(regions)
    region = {member.worker_id: member.region for member in everybody}
    (first,) = matched(everybody, slot=slot, swaps=1)
    crossing = sum(region[one] != region[other] for one, other in first.pairs)
    largest = max(Counter(regions).values(), default=0)
    assert crossing == min(len(regions) // 2, len(regions) - largest)


@given(regions=regions_of_members, swaps=st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_the_stated_worst_interval_between_far_meetings_holds(regions: list[str], swaps: int) -> None:
    worst = worst_far_interval(Counter(regions))
    season = Season(regions)
    if worst is None:
        assert len(set(regions)) < 2
        return
    for _ in range(3 * worst + 6):
        season.play(swaps)
        late = [w for w, slot in season.far.items() if season.slot - slot >= worst]
        assert not late, f"{late} have met nobody else's region for {worst} slots"


@given(count=st.sampled_from([3, 5, 7, 9]), two=st.booleans(), swaps=st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_nobody_sits_out_twice_in_a_row_and_everybody_sometimes(count: int, two: bool, swaps: int) -> None:
    season = Season(["eu" if i % 3 or not two else "us" for i in range(count)])
    before: tuple[WorkerId, ...] = ()
    sat: Counter[WorkerId] = Counter()
    for _ in range(12 * count):
        for matching in season.play(swaps):
            if len(matching.sitting) == 1:
                assert matching.sitting != before
                sat.update(matching.sitting)
            before = matching.sitting
    if not two:
        assert len(sat) == count


def test_everybody_meets_everybody_in_time() -> None:
    season = Season(["eu"] * 8)
    met = {pair for _ in range(40) for matching in season.play(2) for pair in matching.pairs}
    assert len(met) == 28


def test_similar_bandwidths_meet_more_often_than_chance_would_have_it() -> None:
    everybody = members(["eu"] * 16)
    links = PassiveEstimates()
    for i, member in enumerate(everybody):
        links.place(member.worker_id, Place("", "eu", 1e6 if i < 8 else 1e9))
    slow = {member.worker_id for member in everybody[:8]}
    unlike = alike = 0
    for slot in range(1, 101):
        (matching,) = matched(everybody, slot=slot, swaps=1, links=links)
        mixed = sum((one in slow) != (other in slow) for one, other in matching.pairs)
        unlike, alike = unlike + mixed, alike + 8 - mixed
    # By chance 8 of 15 others are unlike; every fourth slot leaves it to chance, so that all mix.
    assert 0 < unlike < 0.3 * (unlike + alike)


def test_a_link_that_was_seen_to_be_slow_is_avoided() -> None:
    everybody = members(["eu"] * 4)
    links = PassiveEstimates()
    bad = (everybody[0].worker_id, everybody[1].worker_id)
    count = [0, 0]
    for slow in (False, True):
        if slow:
            links.observe(*bad, 10**6, 1000.0)
        for slot in range(1, 400):
            if slot % 4:
                (matching,) = matched(everybody, slot=slot, swaps=1, links=links)
                count[slow] += bad in matching.pairs
    assert count[1] < 0.5 * count[0]


def test_a_thousand_members_take_a_fraction_of_a_second() -> None:
    """A sanity bound, a hundred times what sorting needs: a quadratic matching would take minutes."""
    rng = random.Random(1)
    everybody = members([rng.choice(["eu", "us", "asia"]) for _ in range(1000)])
    links = links_of(everybody)
    begun_s = time.process_time()
    first, second = matched(everybody, links=links)
    assert time.process_time() - begun_s < 2.0
    assert len(first.pairs) == len(second.pairs) == 500
