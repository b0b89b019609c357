"""Who is slower than planned: colours, causes, and that figures which wander move nothing."""

from __future__ import annotations

import math
import random

import pytest

from starlings_coordinator.core.straggling import (
    FIGURES_LEAST,
    Cause,
    Colour,
    Figures,
    Paces,
    swarm_level,
)
from starlings_protos.messages import SlowedBy, WorkerId

HEARTBEAT_S = 2.0


def played(
    slow: float, seconds: float, *, seed: int = 0, noise: float = 0.2, workers: int = 4
) -> list[tuple[float, Colour]]:
    """The changes of the first worker's colour, which is `slow` times slower from the beginning on."""
    rng, paces, changes = random.Random(seed), Paces(), []
    now_s = 0.0
    while now_s < seconds:
        for number in range(workers):
            factor = (slow if number == 0 else 1.0) * math.exp(rng.gauss(0, noise))
            paces.observe(WorkerId(f"w{number}"), Figures(factor, 1.0), now_s)
        changed = paces.judge(now_s)
        assert changed.keys() <= {WorkerId("w0")}, f"seed {seed}: an innocent changed its colour"
        if changed:
            changes.append((now_s, changed[WorkerId("w0")].colour))
        now_s += HEARTBEAT_S
    return changes


@pytest.mark.parametrize("slow", [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.8, 2.0, 4.0])
def test_figures_that_wander_by_a_fifth_move_nobody_to_and_fro(slow: float) -> None:
    changes = [len(played(slow, 3600.0, seed=seed)) for seed in range(4)]
    # The first verdict, at most two colours up, and a change of mind now and then right at a threshold.
    assert sum(changes) / len(changes) <= 3.0, changes


@pytest.mark.parametrize(
    ("slow", "colour", "within_s"),
    [(1.5, Colour.YELLOW, 30.0), (2.0, Colour.RED, 60.0), (4.0, Colour.RED, 20.0)],
)
def test_who_becomes_slow_is_seen_in_time(slow: float, colour: Colour, within_s: float) -> None:
    rng, paces, now_s = random.Random(7), Paces(), 0.0
    began_s = 100.0
    while now_s < began_s + within_s:
        for number in range(4):
            factor = slow if number == 0 and now_s >= began_s else 1.0
            paces.observe(WorkerId(f"w{number}"), Figures(factor * math.exp(rng.gauss(0, 0.2)), 1.0), now_s)
        paces.judge(now_s)
        if now_s < began_s:
            assert paces.verdict(WorkerId("w0")).colour is Colour.GREEN
        now_s += HEARTBEAT_S
    verdict = paces.verdict(WorkerId("w0"))
    assert verdict.colour is colour
    assert verdict.cause is Cause.COMPUTE
    assert "slower than planned" in verdict.words()


def judged(*figures: Figures, times: int = 40) -> Paces:
    paces = Paces()
    for turn in range(times):
        for number, known in enumerate(figures):
            paces.observe(WorkerId(f"w{number}"), known, turn * HEARTBEAT_S)
        paces.judge(turn * HEARTBEAT_S)
    return paces


def test_a_plan_that_was_too_rosy_makes_nobody_a_straggler() -> None:
    paces = judged(*[Figures(3.0, 1.0)] * 4)
    assert {paces.verdict(WorkerId(f"w{n}")).colour for n in range(4)} == {Colour.GREEN}
    assert judged(Figures(9.0, 1.0)).verdict(WorkerId("w0")).colour is Colour.GREEN, "alone"


def test_of_two_the_slower_one_is_the_straggler() -> None:
    paces = judged(Figures(1.0, 1.0), Figures(2.5, 1.0))
    colours = [paces.verdict(WorkerId(f"w{n}")).colour for n in range(2)]
    assert colours == [Colour.GREEN, Colour.RED]
    assert paces.verdict(WorkerId("w1")).slowdown == pytest.approx(2.5, rel=0.01)


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        (Figures(2.0, 1.0), Cause.COMPUTE),
        (Figures(2.0, 1.0, slowed_by=SlowedBy.HEAT), Cause.HEAT),
        (Figures(2.0, 1.0, slowed_by=SlowedBy.POWER), Cause.POWER),
        (Figures(1.0, 1.0, room_s=5.0), Cause.QUEUE),
        (Figures(1.0, 1.0, slowed_by=SlowedBy.HEAT), Cause.NONE),
    ],
)
def test_causes_are_told_apart(figures: Figures, cause: Cause) -> None:
    paces = judged(figures, *[Figures(1.0, 1.0)] * 2)
    assert paces.verdict(WorkerId("w0")).cause is cause


def test_an_uplink_counts_when_it_takes_longer_than_the_device_and_than_it_did() -> None:
    paces = Paces()
    for turn in range(80):
        push_s = 0.5 if turn < 20 else 3.0
        paces.observe(WorkerId("w0"), Figures(1.0, 1.0, push_s=push_s), turn * HEARTBEAT_S)
        for other in ("w1", "w2"):
            # Far from everybody, and always was: no straggler.
            paces.observe(WorkerId(other), Figures(1.0, 1.0, push_s=4.0), turn * HEARTBEAT_S)
        paces.judge(turn * HEARTBEAT_S)
        if turn == 19:
            assert paces.verdict(WorkerId("w0")).colour is Colour.GREEN
    verdict = paces.verdict(WorkerId("w0"))
    assert (verdict.colour, verdict.cause) == (Colour.RED, Cause.UPLINK)
    assert paces.verdict(WorkerId("w1")).colour is Colour.GREEN


def test_who_is_well_again_stays_so_for_a_while_before_its_colour_changes() -> None:
    paces = Paces()

    def play(slow: float, begin_s: float, seconds: float) -> Colour:
        now_s = begin_s
        while now_s < begin_s + seconds:
            paces.observe(WorkerId("w0"), Figures(slow, 1.0), now_s)
            paces.observe(WorkerId("w1"), Figures(1.0, 1.0), now_s)
            paces.judge(now_s)
            now_s += HEARTBEAT_S
        return paces.verdict(WorkerId("w0")).colour

    assert play(3.0, 0.0, 60.0) is Colour.RED
    assert play(1.0, 60.0, 40.0) is Colour.RED
    assert play(1.0, 100.0, 80.0) is Colour.GREEN


def test_nothing_is_known_before_a_few_figures_and_nonsense_is_no_figure() -> None:
    paces = judged(Figures(5.0, 1.0), Figures(1.0, 1.0), times=FIGURES_LEAST - 1)
    assert paces.verdict(WorkerId("w0")).colour is Colour.GREEN
    paces = judged(Figures(0.0, 1.0), Figures(1.0, 0.0), Figures(-1.0, 1.0))
    assert paces.level == 0.0
    assert swarm_level([]) == 0.0
    assert swarm_level([3.0, 1.0, 2.0, 4.0]) == 2.0
