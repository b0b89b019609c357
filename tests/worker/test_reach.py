"""A worker's part in being reached: its own relay, its reports, and the words for people."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

from starlings_protos import control_pb2
from starlings_protos.reach_messages import ReachReport
from starlings_protos.relay.dial_back import dial_back
from starlings_worker.narrator import Narrator
from starlings_worker.options import WorkerEvent
from starlings_worker.reach import WorkerReach
from support.peer_servers import Certificates


async def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        await asyncio.sleep(0.02)


async def test_a_worker_that_agreed_relays_and_comes_back_on_its_port(tmp_path: Path) -> None:
    identity = Certificates().worker()
    said: list[ReachReport] = []
    reach = WorkerReach(
        lambda: identity,
        "127.0.0.1",
        lambda: ("127.0.0.1:9",),
        said.append,
        Narrator(lambda event: None),
        random.Random(1),
        (2e6, tmp_path / "relay.log"),
    )
    reach.report()
    await until(lambda: said[-1].relay_addresses)
    reached, _ = await dial_back(identity.id, said[-1].relay_addresses, identity)
    assert reached == said[-1].relay_addresses
    first = said[-1].relay_addresses
    assert reach._own_relay is not None
    assert reach._own_relay._process is not None
    reach._own_relay._process.kill()
    await until(lambda: not said[-1].relay_addresses)
    await until(lambda: said[-1].relay_addresses)
    assert said[-1].relay_addresses == first
    await reach.renewed()
    await reach.close()


async def test_people_are_told_once_that_they_are_not_reachable_and_when_they_are() -> None:
    told: list[WorkerEvent] = []
    identity = Certificates().worker()
    reach = WorkerReach(
        lambda: identity, "0.0.0.0", lambda: (), lambda _: None, Narrator(told.append), random.Random(1)
    )
    place = control_pb2.RelayPlace(relay_id="relay", addresses=["127.0.0.1:1"])
    hidden = control_pb2.ReachOrder(seen_host="198.51.100.7", relays=[place], why="TCP failed")
    for order in (hidden, hidden, control_pb2.ReachOrder(reached=["198.51.100.7:7710"])):
        assert reach.heard(control_pb2.ToWorker(reach_order=order))
    assert [event.data["reachable"] for event in told] == [False, True]
    assert "TCP failed" in told[0].text
    assert "Forwarding" in told[0].text
    assert not reach.heard(control_pb2.ToWorker(routes=control_pb2.Routes()))
    assert reach.kept == ()
    await reach.close()
