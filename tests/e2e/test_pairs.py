"""Exchanges in pairs on real processes: replicas come together, and what happens to one costs the others little.

Devices take a fixed time per microbatch, most of which they sleep: so slots are about as long on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from starlings.demo.kill import child_of, kill_at_once
from starlings_protos.pair_messages import SoloReason
from starlings_worker.core.pairing.swap import PairTimings
from support.rounds_seen import COMMITTED, SOLO, Rounds, watch
from swarms import LiveSwarm, freeze, job_text, prepared_job, thaw

BATCH, LENGTH = 8, 32
TRAIN = {"schedule": "async", "batch": BATCH, "microbatch": 2, "inner_batch": 2, "lr": 3e-3}
PASS_S = 0.1
# What a machine that has other things to do adds to everything.
LATE_S = 3.0


def test_two_replicas_average_beside_training_and_come_together(tmp_path: Path) -> None:
    steps, every = 60, 8
    job = prepared_job(
        tmp_path,
        job_text(
            steps * BATCH * LENGTH,
            train=TRAIN,
            # Plain averaging for the first half of the tokens, the outer step and its momentum after that.
            exchange={"preset": "pairs", "every": every, "warmup_every": every, "warmup_fraction": 0.5},
            swarm={"min_workers": 2, "settle_s": 0.1},
            pipeline={"stages": 1},
        ),
    )
    rounds = Rounds()
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(2):
            swarm.join("--emulate-pass", str(PASS_S / 2))
        watch(swarm, rounds, lambda r: r.phase in ("done", "failed"), 400)
        done = swarm.finish(120)
    (one, other) = sorted({worker for worker, _, _ in rounds.outcomes})
    met = [o for o in rounds.outcomes.values() if o.result == COMMITTED]
    assert len({o.slot for o in met}) >= 3
    assert done.exchanges[0].rounds_one_sided == done.exchanges[0].reports_unexpected == 0
    for (worker, slot, _), outcome in rounds.outcomes.items():
        if outcome.result != COMMITTED:
            continue
        assert outcome.partner == (other if worker == one else one)
        assert outcome.fraction == 1.0
        assert 0 < outcome.seconds < done.exchanges[0].slot_length_s + LATE_S
        # Both measure the same distance, of decoded copies.
        partner = rounds.outcomes.get((outcome.partner, slot, outcome.swap))
        assert partner is None or partner.distance == pytest.approx(outcome.distance, rel=1e-3)
    # Alone they would go further apart with each slot: what they trained since the beginning. So they are as far apart
    # as one slot takes them, and that is less the lower the rate has become.
    far = [outcome.distance for outcome in sorted(met, key=lambda o: o.slot)]
    assert far[-1] < far[0], far
    assert done.validation_loss < 3.0
    assert [event.kind for event in swarm.history.events if event.kind == "average"]


# ------------------------------------------------------------------ what happens to one of four

# Longer than the five seconds after which a partner is silent.
SLOT_S = 6.5
CLEAN_SLOTS = 20
# A payload of the micro model, 200 kB, takes 1.6 s: so a swap can be hit.
UPLINK = "1Mbit/s,20ms"


@contextmanager
def four_replicas(folder: Path, rounds: Rounds) -> Iterator[LiveSwarm]:
    """In training, after their first slot in which all have averaged."""
    every = round(SLOT_S / (2 * PASS_S))
    job = prepared_job(
        folder,
        job_text(
            100_000 * BATCH * LENGTH,
            train=TRAIN,
            exchange={"preset": "pairs", "every": every, "swaps": 1, "warmup_fraction": 0.0},
            swarm={"min_workers": 4, "settle_s": 0.5},
            pipeline={"stages": 1},
        ),
    )
    with LiveSwarm.of(job, folder) as swarm:
        for _ in range(4):
            swarm.join("--emulate-pass", str(PASS_S), "--emulate-link", UPLINK)
        watch(swarm, rounds, lambda r: r.phase == "training", 600)
        watch(swarm, rounds, lambda r: all_averaged(rounds, 3), 30 * SLOT_S)
        yield swarm


def all_averaged(rounds: Rounds, slots: int) -> bool:
    """In each of the newest slots that are over."""
    newest = range(rounds.slot - slots, rounds.slot)
    return all(
        sum(o.result == COMMITTED for (_, slot, _), o in rounds.outcomes.items() if slot == past) == 4
        for past in newest
    )


@pytest.mark.slow
@pytest.mark.parametrize("blow", ["frozen", "killed"])
def test_what_happens_to_one_costs_its_partner_five_seconds_and_nobody_else_anything(
    tmp_path: Path, blow: str
) -> None:
    """Twenty clean rounds follow."""
    rounds = Rounds()
    with four_replicas(tmp_path, rounds) as swarm:
        names = sorted(rounds.tokens)
        victim, *others = names
        child = child_of(swarm.swarm, victim)
        before, before_s = dict(rounds.tokens), time.monotonic()
        watch(swarm, rounds, lambda r: time.monotonic() > before_s + SLOT_S, 3 * SLOT_S)
        usual = {w: (rounds.tokens[w] - before[w]) / (time.monotonic() - before_s) for w in names}

        # The exchange of a slot has just begun.
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
            seconds, meanwhile = time.monotonic() - at_s, dict(rounds.tokens)
        finally:
            if blow == "frozen":
                thaw(child)
        if blow == "killed":
            swarm.swarm.start_again(child)

        (partner,) = [w for w in others if rounds.outcomes[w, slot, 0].partner == victim]
        alone = rounds.outcomes[partner, slot, 0]
        assert (alone.result, alone.fraction, alone.distance) == (SOLO, 0.0, 0.0), rounds.table()
        # Whichever is first: the partner hears nothing of it, or the coordinator, and then it is not in the plan.
        assert alone.solo_reason in (SoloReason.SILENT, SoloReason.FENCED), rounds.table()
        assert rounds.seen_s[partner, slot, 0] - at_s < PairTimings().progress_s + LATE_S
        for worker in others:
            assert worker == partner or rounds.outcomes[worker, slot, 0].result == COMMITTED, rounds.table()
            trained = (meanwhile[worker] - struck[worker]) / seconds
            assert trained > 0.5 * usual[worker], (worker, trained, usual[worker])

        # One that was killed starts, copies the state through a thin link, and takes its part again.
        watch(swarm, rounds, lambda r: rounds.slot > slot + 2 and all_averaged(rounds, 1), 600)
        first = rounds.slot - 1
        lost = [e.text for e in swarm.history.events if e.kind == "lost" and victim in e.text]
        # Six seconds of silence are a loss, and five may become that many.
        assert len(lost) == 1 if blow == "killed" else len(lost) <= 1
        assert lost or first <= slot + 4, rounds.table()
        watch(swarm, rounds, lambda r: rounds.slot > first + CLEAN_SLOTS, 2 * CLEAN_SLOTS * SLOT_S)
        for worker in names:
            for past in range(first, first + CLEAN_SLOTS):
                assert rounds.outcomes[worker, past, 0].result == COMMITTED, rounds.table()
        (exchanges,) = swarm.wait(lambda r: True, 10).exchanges
        assert exchanges.rounds_one_sided == exchanges.reports_unexpected == 0
