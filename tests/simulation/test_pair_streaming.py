"""Pair rounds with the core of an `async` job as the coordinator: its plans, leases, losses, joins and restarts."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.test_pair_rounds import FAILURES, SLOT_S, W0, play
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import RoundOutcome, SwapResult
from support.pair_streaming import StreamingWorld


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 120), marks=pytest.mark.slow)])
def test_no_promise_is_broken_under_random_trouble(seeds: range) -> None:
    """As with the coordinator's half alone; and no round id comes twice, whoever is started again."""
    seen: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        try:
            seen += play(seed, StreamingWorld).results()
        except AssertionError as error:
            # The others are played all the same.
            wrong.append(f"seed {seed}: {error}")
    assert not wrong, "\n".join(wrong)
    assert seen["COMMITTED"] > 5 * len(seeds)
    kinds = ("LATE", "NOT_MATCHED") if len(seeds) < 100 else ("LATE", "NOT_MATCHED", "REFUSED", "FENCED")
    for kind in kinds:
        assert seen[kind] > 0, f"{kind} never happened"


def test_in_calm_everything_is_averaged_and_counted() -> None:
    world = StreamingWorld(3, 5, fragments=2)
    world.run(12 * SLOT_S)
    world.finish()
    results = world.results()
    assert set(results) <= {"COMMITTED", "NOT_MATCHED"}
    assert results["COMMITTED"] >= 9 * 2 * 4 - 8
    (shown,) = world.side.world.core.status(world.side.world.now()).exchanges
    assert 2 * shown.rounds_averaged == results["COMMITTED"] == sum(r.averaged for r in shown.replicas)
    assert shown.reports_unexpected == shown.rounds_one_sided == 0


QUICK = ("crash", "coordinator restarted")


@pytest.mark.parametrize(
    "failure", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAILURES]
)
def test_twenty_clean_rounds_follow_one_failure(failure: str) -> None:
    world = StreamingWorld(11, 4)
    world.run(3.5 * SLOT_S)
    clock = world.side.rounds.clock
    slot = clock.slot_at(world.now_s) + 1
    began_s = clock.begins_at(slot)
    world.run(began_s + 0.05)
    FAILURES[failure](world)
    world.run(began_s + 31 * SLOT_S)
    world.finish()
    # A newcomer waits for the next copy, and for the next match.
    results = world.results(since_slot=slot + 6)
    assert set(results) == {"COMMITTED"}, results
    for worker in world.workers.values():
        assert len({o.slot for o in worker.outcomes if o.slot >= slot + 6}) >= 20


@pytest.mark.parametrize(
    "seed", [s if s in (1, 4) else pytest.param(s, marks=pytest.mark.slow) for s in range(8)]
)
def test_with_a_lost_replica_goes_what_it_did_since_somebody_averaged_it_and_no_more(seed: int) -> None:
    world = StreamingWorld(seed, 3, swaps=1)
    world.run(32.0 + 3.7 * seed)
    clock = world.side.rounds.clock
    begins = [clock.begins_at(o.slot) for w, o in averaged_with(world, W0)]
    since_s = max(begins, default=0.0)
    world.crash(W0, back_after_s=None)
    world.run(world.now_s + 5.0)
    assert W0 not in world.side.world.core.state.spans
    lost = [(at_s, samples) for at_s, samples in world.trained[W0, 1] if at_s > since_s]
    # Others' microbatches do not pass through it, since each holds everything. A look may come a quarter of a second
    # late.
    exactly = sum(samples for _, samples in lost)
    assert exactly <= world.side.world.core.state.samples_unmerged <= exactly + 2
    assert begins or seed < 1


def averaged_with(world: StreamingWorld, partner: WorkerId) -> list[tuple[WorkerId, RoundOutcome]]:
    return [
        (w, outcome)
        for w, worker in world.workers.items()
        for outcome in worker.outcomes
        if outcome.partner == partner and outcome.result is not SwapResult.SOLO
    ]
