"""All that the core needs to know of the job and of how patient to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlings_job.profile import Profile
from starlings_job.source_ranges import SourceRange
from starlings_job.spec import JobSpec
from starlings_protos.telemetry import TELEMETRY_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. Raising one costs what its comment says."""

    # The least heartbeat interval, and workers per second of it: interval = max(least, workers / per_second).
    heartbeat_least_s: float = 2.0
    heartbeats_per_second: float = 250.0
    # The same for counters, where they come over the control stream.
    telemetry_least_s: float = TELEMETRY_INTERVAL_S
    telemetries_per_second: float = 2000.0
    # Until every worker has been told of a new interval, at most, besides two of the old ones; later, a swarm that has
    # shrunk is slower to notice a loss.
    heartbeat_told_s: float = 15.0
    # A stream that ended may come back this long; a dead worker is noticed that much later.
    # Less than a reconnecting worker's first pause and a TLS handshake over a slow link would drop it for a hiccup.
    reconnect_grace_s: float = 1.5
    # After a restart of the coordinator: workers try again every 30 s at least, whatever the outage lasted.
    restart_grace_s: float = 45.0
    # Silence on an open stream; at least this, and at least `silent_intervals` heartbeats.
    silence_least_s: float = 6.0
    silent_intervals: float = 3.0
    # Beside what a piece of work on the device may take at most: longer, and without anything else done, it hangs. Less
    # would give up machines that were busy with something else for a moment.
    hung_least_s: float = 90.0
    # Loading a span; a stuck download holds everybody up that long.
    load_s: float = 600.0
    probe_s: float = 180.0
    # An exchange, from opening to the last Prepared, at least; longer for more bytes over slower uplinks.
    exchange_s: float = 60.0
    unknown_uplink_bytes_per_s: float = 1.25e6
    # Digests or averaging at the end.
    digest_s: float = 120.0
    # A microbatch from grant to acknowledgement, at least; longer on slow devices.
    lease_s: float = 120.0
    # A forward-only lease at the end.
    forward_lease_s: float = 60.0
    save_s: float = 600.0
    plan_s: float = 120.0
    # A worker that failed the others is not planned with for this long, doubling each time up to the second.
    set_aside_s: float = 30.0
    set_aside_most_s: float = 900.0
    # Workers that are being measured, or that keep coming and going, hold planning up no longer than this.
    gather_most_s: float = 300.0
    retry_s: float = 5.0


@dataclass(frozen=True, slots=True)
class CoreConfig:
    job: JobSpec
    profile: Profile
    # Training samples and held-out samples.
    population: int
    held_out_count: int
    # Target tokens of the given training samples (masks differ): the loss denominator of a step.
    count_targets: Callable[[tuple[int, ...]], int]
    assignment_key_der: bytes = b""
    # Of the training samples, where `[data] skew` needs to know.
    sources: tuple[SourceRange, ...] = ()
    timings: Timings = Timings()
    # Attempts at one step before the job fails; every one of them names its reason.
    attempts_limit: int = 20
    # Failed exchanges or unreachable reports within one step before a worker is dropped.
    strikes_limit: int = 3
    generated_tokens: int = 100

    @property
    def microbatches(self) -> int:
        return self.job.microbatches_per_step

    def heartbeat_interval_s(self, worker_count: int) -> float:
        return max(self.timings.heartbeat_least_s, worker_count / self.timings.heartbeats_per_second)

    def telemetry_interval_s(self, worker_count: int) -> float:
        """Over the bus it costs the coordinator nothing, however many they are."""
        if self.job.bus.url:
            return self.timings.telemetry_least_s
        return max(self.timings.telemetry_least_s, worker_count / self.timings.telemetries_per_second)
