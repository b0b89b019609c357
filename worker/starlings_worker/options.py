"""What a volunteer chooses for a worker, and what it tells whoever started it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlings_worker.uplink import NO_LINK, LinkClass


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Something that a person or a program may want to know.

    Kinds: "joined", "engine_started", "probed", "plan", "standby", "loading", "training", "step", "finished",
    "left", "reconnecting", "connected", "engine_down", "renewed", "reach", "bus", "log", "failed".
    """

    kind: str
    # One sentence for people.
    text: str
    worker_id: str = ""
    # The same in figures, JSON-able.
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """One `starlings join`. Every field has a default but the invite or the directory."""

    # The invite string; may be empty when `directory` holds a certificate already.
    invite: str = ""
    # Where identity and cache live; None = <user data>/starlings/workers/<job>.
    directory: Path | None = None
    # "" (every GPU, else the CPU), "all", "cpu", or a list such as "cuda:0,cuda:2".
    devices: str = ""
    # Where engines listen for peers. Further devices take the ports that follow; 0 = any free port.
    listen_host: str = "0.0.0.0"
    listen_port: int = 7710
    # "host" or "host:port" that peers should use instead of this machine's own addresses.
    advertise: tuple[str, ...] = ()
    # Name of a device class to pretend to be (see device_classes.py); empty = none.
    emulate: str = ""
    # An uplink to pretend to be behind, and seconds that a microbatch's way through the whole model and back shall
    # take; 0 = as long as it does. For measurements.
    emulate_link: LinkClass = NO_LINK
    emulate_pass_s: float = 0.0
    # What this worker may send, bytes/s with all headers, shared evenly by its devices; 0 = without limit.
    max_upload_bytes_per_s: float = 0.0
    # Relay for workers that cannot be reached, and at most this many bytes/s; 0 = do not. On the host's first device.
    relay_bytes_per_s: float = 0.0
    # Cap on memory per device; 0 = what is free, or what the emulated class has.
    memory_bytes: int = 0
    # Threads for computing per engine; 0 = one per core that this process may use, or one when emulating.
    threads: int = 0
    # "auto", "fp32" or "bf16".
    precision: str = "auto"
    # Workers behind one uplink share a site; empty = this host is its own site.
    site: str = ""
    region: str = ""
    # How long SIGTERM may take until the worker is gone.
    drain_s: float = 60.0
    # Called on the event loop for each event; must not block.
    on_event: Callable[[WorkerEvent], None] | None = None
