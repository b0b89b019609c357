"""What waits for the broker, and when it is tried again: pure."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_protos.bus.address import BusAddress, parse_bus_url
from starlings_protos.bus.link import PAUSE_FIRST_S, PAUSE_MOST_S, Link
from starlings_protos.bus.outbox import Outbox, Outgoing


def drain(outbox: Outbox) -> list[bytes]:
    taken = []
    while (message := outbox.take()) is not None:
        taken.append(message.payload)
    return taken


def test_only_the_newest_retained_message_of_a_topic_waits() -> None:
    outbox = Outbox()
    for payload in (b"1", b"2", b"3"):
        outbox.put(Outgoing("state", payload, 1, retain=True))
        outbox.put(Outgoing("other", payload, 1, retain=True))
    assert drain(outbox) == [b"3", b"3"]
    assert outbox.dropped == 0


def test_what_matters_more_goes_first_and_stays_longest() -> None:
    outbox = Outbox(unacknowledged=2, acknowledged=3)
    for number in range(5):
        outbox.put(Outgoing("telemetry", b"t%d" % number))
        outbox.put(Outgoing("event", b"e%d" % number, 1))
    outbox.put(Outgoing("state", b"s", 1, retain=True))
    assert outbox.dropped == 3 + 2
    assert drain(outbox) == [b"s", b"e2", b"e3", b"e4", b"t3", b"t4"]


def test_what_could_not_be_sent_is_next_again_unless_it_is_old_or_unimportant() -> None:
    outbox = Outbox(acknowledged=2)
    outbox.put(Outgoing("event", b"later", 1))
    outbox.put_back(Outgoing("event", b"failed", 1))
    outbox.put_back(Outgoing("event", b"no room", 1))
    outbox.put_back(Outgoing("telemetry", b"lost"))
    outbox.put(Outgoing("state", b"new", 1, retain=True))
    outbox.put_back(Outgoing("state", b"old", 1, retain=True))
    assert drain(outbox) == [b"new", b"failed", b"later"]
    assert outbox.dropped == 2


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 1), st.booleans()), max_size=600))
def test_it_is_bounded_and_counts_what_it_drops(puts: list[tuple[int, int, bool]]) -> None:
    outbox = Outbox(unacknowledged=4, acknowledged=8)
    replaced, waiting = 0, {}
    for number, (topic, qos, retain) in enumerate(puts):
        before = outbox.dropped
        replaced += retain and topic in waiting
        outbox.put(Outgoing(str(topic), b"%d" % number, qos, retain))
        if retain:
            waiting.pop(topic, None)
            if outbox.dropped > before:
                del waiting[next(iter(waiting))]
            waiting[topic] = number
    assert len(outbox) <= 4 + 8 + 8
    assert len(outbox) + outbox.dropped + replaced == len(puts)
    assert len(drain(outbox)) + outbox.dropped + replaced == len(puts)


def test_people_hear_once_that_it_is_away_and_once_that_it_is_back() -> None:
    link, said = Link(connected=False, since_s=0.0), []

    def on(change: tuple[Link, str]) -> None:
        nonlocal link
        link, line = change
        if line:
            said.append(line)

    on(link.opened(1.0))
    on(link.closed(10.0, "killed"))
    for second in range(11, 15):
        on(link.closed(float(second), "refused"))
    # Flapping: back for a moment again and again.
    for second in range(20, 30):
        on(link.opened(float(second)))
        assert link.health(0).connected
        on(link.closed(second + 0.5, "killed again"))
    assert said == ["connected", "away (killed); it is tried again"]
    assert link.failures == 15
    health = link.health(7)
    assert (health.connected, health.since_s, health.reason, health.dropped) == (
        False,
        29.5,
        "killed again",
        7,
    )
    on(link.opened(40.0))
    on(link.steady(45.0))
    on(link.steady(46.0))
    assert said[2:] == ["back after 30 s"]
    assert link.failures == 0
    on(link.closed(50.0, "gone"))
    assert said[3:] == ["away (gone); it is tried again"]


def test_a_broker_that_was_never_there_is_told_of_once() -> None:
    link, line = Link(connected=False, since_s=0.0).closed(1.0, "refused")
    assert line == "away (refused); it is tried again"
    link, line = link.opened(30.0)
    assert line == ""
    assert link.steady(35.0)[1] == "back after 29 s"


@given(st.integers(1, 64), st.integers())
def test_pauses_grow_and_are_bounded(failures: int, seed: int) -> None:
    link = Link(connected=False, since_s=0.0, failures=failures)
    pause_s = link.pause_s(random.Random(seed))
    longest = min(PAUSE_MOST_S, PAUSE_FIRST_S * 2.0 ** (failures - 1))
    assert longest / 2 <= pause_s <= longest


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mqtts://broker.example.org", BusAddress("broker.example.org", 8883, True)),
        ("mqtts://192.0.2.7:99/", BusAddress("192.0.2.7", 99, True)),
        ("mqtts://[2001:db8::1]:99", BusAddress("2001:db8::1", 99, True)),
        ("mqtt://localhost", BusAddress("localhost", 1883, False)),
        ("mqtt://127.0.0.2:5", BusAddress("127.0.0.2", 5, False)),
        ("mqtt://[::1]", BusAddress("::1", 1883, False)),
    ],
)
def test_addresses_of_a_broker(url: str, address: BusAddress) -> None:
    assert parse_bus_url(url) == address
    assert parse_bus_url(str(address)) == address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "does not begin with mqtts://"),
        ("broker.example.org:8883", "does not begin with mqtts://"),
        ("https://broker.example.org", "does not begin with mqtts://"),
        ("mqtts://", "names no host"),
        ("mqtts://a b", "names no host"),
        ("mqtts://x:0", "0 is no port"),
        ("mqtts://x:70000", "a port is 1 to 65535"),
        ("mqtts://me:secret@x", "certificates say who is who"),
        ("mqtts://x/y", "a path or a user"),
        ("mqtts://x?y", "a path or a user"),
        ("mqtt://192.168.0.7", "only for localhost"),
        ("mqtt://localhost.example.org", "write mqtts://localhost.example.org:8883"),
    ],
)
def test_what_is_no_address_of_a_broker(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=".*" + said.replace("(", r"\(")):
        parse_bus_url(url)
