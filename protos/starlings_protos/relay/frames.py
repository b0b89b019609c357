"""What goes through a tunnel, as records; see relay.proto."""

from __future__ import annotations

from dataclasses import dataclass

# Both sides of a tunnel say this often that they live, and give it up after so long a silence: a dead relay costs its
# users `SILENT_S` and what connecting to another takes. Halving both finds it in half the time, for twice the idle
# traffic (about 60 bytes per beat and direction).
BEAT_S = 1.5
SILENT_S = 6.0
CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class TunnelOpened:
    listens: bool = False


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    connection: int
    worker_id: str
    credit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CreditGranted:
    connection: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class BytesCarried:
    connection: int
    chunk: bytes


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    connection: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    pass


TunnelFrame = TunnelOpened | ConnectionOpened | CreditGranted | BytesCarried | ConnectionEnded | Beat
