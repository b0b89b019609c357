"""The workers that the coordinator knows now. Soft: it is rebuilt by their Hellos after a restart."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from starlings_coordinator.core.liveness import SilenceDetector
from starlings_job.profile import Profile
from starlings_protos.messages import (
    Heartbeat,
    Hello,
    Peer,
    PlanWorker,
    ProbeReport,
    Ready,
    Span,
    Stage,
    WorkerId,
)
from starlings_protos.telemetry import TelemetrySample


class MemberState(enum.Enum):
    JOINING = "joining"
    PROBING = "probing"
    STANDBY = "standby"
    OBSERVING = "observing"
    LOADING = "loading"
    TRAINING = "training"
    LEAVING = "leaving"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a worker gets no new work for the moment, and may be given up soon. `of_silence`: a word of it ends that."""

    since_s: float
    reason: str
    of_silence: bool = True


@dataclass(slots=True)
class Member:
    worker_id: WorkerId
    hello: Hello
    incarnation: int
    # None while the stream is down.
    session: int | None
    detector: SilenceDetector
    state: MemberState = MemberState.JOINING
    # Why it does no work, in words; "" while it does.
    reason: str = ""
    disconnected_at_s: float | None = None
    # How long its stream may stay down; longer after a restart of the coordinator, which it has to find again.
    grace_s: float = 0.0
    # Wall clock, seconds since 1970, for people.
    connected_wall_s: float = 0.0
    probe: ProbeReport | None = None
    probe_started_at_s: float | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    # Its newest counters that came here; None where telemetry goes over the bus.
    counters: TelemetrySample | None = None
    # Microbatches that it could begin now.
    wish: int = 0
    ready: Ready | None = None
    load_started_at_s: float = 0.0
    suspicion: Suspicion | None = None
    # Who could not reach it, and when each said so last.
    accused_by: dict[WorkerId, float] = field(default_factory=dict)
    # What it said with Leaving; None otherwise.
    leaving: str | None = None
    # Attempts at the present step that failed because of it.
    strikes: int = 0
    # It failed others before, so no plan counts on it until then.
    set_aside_until_s: float | None = None

    @property
    def host(self) -> str:
        """Workers of one machine name the same; one that names none is alone on its own."""
        return self.hello.host_id or self.worker_id

    @property
    def here(self) -> bool:
        return self.session is not None

    @property
    def takes_work(self) -> bool:
        return self.session is not None and self.suspicion is None

    @property
    def confirmations(self) -> int:
        """How many could not reach it since it was heard last."""
        return sum(at_s >= self.detector.last_heard_s for at_s in self.accused_by.values())

    @property
    def usable(self) -> bool:
        """Can be planned with."""
        return (
            self.session is not None
            and self.probe is not None
            and self.leaving is None
            and self.set_aside_until_s is None
        )

    def plan_worker(self, held: Span | None = None) -> PlanWorker:
        assert self.probe is not None
        return PlanWorker(
            self.worker_id,
            self.probe.forward_seconds,
            self.probe.backward_seconds,
            self.probe.memory_bytes,
            self.probe.uplink_bytes_per_s,
            self.probe.downlink_bytes_per_s,
            self.hello.host_id,
            self.hello.site,
            self.hello.region,
            held,
        )

    def peer(self, span: Span, stages: tuple[Stage, ...], profile: Profile, slots: int) -> Peer:
        """As its peers need to know it."""
        probe = self.probe
        assert probe is not None

        def seconds(per_kind: dict[str, float]) -> tuple[float, ...]:
            return tuple(
                sum(per_kind.get(profile.blocks[block].kind, 0.0) for block in stages[stage].blocks)
                for stage in span.stages
            )

        return Peer(
            self.worker_id,
            probe.addresses,
            span,
            self.incarnation,
            seconds(dict(probe.forward_seconds)),
            seconds(dict(probe.backward_seconds)),
            slots,
        )
