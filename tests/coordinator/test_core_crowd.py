"""The core with very many members: nobody's joining costs a look at everybody, and nothing is forgotten by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from starlings_coordinator.core.core import Core
from starlings_coordinator.core.effects import ComputePlan, Effect, Send
from starlings_coordinator.core.events import (
    Booted,
    Event,
    KeeperStarted,
    Now,
    Ticked,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from starlings_coordinator.core.planning import CROWD, Planning
from starlings_protos.messages import Hello, ProbeReport, Welcome, WorkerId
from support.core_world import config

SECONDS = {"embed": 0.01, "layer": 0.01, "head": 0.01}
REPORT = ProbeReport(SECONDS, SECONDS, 1 << 30, ("127.0.0.1:1",))
COUNT = CROWD + 100


class Crowd:
    """Workers by number; worker n is on host n // `per_host`."""

    def __init__(self, per_host: int) -> None:
        self.core = Core(config(swarm={"min_workers": COUNT, "settle_s": 1.0}))
        self.per_host = per_host
        self.now_s = 0.0
        self.probing: list[int] = []
        self.effects: list[Effect] = []
        self.feed(Booted())
        self.feed(KeeperStarted(("127.0.0.1:1",), (0,)))

    def feed(self, event: Event) -> None:
        _, effects = self.core.handle(event, Now(self.now_s, self.now_s))
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Welcome) and effect.message.probe_now:
                self.probing.append(effect.session)

    def join(self, number: int) -> None:
        hello = Hello(
            self.id(number), 1, 1, "", host_id=f"host-{number // self.per_host}", session_nonce=number
        )
        self.feed(WorkerConnected(number, hello))

    def answer(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.feed(WorkerSaid(number, self.id(number), REPORT))

    @staticmethod
    def id(number: int) -> WorkerId:
        return WorkerId(f"w{number:016x}")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that everybody was looked at, to see what is waited for."""
    found: list[int] = []
    look = Planning._obstacle

    def counted(planning: Planning) -> object:
        found.append(len(planning._core.members))
        return look(planning)

    monkeypatch.setattr(Planning, "_obstacle", counted)
    return found


def test_many_that_join_at_once_are_all_measured_and_planned_with(looks: list[int]):
    crowd = Crowd(per_host=2)
    for number in range(COUNT):
        crowd.join(number)
    while crowd.probing:
        asked, crowd.probing = crowd.probing, []
        assert len({number // 2 for number in asked}) == len(asked), "two of one host are measured at once"
        crowd.answer(asked)
    assert all(member.probe is not None for member in crowd.core.members.values())
    assert max(looks) <= CROWD, "a message of one in a crowd was a look at everybody"
    # What they wait for is known a tick later, and they are planned with once nobody has come for a while.
    for _ in range(3):
        crowd.now_s += 1.0
        crowd.feed(Ticked())
    (plan,) = (effect for effect in crowd.effects if isinstance(effect, ComputePlan))
    assert len(plan.request.workers) == COUNT


def test_who_goes_while_being_measured_makes_room_for_the_next_of_the_host():
    crowd = Crowd(per_host=3)
    for number in (0, 1, 2):
        crowd.join(number)
    assert crowd.probing == [0]
    crowd.feed(WorkerDisconnected(0, crowd.id(0)))
    assert crowd.probing == [0, 1]
    # It comes back as the same life, in the middle of its measurement; the third waits for both.
    crowd.feed(WorkerConnected(7, crowd.core.members[crowd.id(0)].hello))
    assert crowd.probing == [0, 1, 7]
    crowd.answer([1])
    assert crowd.probing == [0, 1, 7]
    assert crowd.core.membership.is_measuring
    crowd.feed(WorkerSaid(7, crowd.id(0), REPORT))
    assert crowd.probing == [0, 1, 7, 2]
    crowd.answer([2])
    assert not crowd.core.membership.is_measuring


def test_who_comes_back_from_another_host_is_measured_there():
    crowd = Crowd(per_host=2)
    crowd.join(0)
    crowd.join(1)
    hello = replace(crowd.core.members[crowd.id(1)].hello, host_id="elsewhere")
    crowd.feed(WorkerDisconnected(1, crowd.id(1)))
    crowd.feed(WorkerConnected(9, hello))
    assert crowd.probing == [0, 9]
