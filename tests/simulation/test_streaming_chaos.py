"""`async` under crashes, freezes, lost and late messages and restarts: what the ledger counts against what is true.

After every half second: no sample is acknowledged twice in an epoch; what stages added twice, and what is in no replica
of a stage any more, is at most what is counted; a newcomer's stage is of one donor; a job that does not train says why.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from starlings_coordinator.core.streaming import contributions, doubt, leasing, newcomers
from support.streaming_chaos import Chaos, play

SLOTS_SAMPLES = 4 * 2


def play_all(seeds: range) -> tuple[Counter[str], list[Chaos]]:
    worlds, wrong = [], []
    for seed in seeds:
        try:
            worlds.append(play(seed))
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}")
    assert not wrong, f"{len(wrong)} of {len(seeds)} seeds fail\n" + "\n".join(wrong)
    return sum((world.faults for world in worlds), Counter[str]()), worlds


@pytest.mark.parametrize(
    "seeds",
    [range(20), *(pytest.param(range(low, low + 40), marks=pytest.mark.slow) for low in range(20, 620, 40))],
    ids=str,
)
def test_what_is_counted_is_at_least_what_is_true(seeds: range) -> None:
    faults, worlds = play_all(seeds)
    assert all(faults[kind] > len(seeds) // 4 for kind in ("crash", "engine", "cut", "restart", "back")), (
        faults
    )
    # The trouble is real: something is repeated and something lost, and in most runs neither.
    assert sum(world.core.state.samples_repeated > 0 for world in worlds) > len(seeds) // 4
    assert sum(world.core.state.samples_unmerged > 0 for world in worlds) > len(seeds) // 4


@pytest.mark.parametrize(
    "seeds",
    [range(10), *(pytest.param(range(low, low + 40), marks=pytest.mark.slow) for low in range(10, 210, 40))],
    ids=str,
)
def test_the_owners_commands_lose_nothing_that_is_not_counted(seeds: range) -> None:
    worlds = [play(seed, commands=True) for seed in seeds]
    faults = sum((world.faults for world in worlds), Counter[str]())
    assert all(faults[f"owner: {kind}"] for kind in ("pause", "resume", "evict")), faults


def test_engines_that_end_cost_what_was_in_flight_and_no_more() -> None:
    for seed in range(8):
        world = Chaos(seed)
        for _ in range(12):
            world.look()
        lost = 0
        for victim in sorted(world.replicas)[:2]:
            fake = world.fakes[victim]
            if world.core.phase.value == "training" and victim in world.core.state.spans:
                world.end_engine(fake)
                lost += 1
            world.look()
        assert world.core.state.samples_repeated <= lost * SLOTS_SAMPLES, seed


def test_a_seed_replays_exactly() -> None:
    one, other = (play(7) for _ in range(2))
    assert one.records == other.records


def test_in_calm_nothing_counts_twice_or_not_at_all() -> None:
    world = Chaos(3)
    while world.ended is None:
        world.look()
    assert (world.core.state.samples_repeated, world.core.state.samples_unmerged) == (0, 0)


def noticed(seeds: range) -> str:
    for seed in seeds:
        try:
            play(seed)
        except (AssertionError, KeyError) as error:
            return str(error)
    return ""


MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "what was in flight is forgotten": (doubt.Doubt, "in_doubt", lambda *_: 0, "twice"),
    "what passes through a lost worker is forgotten": (doubt.Doubt, "passing", lambda *_: 0, "twice"),
    "a restart forgets what replicas have alone": (
        contributions.Contributions,
        "_remember",
        lambda _: None,
        "in no replica",
    ),
    "what is reported after a loss counts as kept": (
        contributions.Contributions,
        "_lost_meanwhile",
        lambda *_: "",
        "in no replica",
    ),
    "checkpoints are taken for all replicas'": (
        contributions.Contributions,
        "beside",
        lambda *_: 0,
        "in no replica",
    ),
    "donors of one stage are mixed": (newcomers.StreamJoining, "donors_per_stage", 2, "is mixed of"),
    "leases of a lost worker are kept": (leasing.LeaseBook, "lost", lambda *_, **__: None, ""),
    "a lease that returned is given to nobody": (leasing.LeaseBook, "_return", lambda *_: None, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_ledger_that_lies_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, value, words = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, value)
    complaint = noticed(range(100))
    assert complaint, "nobody noticed"
    assert words in complaint
