"""Whom `demo --kill-one-at` may kill."""

from __future__ import annotations

import pytest

from starlings.demo.kill import Kill, choose_victim
from starlings.demo.swarm import Swarm
from starlings.failures import CommandError
from starlings_protos import control_pb2
from starlings_protos.common_pb2 import Span


def worker(name: str, first: int, last: int, state: str = "training") -> control_pb2.WorkerStatus:
    return control_pb2.WorkerStatus(
        worker_id=name, state=state, span=Span(first_stage=first, last_stage=last)
    )


def test_all_stages_of_the_victim_have_other_holders_and_it_has_most_of_them() -> None:
    fleet = [worker("wa", 0, 2), worker("wb", 2, 4), worker("wc", 0, 1), worker("wd", 3, 3)]
    assert choose_victim(fleet) == "wa"
    assert choose_victim(fleet[1:]) == "wd", "without wa only the last one shares all that it holds"


@pytest.mark.parametrize(
    "fleet",
    [
        [],
        [worker("wa", 0, 2)],
        [worker("wa", 0, 1), worker("wb", 1, 2)],
        [worker("wa", 0, 1), worker("wb", 0, 1, state="loading")],
        [worker("wa", 0, 1), control_pb2.WorkerStatus(worker_id="wb", state="standby")],
    ],
)
def test_nobody_is_killed_who_alone_holds_a_stage(fleet: list[control_pb2.WorkerStatus]) -> None:
    assert choose_victim(fleet) is None


def test_it_waits_for_its_step_and_says_when_nobody_can_be_spared() -> None:
    kill = Kill(at_step=5)
    swarm = Swarm.__new__(Swarm)
    early = control_pb2.StatusReply(phase="training", step=4)
    assert not kill.look(early, swarm)
    ripe = control_pb2.StatusReply(phase="training", step=5, workers=[worker("wa", 0, 0)])
    with pytest.raises(CommandError, match="more --workers"):
        kill.look(ripe, swarm)
    assert not kill.done


def test_the_report_tells_what_the_coordinator_said() -> None:
    kill = Kill(5, worker_id="wa", name="worker 1", step=6, at_s=10.0)
    events = [
        control_pb2.Event(at_s=2.0, kind="lost", text="wa was lost: long ago"),
        control_pb2.Event(at_s=11.5, kind="lost", text="wa was lost: its connection ended"),
    ]
    report = kill.report(events)
    assert report["noticed_after_s"] == 1.5
    assert report["said"] == "wa was lost: its connection ended"
    assert kill.report([])["noticed_after_s"] is None
