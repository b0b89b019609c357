"""Jobs of `schedule = "async"` on the core's fakes: workers keep what they lease until the test lets them train."""

from __future__ import annotations

from typing import Any

from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.records import LeaseBlockGranted, SamplesAcknowledged
from support.core_world import World, config

PIPELINE = {"wa": (0, 1), "wb": (2, 2), "wc": (0, 2), "wd": (2, 2)}


def streaming(steps: int = 4, **overrides: Any) -> CoreConfig:
    """`steps` steps of 4 microbatches of 2 samples."""
    overrides["job"] = {"name": "test", "tokens": steps * 8 * 64, "seed": 7}
    overrides["train"] = {"schedule": "async", **overrides.get("train", {})}
    return config(**overrides)


def lazy_world(steps: int = 100, spans: dict[str, tuple[int, int]] | None = None, **overrides: Any) -> World:
    """Whoever leases keeps its leases until the test says `World.train`."""
    world = World(streaming(steps, **overrides), spans or PIPELINE)
    world.boot()
    for name in world.spans:
        world.join(name, lazy=True)
    for _ in range(6):
        if world.core.phase.value == "training":
            return world
        world.tick()
    raise AssertionError(world.core.waiting_words())


def trained(world: World) -> list[tuple[int, int]]:
    """(epoch, position) of everything that was acknowledged, in order."""
    blocks = {r.lease: r for r in world.records if isinstance(r, LeaseBlockGranted)}
    return [
        (blocks[lease].epoch, position)
        for record in world.records
        if isinstance(record, SamplesAcknowledged)
        for lease, first, end in record.accepted
        for position in range(first, end)
    ]
