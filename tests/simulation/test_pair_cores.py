"""Whole cores of workers that train leased microbatches and exchange in pairs, on a virtual clock, in trouble."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from starlings_protos.pair_messages import SwapResult
from support.pair_core import CoreWorker
from support.pair_worker import CALM, ROUGH, STEP_S
from support.pair_world import PairWorld


def cores(world: PairWorld) -> list[CoreWorker]:
    found = [worker for worker in world.workers.values() if isinstance(worker, CoreWorker)]
    assert len(found) == len(world.workers)
    return found


def test_exchanges_cost_training_nothing_but_their_work_on_the_device() -> None:
    world = PairWorld(3, 4, fragments=2, worker_class=CoreWorker)
    seconds = 70.0
    world.run(seconds)
    world.finish()
    results = world.results()
    assert set(results) <= {"COMMITTED", "NOT_MATCHED"}, results
    assert results["COMMITTED"] >= 2 * 4 * 4
    for worker in cores(world):
        # Per slot one outer step and two swaps of three pieces each, 20 ms at most.
        worked_s = 7 * 0.02 * len(worker.slots_taken)
        assert worker.steps * STEP_S >= seconds - worked_s - 3 * STEP_S
        assert worker.idle_s < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_no_promise_is_broken_while_cores_train_in_trouble(seed: int) -> None:
    rng = random.Random(seed)
    world = PairWorld(
        seed, rng.randint(3, 5), trouble=ROUGH, fragments=rng.randint(1, 3), worker_class=CoreWorker
    )
    for _ in range(3):
        victim = rng.choice(sorted(world.workers))
        trouble = rng.choice([world.crash, lambda w: world.freeze(w, 4.0), lambda w: world.freeze(w, 12.0)])
        world.at(rng.uniform(15, 50), lambda v=victim, t=trouble: t(v) if v in world.workers else None)
    world.at(rng.uniform(15, 50), lambda: world.coordinator_away(12.0, restarts=bool(seed % 2)))
    world.run(60)
    world.trouble = CALM
    world.run(100)
    world.finish()
    seen: Counter[SwapResult] = Counter()
    for worker in world.all_lives:
        seen += Counter(outcome.result for outcome in worker.outcomes)
    assert seen[SwapResult.COMMITTED] > 10, (seed, seen)
    for core in cores(world):
        assert core.core.counters["failures"] == 0
        # The last three slots are calm.
        assert {o.result for o in core.outcomes[-2:]} == {SwapResult.COMMITTED}, (seed, core.outcomes[-4:])
