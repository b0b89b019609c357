"""Worlds as TOML:

[[site]]
name = "anna"            # short; names the namespaces
region = "eu"
nat = "symmetric"        # none | full-cone | symmetric
firewall = false         # with nat = "none": nothing may come in that was not asked for
up = "20mbit"            # tc's units; left out: as fast as it goes
down = "100mbit"
delay_ms = 20            # one way, between the site and the internet
jitter_ms = 0
loss = 0.0               # share of packets, each way
workers = 1
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

NATS = ("none", "full-cone", "symmetric")


class WorldError(Exception):
    """What is wrong with a world's file, in a sentence."""


@dataclass(frozen=True)
class Site:
    name: str
    region: str = ""
    nat: str = "symmetric"
    firewall: bool = False
    up: str = ""
    down: str = ""
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    workers: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]{1,6}", self.name):
            raise WorldError(f"a site's name is one to six letters or digits, not {self.name!r}")
        if self.nat not in NATS:
            raise WorldError(f"{self.name}: nat is one of {', '.join(NATS)}, not {self.nat!r}")
        for rate in (self.up, self.down):
            if rate and not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate):
                raise WorldError(f"{self.name}: a rate is such as 20mbit, not {rate!r}")
        if not 0 <= self.loss < 1 or self.delay_ms < 0 or self.jitter_ms < 0 or not 1 <= self.workers <= 50:
            raise WorldError(
                f"{self.name}: loss is below 1, delays are not negative, and 1 to 50 workers are there"
            )


@dataclass(frozen=True)
class World:
    sites: tuple[Site, ...]


def parse_world(text: str) -> World:
    """Raises WorldError."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WorldError(f"not TOML: {error}") from None
    known = {field.name for field in fields(Site)}
    sites = []
    for entry in raw.get("site", []):
        if unknown := sorted(set(entry) - known):
            raise WorldError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
        sites.append(Site(**entry))
    names = [site.name for site in sites]
    if not sites or len(set(names)) != len(names) or set(raw) - {"site"}:
        raise WorldError("a world has [[site]] entries with names that differ, and nothing else")
    return World(tuple(sites))


def load_world(path: Path) -> World:
    return parse_world(path.read_text("utf-8"))
