"""Any message from a peer, the coordinator or the shell, in any order: no exception, no broken rule, flat memory."""

from __future__ import annotations

import dataclasses
import random

import pytest

from starlings_protos.messages import (
    ExchangeGroup,
    ExchangeHeader,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    Hop,
    Lease,
    LeaseGrant,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Receipt,
    Refusal,
    Retain,
    Standby,
    StateWanted,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from starlings_simulator.driver import Driver, assignment
from starlings_worker.core.effects import SendMicrobatch, SendPart
from starlings_worker.core.events import (
    ArrivalAborted,
    BackwardComputed,
    ComputeFailed,
    ControlLost,
    ControlRestored,
    Direction,
    ExchangePrepared,
    ExchangeRefused,
    ForwardComputed,
    Leg,
    LoadFailed,
    MicrobatchArrived,
    MicrobatchNotSent,
    MicrobatchSent,
    PartAborted,
    PartArrived,
    PartNotSent,
    PartSent,
    ReplayFailed,
    StepApplied,
    StepReplayed,
)

WORKERS = [WorkerId(name) for name in ("a", "b", "c", "me", "z")]


class Monkey:
    """Mostly plausible nonsense: small numbers, so that keys meet."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.driver = Driver("me", seed)
        self.driver.passes = 1 + seed % 2
        self.plan_version = 0
        self.sends: list[SendMicrobatch | SendPart] = []

    def number(self, high: int) -> int:
        return self.rng.choice([self.rng.randrange(high), self.rng.randrange(high), 0, 2**31])

    def key(self) -> MicrobatchKey:
        kind = self.rng.choice([LeaseKind.TRAIN] * 4 + [LeaseKind.EVALUATE, LeaseKind.UNSPECIFIED])
        return MicrobatchKey(kind, self.step(), self.rng.randrange(3), self.rng.randrange(4))

    def step(self) -> int:
        return max(0, self.driver.core.training.epoch[0] + self.rng.choice([-1, 0, 0, 0, 0, 1, 7]))

    def worker(self) -> WorkerId:
        return self.rng.choice(WORKERS)

    def route(self) -> tuple[Hop, ...]:
        hops, stage = [], 0
        for _ in range(self.rng.randrange(4)):
            last = stage + self.rng.randrange(2)
            hops.append(Hop(self.worker(), stage if self.rng.random() < 0.9 else self.number(9), last))
            stage = last + 1
        return tuple(hops)

    def header(self) -> tuple[MicrobatchHeader, WorkerId]:
        route = self.route()
        stage = route[-1].last_stage + 1 if route and self.rng.random() < 0.8 else self.number(4)
        sender = route[-1].worker_id if route and self.rng.random() < 0.9 else self.worker()
        denominator = self.rng.choice([64.0, 64.0, 0.0, float("nan")])
        version = self.rng.choice([self.plan_version, self.plan_version, 0, 99])
        return MicrobatchHeader(self.key(), stage, route, denominator, version, 1.0, 2), sender

    def part(self) -> ExchangeHeader:
        group = self.rng.choice(["stage:0", "stage:1", "stage:2", "tied", "stage:x", "", "stage:-1"])
        attempt, number = self.rng.randrange(3), self.number(3)
        return ExchangeHeader(
            self.step(), attempt, group, number, self.plan_version, self.rng.choice([0, 0, 1, 2])
        )

    def opened(self) -> ExchangeOpened:
        groups = []
        for name in self.rng.sample(["stage:0", "stage:1", "tied"], self.rng.randrange(4)):
            members = self.rng.sample(WORKERS, self.rng.randint(1, 4))
            groups.append(
                ExchangeGroup(
                    name,
                    tuple(
                        ExchangeMember(w, self.rng.choice([0.0, 1.0]), 1 / len(members))
                        for w in sorted(members)
                    ),
                )
            )
        purpose = self.rng.choice([ExchangePurpose.GRADIENT, ExchangePurpose.GRADIENT, ExchangePurpose.STATE])
        return ExchangeOpened(
            self.step(), self.rng.randrange(3), tuple(groups), self.rng.choice([0.0, 5.0]), purpose
        )

    def act(self) -> None:
        driver, rng = self.driver, self.rng
        direction, leg = rng.choice(list(Direction)), rng.choice(list(Leg))
        match rng.randrange(22):
            case 0:
                self.plan_version += rng.choice([0, 1, 1])
                span = rng.choice([(0, 0), (0, 1), (1, 2), (0, 2)])
                peers = {name: rng.choice([(0, 0), (1, 2), (0, 2)]) for name in ("a", "b", "c")}
                slots, attempt = rng.randint(1, 4), rng.randrange(3)
                driver.hear(
                    assignment(
                        span,
                        peers,
                        stages=3,
                        slots=slots,
                        plan_version=self.plan_version,
                        step=self.step(),
                        attempt=attempt,
                        observer=rng.random() < 0.3,
                    )
                )
            case 19 if driver.core.loaded and driver.core.assignment is not None:
                # One of the others was lost, and the attempt goes on.
                self.plan_version += 1
                known, (step, attempt) = driver.core.assignment, driver.core.training.epoch
                committed = driver.core.training.commit is not None
                driver.hear(
                    dataclasses.replace(
                        known,
                        plan_version=self.plan_version,
                        peers=tuple(rng.sample(known.peers, max(0, len(known.peers) - 1))),
                        version=step + committed,
                        step=step + committed,
                        attempt=0 if committed else attempt,
                    )
                )
                assert driver.core.loaded
            case 1 | 2 | 3:
                header, sender = self.header()
                answer = driver.core.admit(direction, header, sender, driver.now_s)
                driver.core.validate()
                if isinstance(answer, Receipt):
                    event = MicrobatchArrived if rng.random() < 0.8 else ArrivalAborted
                    extra = () if event is MicrobatchArrived else ("reset",)
                    driver.handle(event(direction, header, sender, *extra))
            case 4 | 5:
                part, sender = self.part(), self.worker()
                answer = driver.core.admit_part(leg, part, sender, driver.now_s)
                if isinstance(answer, Receipt):
                    arrived = rng.random() < 0.8
                    driver.handle(
                        PartArrived(leg, part, sender) if arrived else PartAborted(leg, part, sender, "")
                    )
            case 6 | 7:
                leases = tuple(Lease(self.key(), (1, 2), 64.0, 60.0) for _ in range(rng.randrange(4)))
                driver.hear(LeaseGrant(leases))
            case 8:
                driver.hear(StepRestarted(self.step(), rng.randrange(3), ""))
            case 9 | 10:
                driver.hear(self.opened())
            case 11:
                driver.hear(StepCommitted(self.step(), rng.randrange(3), 0.1, 1.0, 1.0, rng.random() < 0.5))
            case 12:
                driver.hear(StateWanted(self.step(), rng.random() < 0.5))
            case 13:
                driver.handle(ControlLost() if rng.random() < 0.5 else ControlRestored())
            case 14:
                driver.tick(rng.choice([0.01, 0.3, 3.0]))
            case 15:
                key = self.key()
                driver.handle(
                    rng.choice(
                        [
                            ForwardComputed(key, 0.1),
                            BackwardComputed(key, 0.1),
                            ComputeFailed(key, ""),
                            MicrobatchArrived(direction, self.header()[0], self.worker()),
                            PartArrived(leg, self.part(), self.worker()),
                            ExchangePrepared(self.step(), 0, "stage:0", rng.choice([0, 1, 2])),
                            StepApplied(self.step()),
                            StepReplayed(self.step(), {}),
                            ReplayFailed(self.step(), ""),
                            LoadFailed(self.plan_version, ""),
                        ]
                    )
                )
            case 16 if rng.random() < 0.2:
                driver.hear(Standby("no span fits"))
            case 16:
                driver.hear(Retain((self.step(),), rng.random() < 0.5, self.step()))
            case 18 if driver.core.observing.active:
                self.be_told_of_progress()
            case 17 if self.sends:
                self.finish_a_send()
            case _:
                self.finish_on_the_device()
        self.sends += driver.of(SendMicrobatch) + driver.of(SendPart)

    def finish_a_send(self) -> None:
        send = self.sends.pop(self.rng.randrange(len(self.sends)))
        refusal = self.rng.choice([Refusal.UNSPECIFIED, Refusal.BUSY, Refusal.STALE, Refusal.MALFORMED])
        fine = self.rng.random() < 0.6
        if isinstance(send, SendPart):
            self.driver.handle(
                PartSent(send.leg, send.header, send.to)
                if fine
                else PartNotSent(send.leg, send.header, send.to, refusal, "")
            )
        else:
            key = send.header.key
            self.driver.handle(
                MicrobatchSent(send.direction, key, send.to, Receipt(1, 2, 3.0))
                if fine
                else MicrobatchNotSent(send.direction, key, send.to, self.rng.random() < 0.5, refusal, "")
            )

    def be_told_of_progress(self) -> None:
        """The others go on while this worker observes; sometimes it is let in."""
        driver, rng, observing = self.driver, self.rng, self.driver.core.observing
        old = driver.core.assignment
        assert old is not None
        if rng.random() < 0.5:
            for _ in range(rng.randrange(3)):
                driver.hear(StepCommitted(observing.version_ahead, rng.randrange(3), 0.1, 1.0, 1.0, False))
                if not observing.active:
                    return
            return
        self.plan_version += 1
        step = observing.version_ahead + rng.choice([0, 0, 0, 1])
        changes = {
            "plan_version": self.plan_version,
            "version": step,
            "step": step,
            "attempt": rng.randrange(3),
        }
        driver.hear(dataclasses.replace(old, observer=rng.random() < 0.1, **changes))

    def finish_on_the_device(self) -> None:
        running = self.driver.core.device.running
        if running is None:
            return
        outcome = self.driver.outcome(running)
        if isinstance(outcome, StepReplayed) and self.rng.random() < 0.1:
            outcome = ReplayFailed(outcome.step, "no donor keeps it")
        if isinstance(outcome, ExchangePrepared) and self.rng.random() < 0.1:
            outcome = ExchangeRefused(
                outcome.step, outcome.attempt, outcome.group, WorkerId("me"), "not finite"
            )
        self.driver.handle(outcome)


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_messages_breaks_the_core(seed: int) -> None:
    monkey = Monkey(seed)
    for _ in range(400):
        monkey.act()
        if monkey.driver.core.stopped:
            break
        core = monkey.driver.core
        place = core.table.place
        if place is not None:
            assert len(core.table.held) <= 4
        assert len(core.parts) < 200
        assert len(core.table.leases) <= 64
        assert len(core.table.doomed) <= 1


def test_the_monkey_gets_deep_enough_to_mean_something() -> None:
    deepest = 0
    for seed in range(20):
        monkey = Monkey(seed)
        for _ in range(400):
            monkey.act()
            deepest = max(deepest, monkey.driver.core.version)
    assert deepest >= 2
