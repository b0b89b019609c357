"""The exponential graph of pairs: exact means where it can make them, and nobody out for long elsewhere."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_coordinator.core.pairing.exponential import match_exponentially
from starlings_coordinator.core.pairing.links import PassiveEstimates
from starlings_coordinator.core.pairing.rounds import PairSettings, StageRounds
from starlings_coordinator.core.pairing.weights import TokenCount
from starlings_job.exchange_rules import rules_for
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import PairMatched, RoundReady


def workers(count: int) -> list[WorkerId]:
    return [WorkerId(f"w{number:02}") for number in range(count)]


@given(st.integers(0, 40), st.integers(0, 10**6), st.randoms())
def test_pairs_are_disjoint_and_everybody_is_somewhere(count: int, turn: int, rng: random.Random) -> None:
    members = workers(count)
    shuffled = rng.sample(members, count)
    found = match_exponentially(shuffled, turn)
    assert found == match_exponentially(members, turn)
    named = [member for pair in found.pairs for member in pair] + list(found.sitting)
    assert sorted(named) == members
    assert all(one < other for one, other in found.pairs)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize("cycle", [0, 1, 5])
def test_a_cycle_gives_the_exact_mean(count: int, cycle: int) -> None:
    rng = random.Random(count)
    length = (count - 1).bit_length()
    values = {member: float(rng.randrange(1000)) for member in workers(count)}
    mean = sum(values.values()) / count
    for turn in range(cycle * length, (cycle + 1) * length):
        for one, other in match_exponentially(values, turn).pairs:
            values[one] = values[other] = (values[one] + values[other]) / 2
    # Halves of whole numbers below 2^53: exact.
    assert set(values.values()) == {mean}


@pytest.mark.parametrize("count", [3, 5, 6, 7, 9, 12])
def test_other_numbers_come_together_too_and_nobody_sits_out_for_long(count: int) -> None:
    values = {member: float(number) for number, member in enumerate(workers(count))}
    alone = dict.fromkeys(values, 0)
    for turn in range(400):
        found = match_exponentially(values, turn)
        for one, other in found.pairs:
            values[one] = values[other] = (values[one] + values[other]) / 2
            alone[one] = alone[other] = 0
        for member in found.sitting:
            alone[member] += 1
            assert alone[member] <= 2 * (count - 1).bit_length()
    assert max(values.values()) - min(values.values()) < 1e-9
    assert abs(sum(values.values()) / count - (count - 1) / 2) < 1e-9


class Ledger:
    """One has trained nine hundred times as much as the others."""

    def tokens(self, worker_id: WorkerId, stage: int) -> TokenCount:
        return TokenCount(9000.0 if worker_id == "w00" else 10.0, 9000.0)


def test_gossip_meets_evenly_once_a_slot_and_each_fragment_has_its_own_cycle() -> None:
    names = workers(4)
    settings = PairSettings(rules_for("gossip", fragments=2), 7, 10**6, 1000)
    rounds = StageRounds(0, settings, PassiveEstimates(), Ledger())
    now_s = 100.0

    def ready(slot: int) -> dict[WorkerId, PairMatched]:
        begins_in_s = rounds.clock.begins_at(slot) - now_s if slot else 0.0
        told = [
            told
            for name in names
            for told in rounds.ready(name, 1, RoundReady(0, slot, begins_in_s, 0, 0.2), 0, now_s)
        ]
        return {name: message for name, message in told if isinstance(message, PairMatched)}

    for name in names:
        rounds.joined(name, 1, "eu", now_s)
    assert not ready(0)
    met: dict[int, list[set[tuple[WorkerId, WorkerId]]]] = {0: [], 1: []}
    for slot in range(1, 9):
        found = ready(slot)
        assert set(found) == set(names)
        assert {(match.swap, match.weight) for match in found.values()} == {(0, 0.5)}
        met[slot % 2].append(
            {(min(w, m.partner), max(w, m.partner)) for w, m in found.items() if m.fragment == slot % 2}
        )
        now_s = rounds.clock.begins_at(slot) + 1e-3
        rounds.look_at_time(0, now_s)
    for slots in met.values():
        # After two slots in a row of its own, a fragment is the mean of all four.
        assert all(len(pairs) == 2 for pairs in slots)
        assert all(one.isdisjoint(other) for one, other in pairwise(slots))
