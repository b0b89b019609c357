"""The owner's hand on whole `sync` swarms in trouble: pauses, workers sent away, on top of every kind of fault.

The simulation's invariants hold after every event, and what may not be is checked beside them: nothing is leased in a
pause but to end a step that has begun, and nothing to who was sent away.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from starlings_coordinator.core.effects import Send
from starlings_coordinator.core.events import (
    EvictionRequested,
    OwnerCommand,
    PauseRequested,
    ReadmissionRequested,
    ResumeRequested,
)
from starlings_protos.messages import LeaseGrant, LeaseKind, WorkerId
from starlings_simulator.cores import simulation_of
from starlings_simulator.scenario import draw
from starlings_simulator.simulation import Simulation
from support.simulated import judge, losing


class OwnersHand:
    """Says what it wants as soon as the coordinator can hear it."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.simulation = simulation
        self.rng = random.Random(f"owner:{seed}")
        self.said: Counter[str] = Counter()
        self._number = 0
        calm_s = simulation.scenario.calm_at_s
        clock, workers = simulation.world.clock, sorted(simulation.hosts)
        for _ in range(self.rng.randint(1, 3)):
            clock.at(self.rng.uniform(2.0, max(20.0, calm_s)), self.pause)
        for _ in range(self.rng.randint(0, 2)):
            victim = self.rng.choice(workers)
            clock.at(self.rng.uniform(4.0, max(20.0, calm_s)), lambda v=victim: self.evict(v))  # type: ignore[misc]
        send = simulation.coordinator._send

        def watched(effect: Send) -> None:
            self.look(effect)
            send(effect)

        simulation.coordinator._send = watched  # type: ignore[method-assign]

    @property
    def is_heard(self) -> bool:
        process = self.simulation.coordinator.process
        return process.alive and not process.frozen

    def say(self, command: OwnerCommand, then: Callable[[], object] = lambda: None) -> None:
        """Again and again until it is answered; `then`: if it was done."""
        coordinator = self.simulation.coordinator
        known = len(coordinator.answers)
        if self.is_heard:
            coordinator.handle(command)
        if len(coordinator.answers) == known:
            # Not heard, or killed between the record and the answer.
            self.simulation.world.clock.after(1.0, lambda: self.say(command, then))
            return
        answer = coordinator.answers[-1]
        self.said[f"{type(command).__name__} {'refused' if answer.refused else answer.reply.changed}"] += 1
        if not answer.refused:
            then()

    def pause(self) -> None:
        pause_s = self.rng.uniform(0.5, 15.0)
        self.say(
            PauseRequested(0, "simulated"),
            lambda: self.simulation.world.clock.after(pause_s, lambda: self.say(ResumeRequested(0))),
        )

    def evict(self, victim: WorkerId) -> None:
        world, host = self.simulation.world, self.simulation.hosts[victim]
        back_s = self.rng.uniform(4.0, 12.0)

        def back() -> None:
            world.harm(victim)
            if host.stopped is not None:
                self.again(victim)

        def gone() -> None:
            world.harm(victim)
            # Whoever comes too early is turned away.
            world.clock.after(1.0, lambda: host.come_back() if host.stopped is not None else False)
            world.clock.after(back_s, lambda: self.say(ReadmissionRequested(0, victim), back))

        world.harm(victim, for_s=60.0)
        self.say(EvictionRequested(0, victim, "simulated", 1e6), gone)

    def again(self, victim: WorkerId) -> None:
        if not self.simulation.hosts[victim].come_back():
            self.simulation.world.clock.after(1.0, lambda: self.again(victim))

    def look(self, effect: Send) -> None:
        if not isinstance(effect.message, LeaseGrant):
            return
        state = self.simulation.coordinator.core.state  # type: ignore[attr-defined]
        assert effect.worker_id not in state.evicted, f"{effect.worker_id} was sent away, and is given work"
        trains = any(lease.key.kind is LeaseKind.TRAIN for lease in effect.message.leases)
        ledger = self.simulation.coordinator.core.ledger  # type: ignore[attr-defined]
        if trains and state.pause is not None and ledger is not None:
            begun = ledger.done or len(ledger.leases) > len(effect.message.leases)
            self.said["leased in a pause"] += 1
            assert begun, "a step begins in a pause"


def play(seed: int, *, loses: bool) -> Counter[str]:
    scenario = losing(seed) if loses else draw(seed)
    simulation = simulation_of(scenario, "real")
    hand = OwnersHand(simulation, seed)
    outcome = simulation.run()
    judge(scenario, outcome)
    return hand.said


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize(
    "seeds",
    [range(12), *(pytest.param(range(a, a + 50), marks=pytest.mark.slow) for a in range(12, 212, 50))],
    ids=str,
)
def test_swarms_keep_their_promises_under_an_owners_hand(seeds: range, loses: bool) -> None:
    said = sum((play(seed, loses=loses) for seed in seeds), Counter[str]())
    assert said["PauseRequested True"] > 3
    assert said["ResumeRequested True"] > 3
    assert said["EvictionRequested True"] > 1
