"""What is known of who can be reached: pure. The clock is an argument, and what to do comes back as effects."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from starlings_protos.identity import RELAY
from starlings_protos.invite import parse_address
from starlings_protos.messages import WorkerId
from starlings_protos.reach_messages import ReachOrder, ReachReport, RelayPlace, Route, Routes

# Who was not reached is dialled again so often: a direct way that appears is used within a minute, together with the
# peers' own look (`paths.UPGRADE_EVERY_S`). Who was reached is looked at rarely.
RETRY_S = 20.0
LOOK_AGAIN_S = 300.0
# No answer by then counts as none.
ANSWER_WITHIN_S = 15.0
# A worker that a peer could not reach holds tunnels for so long, whatever dialling back says.
DOUBT_S = 600.0
# Relays that one worker is told of.
RELAYS_TOLD = 4


class Reach(enum.StrEnum):
    """How a worker is reached; for status, and for who plans."""

    UNKNOWN = ""
    DIRECT = "direct"
    # Not from outside; through relays.
    RELAYED = "relayed"
    # Some reach it, others need a relay.
    PARTLY = "partly"
    # Neither way, at present.
    NOT = "unreachable"


@dataclass(frozen=True, slots=True)
class Dial:
    worker_id: WorkerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    worker_id: WorkerId
    order: ReachOrder


@dataclass(frozen=True, slots=True)
class Publish:
    """To everybody, and to the keeper."""

    routes: Routes


ReachEffect = Dial | Tell | Publish


@dataclass(frozen=True, slots=True)
class Known:
    """One worker."""

    seen_host: str
    report: ReachReport = field(default=ReachReport())
    # None: not dialled yet.
    reached: tuple[str, ...] | None = None
    relay_reached: bool = False
    why: str = ""
    doubted_until_s: float = float("-inf")
    dial_at_s: float = 0.0
    # Good answers in a row.
    good: int = 0
    # Tunnels were asked for.
    tunnels: bool = False
    told: ReachOrder | None = None


class ReachBook:
    def __init__(self) -> None:
        self._workers: dict[WorkerId, Known] = {}
        self._own_relay: RelayPlace | None = None
        self._published: dict[WorkerId, Route] = {}

    # ---------------------------------------------------------------- what happens

    def relay_started(self, addresses: tuple[str, ...], now_s: float) -> list[ReachEffect]:
        """The coordinator's own relay listens."""
        self._own_relay = RelayPlace(RELAY.id, addresses)
        # Who waits for an answer of the one before would wait in vain.
        for worker_id, known in self._workers.items():
            self._workers[worker_id] = replace(known, dial_at_s=min(known.dial_at_s, now_s))
        return [*self._everybody(now_s), *self.tick(now_s)]

    def reported(
        self, worker_id: WorkerId, seen_host: str, report: ReachReport, now_s: float
    ) -> list[ReachEffect]:
        """A worker said where it is. `seen_host` is its address as this machine sees it."""
        before = self._workers.get(worker_id, Known(seen_host))
        known = replace(before, seen_host=seen_host, report=report)
        moved = (before.seen_host, before.report.addresses, before.report.relay_addresses) != (
            seen_host,
            report.addresses,
            report.relay_addresses,
        )
        if moved or before.reached is None:
            known = replace(known, dial_at_s=now_s, good=0)
        # The stream is a new one, or something changed: it is told where it stands in any case.
        self._workers[worker_id] = replace(known, told=None) if before.report == report else known
        return [*self.tick(now_s), *self._settle(worker_id, now_s)]

    def answered(
        self, worker_id: WorkerId, reached: tuple[str, ...], failure: str, now_s: float
    ) -> list[ReachEffect]:
        """What dialling back found."""
        known = self._workers.get(worker_id)
        if known is None:
            return []
        relays = set(known.report.relay_addresses)
        data = tuple(address for address in reached if address not in relays)
        known = replace(
            known,
            reached=data,
            relay_reached=any(address in relays for address in reached),
            why="" if data else failure,
            good=known.good + 1 if data else 0,
        )
        known = replace(known, tunnels=self._needs_tunnels(known, now_s))
        again_s = LOOK_AGAIN_S if data and not known.tunnels else RETRY_S
        self._workers[worker_id] = replace(known, dial_at_s=now_s + again_s)
        return self._everybody(now_s)

    def doubted(self, worker_id: WorkerId, now_s: float) -> list[ReachEffect]:
        """A peer could not reach that worker."""
        known = self._workers.get(worker_id)
        if known is None or known.reached is None:
            return []
        self._workers[worker_id] = replace(known, doubted_until_s=now_s + DOUBT_S, tunnels=True)
        return self._settle(worker_id, now_s)

    def gone(self, worker_id: WorkerId) -> list[ReachEffect]:
        """Its stream ended: it is not told and not dialled, until it comes back. Its route stays, because peers go on
        with what they have while only the stream is down.
        """
        self._workers.pop(worker_id, None)
        return []

    def tick(self, now_s: float) -> list[ReachEffect]:
        """Every second or so."""
        effects: list[ReachEffect] = []
        if self._own_relay is None:
            return effects
        for worker_id, known in self._workers.items():
            if known.dial_at_s <= now_s and (where := candidates(known)):
                self._workers[worker_id] = replace(known, dial_at_s=now_s + max(ANSWER_WITHIN_S, RETRY_S))
                effects.append(Dial(worker_id, where))
        return effects

    # ---------------------------------------------------------------- what is known

    def reach(self, worker_id: WorkerId) -> Reach:
        known = self._workers.get(worker_id)
        if known is None or known.reached is None:
            return Reach.UNKNOWN
        relayed = bool(self._relays_of(known))
        if known.reached:
            return Reach.PARTLY if relayed else Reach.DIRECT
        return Reach.RELAYED if relayed else Reach.NOT

    def relays_of(self, worker_id: WorkerId) -> tuple[str, ...]:
        """Where it listens."""
        known = self._workers.get(worker_id)
        return tuple(place.relay_id for place in self._relays_of(known)) if known is not None else ()

    def relayed(self) -> frozenset[WorkerId]:
        """Whose links all go through relays: what a planner should know (twice the way, a shared uplink)."""
        return frozenset(w for w in self._workers if self.reach(w) is Reach.RELAYED)

    def routes(self) -> Routes:
        """All that was published: for who comes newly."""
        return Routes(tuple(self._published[w] for w in sorted(self._published)))

    # ---------------------------------------------------------------- inside

    def _needs_tunnels(self, known: Known, now_s: float) -> bool:
        if not known.reached or now_s < known.doubted_until_s:
            return True
        return known.tunnels and known.good < 2

    def _places(self, worker_id: WorkerId) -> tuple[RelayPlace, ...]:
        """Relays for one worker: one of another worker first, spread by a hash, because the owner's uplink carries
        much already; then the owner's, which is always there.
        """
        offers = [
            RelayPlace(other, known.report.relay_addresses)
            for other, known in self._workers.items()
            if known.relay_reached and other != worker_id
        ]
        offers.sort(key=lambda place: hashlib.sha256(f"{worker_id} {place.relay_id}".encode()).digest())
        own = (self._own_relay,) if self._own_relay is not None else ()
        # The owner's is the second tunnel: whoever dies, the other is there.
        return (*offers[:1], *own, *offers[1 : RELAYS_TOLD - 1])

    def _relays_of(self, known: Known) -> tuple[RelayPlace, ...]:
        places = {
            other: RelayPlace(other, found.report.relay_addresses) for other, found in self._workers.items()
        }
        if self._own_relay is not None:
            places[WorkerId(RELAY.id)] = self._own_relay
        found = (places.get(WorkerId(relay_id)) for relay_id in known.report.relays)
        return tuple(place for place in found if place is not None)

    def _everybody(self, now_s: float) -> list[ReachEffect]:
        return [effect for worker_id in sorted(self._workers) for effect in self._settle(worker_id, now_s)]

    def _settle(self, worker_id: WorkerId, now_s: float) -> list[ReachEffect]:
        """What that worker and the others are to be told, where it differs from what they were told."""
        known, effects = self._workers[worker_id], list[ReachEffect]()
        if known.reached is not None:
            places = self._places(worker_id) if known.tunnels else ()
            order = ReachOrder(known.seen_host, known.reached, places, known.why)
            if order != known.told:
                self._workers[worker_id] = replace(known, told=order)
                effects.append(Tell(worker_id, order))
        extra = tuple(a for a in known.reached or () if a not in known.report.addresses)
        route = Route(worker_id, extra, self._relays_of(known))
        if route != self._published.get(worker_id, Route(worker_id)):
            self._published[worker_id] = route
            effects.append(Publish(Routes((route,))))
        return effects


def candidates(known: Known) -> tuple[str, ...]:
    """Where to dial: what the worker says, and the same ports at the address that it comes from."""
    addresses = list(known.report.addresses)
    seen = [_at(known.seen_host, port) for port in _ports(addresses)] if known.seen_host else []
    # Loopback is this machine's own: a worker there is reached by it, and anybody else is not.
    return tuple(dict.fromkeys((*addresses, *seen, *known.report.relay_addresses)))


def _ports(addresses: Iterable[str]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(parse_address(address).port for address in addresses))


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
