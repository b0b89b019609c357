"""Links as fluids: what transfers take when they share them, against figures that are worked out by hand."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_simulator.clock import Clock
from starlings_simulator.timed.links import Links, Transfer, fill
from starlings_simulator.timed.machines import Site, Swarm


class Bench:
    def __init__(self, *sites: Site) -> None:
        self.clock = Clock()
        self.links = Links(self.clock, Swarm({site.name: site for site in sites}, ()))
        self.done_s: dict[str, float] = {}

    def send(
        self, name: str, source: str, target: str, byte_count: float, *, urgent: bool = True
    ) -> Transfer:
        def done() -> None:
            self.done_s[name] = self.clock.now_s

        return self.links.start(source, target, byte_count, "test", done, urgent=urgent)

    def run(self) -> dict[str, float]:
        while self.clock.step():
            pass
        return self.done_s


A, B, C = Site("a", 100.0, 1000.0), Site("b", 50.0, 1000.0), Site("c", 1000.0, 60.0)


def test_one_transfer_has_the_narrower_of_two_links() -> None:
    bench = Bench(A, B, C)
    bench.send("up", "a", "b", 1000)
    assert bench.run() == {"up": pytest.approx(10.0)}
    bench.send("down", "a", "c", 600)
    assert bench.run()["down"] == pytest.approx(20.0)


def test_two_share_an_uplink_and_the_second_is_faster_when_the_first_is_over() -> None:
    bench = Bench(A, B)
    bench.send("short", "a", "b", 500)
    bench.send("long", "a", "b", 1000)
    done = bench.run()
    assert done["short"] == pytest.approx(10.0)
    assert done["long"] == pytest.approx(15.0)


def test_what_a_narrow_end_cannot_use_goes_to_the_others() -> None:
    bench = Bench(A, B, C)
    bench.send("narrow", "a", "c", 600)  # Of A's 100, C's downlink takes 60; even shares are 50.
    bench.send("wide", "a", "b", 500)
    done = bench.run()
    assert done["wide"] == pytest.approx(10.0)
    narrower = Bench(A, B, Site("c", 1000.0, 20.0))
    narrower.send("narrow", "a", "c", 200)
    narrower.send("wide", "a", "b", 800)
    assert narrower.run() == {"narrow": pytest.approx(10.0), "wide": pytest.approx(10.0)}


def test_urgent_transfers_go_first_and_others_do_not_stand_still() -> None:
    bench = Bench(A, B)
    slow = bench.send("background", "a", "b", 1000, urgent=False)
    bench.clock.after(5.0, lambda: bench.send("urgent", "a", "b", 500))
    bench.clock.after(6.0, lambda: 1)
    done = bench.run()
    assert done["urgent"] == pytest.approx(10.0)
    assert 14.5 < done["background"] < 15.0
    assert slow.over


def test_a_site_is_shared_by_its_workers_and_what_stays_inside_costs_its_uplink_nothing() -> None:
    bench = Bench(Site("a", 100.0, 100.0, lan_bytes_per_s=1000.0), B)
    bench.send("inside", "a", "a", 1000)
    bench.send("out", "a", "b", 1000)
    assert bench.run() == {"inside": pytest.approx(1.0), "out": pytest.approx(10.0)}
    assert bench.links.carried_bytes("a") == (pytest.approx(1000.0), 0.0)


def test_who_is_cancelled_leaves_its_share_to_others_and_never_arrives() -> None:
    bench = Bench(A, B)
    doomed = bench.send("doomed", "a", "b", 10_000)
    bench.send("other", "a", "b", 1000)
    bench.clock.after(10.0, lambda: bench.links.cancel(doomed))
    assert bench.run() == {"other": pytest.approx(15.0)}


@given(
    rate=st.floats(1.0, 1e9),
    caps=st.lists(st.one_of(st.floats(0.1, 1e9), st.just(inf)), min_size=1, max_size=12),
)
def test_water_filling_uses_all_that_can_be_used_and_is_fair(rate: float, caps: list[float]) -> None:
    transfers = [Transfer("a", "b", True, "test", 1.0, lambda: None) for _ in caps]
    offers = dict(fill(rate, list(zip(transfers, caps, strict=True))))
    given_ = [min(offers[transfer], cap) for transfer, cap in zip(transfers, caps, strict=True)]
    assert sum(given_) == pytest.approx(min(rate, sum(caps)))
    highest = max(given_)
    for share, cap in zip(given_, caps, strict=True):
        # Who has less than somebody else is bound by its own other end.
        assert share == pytest.approx(highest) or share == pytest.approx(cap)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_neither_lost_nor_carried_faster_than_the_links(seed: int) -> None:
    rng = random.Random(seed)
    sites = [Site(f"s{n}", rng.uniform(10, 100), rng.uniform(10, 100)) for n in range(5)]
    bench = Bench(*sites)
    sent: dict[str, float] = {site.name: 0.0 for site in sites}
    for number in range(60):
        source, target = rng.sample(sites, 2)
        size = rng.uniform(1, 500)
        sent[source.name] += size
        urgent = rng.random() < 0.5
        bench.clock.after(
            rng.uniform(0, 20),
            lambda n=number, s=source, t=target, b=size, u=urgent: bench.send(
                str(n), s.name, t.name, b, urgent=u
            ),
        )
    done = bench.run()
    assert len(done) == 60
    for site in sites:
        up, _ = bench.links.carried_bytes(site.name)
        assert up == pytest.approx(sent[site.name])
        # 2 % are left to what is not urgent, beside a full link.
        assert up <= 1.02 * site.up_bytes_per_s * max(done.values()) + 1e-6
