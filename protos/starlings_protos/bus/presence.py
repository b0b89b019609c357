"""Whether a worker is there, as far as the bus knows. Pure.

Two connections of one worker can overlap: a machine that slept opens a new one, and only later the broker gives up the
old one and publishes its will. So a session is over for good once a newer one has said `online`, and whatever still
comes from it says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos import bus_pb2

# Sessions that are over and remembered. A will can be late by minutes, not by this many reconnections.
_PAST_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Present:
    """What is known of one worker."""

    # The word that counts.
    status: bus_pb2.BusStatus
    # On the reader's clock.
    heard_at_s: float
    # Sessions that were followed by a newer one.
    past: tuple[int, ...] = ()
    # Words of past sessions that were dropped.
    stale: int = 0


def fold(known: Present | None, status: bus_pb2.BusStatus | None, now_s: float) -> Present | None:
    """What is known after `status`; None: the worker is forgotten (its retained status was cleared)."""
    if status is None:
        return None
    if known is None:
        return Present(status, now_s)
    if status.session in known.past:
        return Present(known.status, known.heard_at_s, known.past, known.stale + 1)
    if status.session != known.status.session:
        if status.presence != bus_pb2.PRESENCE_ONLINE and known.status.presence == bus_pb2.PRESENCE_ONLINE:
            # Nobody has heard of this session before: it ended before we came, or is forged. The present one goes on.
            return Present(known.status, known.heard_at_s, known.past, known.stale + 1)
        past = (*known.past, known.status.session)[-_PAST_LIMIT:]
        return Present(status, now_s, past, known.stale)
    ended = known.status.presence == bus_pb2.PRESENCE_OFFLINE
    is_will = status.presence == bus_pb2.PRESENCE_LOST
    if ended or (not is_will and status.sequence <= known.status.sequence):
        # A goodbye is the last word, and QoS 1 may deliver twice.
        return Present(known.status, known.heard_at_s, known.past, known.stale + 1)
    return Present(status, now_s, known.past, known.stale)


def contradicts(own: bus_pb2.BusStatus, heard: bus_pb2.BusStatus | None) -> bool:
    """Whether the worker that last said `own` must say it again, because the broker keeps something else."""
    return heard is None or heard.session != own.session or heard.presence != own.presence
