"""`diloco` and `sparseloco` on real processes: local steps, then rounds of a stage's whole group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from starlings.demo.kill import child_of, kill_at_once
from starlings_protos import control_pb2
from support.rounds_seen import COMMITTED, Rounds, watch
from swarms import LiveSwarm, freeze, job_text, prepared_job, thaw

BATCH, LENGTH = 8, 32
TRAIN = {"schedule": "async", "batch": BATCH, "microbatch": 2, "inner_batch": 1, "lr": 3e-3}


def rounds(reply: control_pb2.StatusReply) -> list[int]:
    return [stage.rounds_averaged for stage in reply.exchanges]


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange",
    [
        {"preset": "diloco", "every": 10},
        {"preset": "diloco", "every": 10, "fragments": 2, "merge_alpha": 0.5, "codec": "int4:64"},
        {"preset": "sparseloco", "every": 10},
    ],
    ids=["diloco", "fragments", "sparseloco"],
)
def test_two_replicas_train_in_rounds(tmp_path: Path, exchange: dict[str, object]) -> None:
    sections = {"train": TRAIN, "exchange": exchange, "swarm": {"min_workers": 2, "settle_s": 0.3}}
    job = prepared_job(tmp_path, job_text(400 * BATCH * LENGTH, **sections))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(2):
            swarm.join()
        seen = swarm.wait(lambda reply: bool(rounds(reply)) and min(rounds(reply)) >= 3, 400)
        done = swarm.finish(400)
    for stage in seen.exchanges:
        assert len(stage.replicas) == 2
        assert all(replica.averaged > 0 for replica in stage.replicas)
        assert stage.reports_unexpected == 0
    met = [r.last for stage in seen.exchanges for r in stage.replicas if r.last.fraction == 1.0]
    assert met
    assert all(len(last.members) == 2 and not last.dropped for last in met)
    assert done.validation_loss < 3.0


# ------------------------------------------------------------------ what happens to one of three

CLEAN_SLOTS = 20
PASS_S, SLOT_S, LATE_S = 0.1, 5.0, 3.0
# A member sends 270 kB a round, which takes a second: so a round can be hit.
UPLINK = "2Mbit/s,20ms"
DIGITS = 1e-9


@contextmanager
def three_replicas(folder: Path, rounds: Rounds) -> Iterator[LiveSwarm]:
    """In training, after their first slot in which all have averaged."""
    every = round(SLOT_S / (2 * PASS_S))
    job = prepared_job(
        folder,
        job_text(
            100_000 * BATCH * LENGTH,
            train={**TRAIN, "inner_batch": 2},
            exchange={"preset": "diloco", "every": every},
            swarm={"min_workers": 3, "settle_s": 0.5},
            pipeline={"stages": 1},
        ),
    )
    with LiveSwarm.of(job, folder) as swarm:
        for _ in range(3):
            swarm.join("--emulate-pass", str(PASS_S), "--emulate-link", UPLINK)
        watch(swarm, rounds, lambda r: r.phase == "training", 600)
        watch(swarm, rounds, lambda r: whole(rounds, 1), 30 * SLOT_S)
        yield swarm


def whole(rounds: Rounds, slots: int) -> bool:
    """In each of the newest slots that are over, all have averaged everything with all."""
    newest = range(rounds.slot - slots, rounds.slot)
    return all(
        sum(
            o.result == COMMITTED and o.fraction > 1 - DIGITS and len(o.members) == 3
            for (_, slot, _), o in rounds.outcomes.items()
            if slot == past
        )
        == 3
        for past in newest
    )


@pytest.mark.slow
@pytest.mark.parametrize("blow", ["frozen", "killed"])
def test_what_happens_to_one_costs_its_contribution_and_nobody_hangs(tmp_path: Path, blow: str) -> None:
    """Twenty clean rounds follow."""
    rounds = Rounds()
    with three_replicas(tmp_path, rounds) as swarm:
        names = sorted(rounds.tokens)
        victim, *others = names
        child = child_of(swarm.swarm, victim)
        # A round has just begun, and what it sends is on its way.
        slot = rounds.slot + 1
        watch(swarm, rounds, lambda r: rounds.slot >= slot, 3 * SLOT_S)
        assert rounds.slot == slot
        if blow == "frozen":
            freeze(child)
        else:
            child.expendable = True
            kill_at_once(child.process)
        at_s, struck = time.monotonic(), dict(rounds.tokens)
        said = [(w, slot, 0) for w in others]
        try:
            watch(swarm, rounds, lambda r: all(key in rounds.outcomes for key in said), SLOT_S + LATE_S)
            # They train on: in this very slot.
            watch(swarm, rounds, lambda r: all(rounds.tokens[w] > struck[w] for w in others), SLOT_S + LATE_S)
        finally:
            if blow == "frozen":
                thaw(child)
        assert time.monotonic() - at_s < SLOT_S + LATE_S
        if blow == "killed":
            swarm.swarm.start_again(child)
        for worker in others:
            outcome = rounds.outcomes[worker, slot, 0]
            # Its own part had no owner, and the outcome says how much of the vector that is.
            assert outcome.result == COMMITTED, rounds.table()
            assert list(outcome.members) == others, rounds.table()
            assert 0.4 < outcome.fraction < 0.9, rounds.table()
            assert [d.worker_id for d in outcome.dropped] == [victim], rounds.table()
        assert len({rounds.outcomes[w, slot, 0].fraction for w in others}) == 1

        # It copies the starting point of the others, and takes its part again.
        watch(swarm, rounds, lambda r: rounds.slot > slot + 2 and whole(rounds, 1), 600)
        first = rounds.slot - 1
        lost = [e.text for e in swarm.history.events if e.kind == "lost" and victim in e.text]
        assert len(lost) == 1 if blow == "killed" else len(lost) <= 1
        watch(swarm, rounds, lambda r: rounds.slot > first + CLEAN_SLOTS, 4 * CLEAN_SLOTS * SLOT_S)
        assert not [e.text for e in swarm.history.events if e.kind == "lost" and e.text not in lost]
        for worker in names:
            for past in range(first, first + CLEAN_SLOTS):
                outcome = rounds.outcomes[worker, past, 0]
                assert (outcome.result, list(outcome.members)) == (COMMITTED, names), rounds.table()
                assert outcome.fraction == pytest.approx(1.0), rounds.table()
        (exchanges,) = swarm.wait(lambda r: True, 10).exchanges
        assert exchanges.reports_unexpected == 0
