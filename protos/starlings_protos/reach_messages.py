"""Records of who can be reached, and how; see control.proto."""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.vocabulary import WorkerId


@dataclass(frozen=True, slots=True)
class ReachReport:
    addresses: tuple[str, ...] = ()
    relay_addresses: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RelayPlace:
    relay_id: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReachOrder:
    seen_host: str = ""
    reached: tuple[str, ...] = ()
    relays: tuple[RelayPlace, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    worker_id: WorkerId
    addresses: tuple[str, ...] = ()
    relays: tuple[RelayPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class Routes:
    routes: tuple[Route, ...] = ()
