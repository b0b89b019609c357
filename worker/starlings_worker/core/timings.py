"""The worker core's own numbers: what each may choose for itself (what all must agree on is in the job)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerTimings:
    """Delays, patience and bounds.

    Every retry waits `first x 2^n`, capped, so a dead peer costs no processor time.
    """

    # A busy peer is asked again this soon at first; lower means more refused calls under back-pressure.
    busy_first_s: float = 0.02
    busy_most_s: float = 0.5
    # An unreachable peer, or one that refused otherwise.
    retry_first_s: float = 0.1
    retry_most_s: float = 2.0
    # A microbatch that cannot be placed or returned for this long is given up; the coordinator raises the
    # attempt.
    give_up_s: float = 20.0
    # A transfer whose fate is unknown is repeated to the same peer this often before it is given up.
    ambiguous_tries: int = 6
    # After this many failures in a row the coordinator is told that a peer is unreachable (once per outage).
    unreachable_after: int = 3
    # A wish for leases is repeated after this long without an answer: a message may have been lost.
    wish_repeat_s: float = 2.0
    # An exchange whose message names no deadline gets this one.
    exchange_deadline_s: float = 300.0
    # Loading is tried this often, with delays that double from the first up to the most: a coordinator's machine that
    # sleeps for half a minute, and its keeper with it, costs nobody its place.
    load_tries: int = 8
    load_retry_first_s: float = 1.0
    load_retry_most_s: float = 15.0
    # Leaving early through a boundary inside the span must beat the span's end by this factor: each boundary
    # costs bytes.
    early_exit_margin: float = 1.15
    # Weight of the newest measurement in averages of seconds.
    measurement_weight: float = 0.2

    def growing(self, first_s: float, most_s: float, tries: int) -> float:
        """Delay before try number `tries` (1 = the first repetition), seconds."""
        return min(most_s, first_s * 2.0 ** min(max(tries - 1, 0), 16))
