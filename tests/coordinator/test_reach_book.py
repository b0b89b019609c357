"""Who is dialled, who is told to hold tunnels, and what everybody else hears of it."""

from __future__ import annotations

from starlings_coordinator.reach.book import (
    DOUBT_S,
    LOOK_AGAIN_S,
    RETRY_S,
    Dial,
    Publish,
    Reach,
    ReachBook,
    ReachEffect,
    Tell,
)
from starlings_protos.messages import WorkerId
from starlings_protos.reach_messages import ReachReport, RelayPlace, Route

A, B = WorkerId("w" + "a" * 16), WorkerId("w" + "b" * 16)
OWN = RelayPlace("relay", ("203.0.113.1:7704",))
HOME = ReachReport(("192.168.1.5:7710",))


def book() -> ReachBook:
    made = ReachBook()
    assert made.relay_started(OWN.addresses, 0.0) == []
    return made


def told(effects: list[ReachEffect], worker_id: WorkerId) -> list[Tell]:
    return [e for e in effects if isinstance(e, Tell) and e.worker_id == worker_id]


def published(effects: list[ReachEffect]) -> list[Route]:
    return [route for e in effects if isinstance(e, Publish) for route in e.routes.routes]


def test_a_worker_is_dialled_where_it_says_and_where_it_comes_from() -> None:
    effects = book().reported(A, "198.51.100.7", HOME, 1.0)
    assert effects == [Dial(A, ("192.168.1.5:7710", "198.51.100.7:7710"))]


def test_nobody_is_dialled_before_the_relay_runs() -> None:
    made = ReachBook()
    assert made.reported(A, "198.51.100.7", HOME, 1.0) == []
    assert [type(e) for e in made.relay_started(OWN.addresses, 2.0)] == [Dial]


def test_who_is_reached_where_it_says_costs_nobody_a_message() -> None:
    made = book()
    made.reported(A, "10.0.0.5", ReachReport(("10.0.0.5:7710",)), 1.0)
    effects = made.answered(A, ("10.0.0.5:7710",), "", 2.0)
    (tell,) = told(effects, A)
    assert tell.order.relays == ()
    assert tell.order.seen_host == "10.0.0.5"
    assert published(effects) == []
    assert made.reach(A) is Reach.DIRECT
    assert made.tick(2.0 + LOOK_AGAIN_S - 1) == []
    assert made.tick(2.0 + LOOK_AGAIN_S)


def test_a_forwarded_port_is_told_to_everybody() -> None:
    made = book()
    made.reported(A, "198.51.100.7", HOME, 1.0)
    effects = made.answered(A, ("198.51.100.7:7710",), "192.168.1.5:7710: no answer", 2.0)
    assert published(effects) == [Route(A, ("198.51.100.7:7710",))]
    assert made.reach(A) is Reach.DIRECT


def test_who_is_not_reached_holds_tunnels_and_peers_hear_through_which_relay() -> None:
    made = book()
    made.reported(A, "198.51.100.7", HOME, 1.0)
    (tell,) = told(effects := made.answered(A, (), "198.51.100.7:7710: TCP failed", 5.0), A)
    assert tell.order.relays == (OWN,)
    assert "TCP" in tell.order.why
    assert published(effects) == []
    assert made.reach(A) is Reach.NOT
    effects = made.reported(A, "198.51.100.7", ReachReport(HOME.addresses, (), ("relay",)), 6.0)
    assert published(effects) == [Route(A, (), (OWN,))]
    assert made.reach(A) is Reach.RELAYED
    assert made.relayed() == frozenset({A})
    assert made.routes().routes == (Route(A, (), (OWN,)),)


def test_it_is_dialled_again_and_keeps_tunnels_until_two_good_answers() -> None:
    made = book()
    made.reported(A, "198.51.100.7", ReachReport(HOME.addresses, (), ("relay",)), 1.0)
    made.answered(A, (), "no answer", 2.0)
    assert made.tick(2.0 + RETRY_S - 1) == []
    assert [type(e) for e in made.tick(2.0 + RETRY_S)] == [Dial]
    effects = made.answered(A, ("198.51.100.7:7710",), "", 23.0)
    assert published(effects) == [Route(A, ("198.51.100.7:7710",), (OWN,))]
    assert made.reach(A) is Reach.PARTLY
    assert told(effects, A)[-1].order.relays == (OWN,)
    assert [type(e) for e in made.tick(23.0 + RETRY_S)] == [Dial]
    effects = made.answered(A, ("198.51.100.7:7710",), "", 44.0)
    assert told(effects, A)[-1].order.relays == ()
    made.reported(A, "198.51.100.7", HOME, 45.0)
    assert made.reach(A) is Reach.DIRECT


def test_another_address_is_dialled_at_once() -> None:
    made = book()
    made.reported(A, "198.51.100.7", HOME, 1.0)
    made.answered(A, (), "no answer", 2.0)
    effects = made.reported(A, "198.51.100.8", HOME, 3.0)
    assert Dial(A, ("192.168.1.5:7710", "198.51.100.8:7710")) in effects


def test_who_comes_back_is_told_again() -> None:
    made = book()
    made.reported(A, "198.51.100.7", HOME, 1.0)
    made.answered(A, (), "no answer", 2.0)
    assert told(made.reported(A, "198.51.100.7", HOME, 3.0), A)


def test_whom_a_peer_cannot_reach_holds_tunnels_for_a_while() -> None:
    made = book()
    made.reported(A, "10.0.0.5", ReachReport(("10.0.0.5:7710",)), 1.0)
    made.answered(A, ("10.0.0.5:7710",), "", 2.0)
    (tell,) = told(made.doubted(A, 3.0), A)
    assert tell.order.relays == (OWN,)
    made.answered(A, ("10.0.0.5:7710",), "", 300.0)
    assert told(made.answered(A, ("10.0.0.5:7710",), "", DOUBT_S), A) == []
    (tell,) = told(made.answered(A, ("10.0.0.5:7710",), "", DOUBT_S + 4.0), A)
    assert tell.order.relays == ()


def test_a_worker_that_relays_and_was_reached_is_offered_to_others_first() -> None:
    made = book()
    offer = ReachReport(("203.0.113.9:7710",), ("203.0.113.9:7800",))
    (dial,) = made.reported(B, "203.0.113.9", offer, 1.0)
    assert isinstance(dial, Dial)
    assert "203.0.113.9:7800" in dial.addresses
    made.reported(A, "198.51.100.7", HOME, 1.0)
    made.answered(A, (), "no answer", 2.0)
    effects = made.answered(B, ("203.0.113.9:7710", "203.0.113.9:7800"), "", 3.0)
    (tell,) = told(effects, A)
    assert tell.order.relays == (RelayPlace(B, ("203.0.113.9:7800",)), OWN)
    effects = made.reported(A, "198.51.100.7", ReachReport(HOME.addresses, (), (B, "relay")), 4.0)
    assert published(effects) == [Route(A, (), (RelayPlace(B, ("203.0.113.9:7800",)), OWN))]
    assert made.relays_of(A) == (B, "relay")
