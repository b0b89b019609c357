"""A swarm as the MQTT bus tells it: what was heard, folded into one picture. Pure.

All of it is hearsay: each worker speaks of itself, and the coordinator's own verdicts come as events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from google.protobuf.message import Message

from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus.payloads import MalformedPayload, decode
from starlings_protos.bus.presence import Present, fold
from starlings_protos.bus.topics import Kind, parse
from starlings_protos.errors import clean_text

EVENTS_KEPT = 200
POINTS_KEPT = 2000
# Rates are those of the last samples that span at least this long.
RATE_OVER_S = 10.0
_SAMPLES_KEPT = 12
TEXT_LIMIT = 300

PRESENCE_WORDS = {
    bus_pb2.PRESENCE_UNSPECIFIED: "unknown",
    bus_pb2.PRESENCE_ONLINE: "online",
    bus_pb2.PRESENCE_OFFLINE: "offline",
    bus_pb2.PRESENCE_LOST: "lost",
}


def presence_word(presence: bus_pb2.Presence.ValueType) -> str:
    return PRESENCE_WORDS.get(presence, "unknown")


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one worker, between two of its samples."""

    sent_bytes_per_s: float
    # Shares of the time.
    compute: float
    wait: float


@dataclass(slots=True)
class Member:
    """What is known of one worker; either part may come first."""

    present: Present | None = None
    samples: deque[control_pb2.TelemetrySample] = field(default_factory=lambda: deque(maxlen=_SAMPLES_KEPT))
    # When its telemetry was heard last, on the reader's clock.
    telemetry_at_s: float | None = None

    @property
    def presence(self) -> bus_pb2.Presence.ValueType:
        return self.present.status.presence if self.present is not None else bus_pb2.PRESENCE_UNSPECIFIED

    @property
    def seen_at_s(self) -> float | None:
        """Seconds since 1970. A retained word may be old: the worker's clock tells how old, if it is not ahead."""
        moments = [] if self.telemetry_at_s is None else [self.telemetry_at_s]
        if self.present is not None:
            said, heard_at_s = self.present.status, self.present.heard_at_s
            will = said.presence == bus_pb2.PRESENCE_LOST
            moments.append(heard_at_s if will or not said.wall_time_s else min(heard_at_s, said.wall_time_s))
        return max(moments, default=None)

    @property
    def rates(self) -> Rates | None:
        """None until two samples of one life are there."""
        if len(self.samples) < 2:
            return None
        last = self.samples[-1]
        first = next(
            (s for s in reversed(self.samples) if last.wall_time_s - s.wall_time_s >= RATE_OVER_S), None
        )
        first = first or self.samples[0]
        elapsed_s = last.wall_time_s - first.wall_time_s
        sent = _sent(last) - _sent(first)
        compute_s, wait_s = last.compute_s - first.compute_s, last.wait_s - first.wait_s
        if elapsed_s <= 0 or min(sent, compute_s, wait_s) < 0:
            return None
        return Rates(sent / elapsed_s, compute_s / elapsed_s, wait_s / elapsed_s)

    def measured(self, telemetry: control_pb2.Telemetry, now_s: float) -> None:
        for sample in telemetry.samples:
            if self.samples and sample.compute_s < self.samples[-1].compute_s:
                self.samples.clear()  # the engine was started again: its counters too
            self.samples.append(sample)
        self.telemetry_at_s = now_s


def _sent(sample: control_pb2.TelemetrySample) -> int:
    return (
        sample.forward_bytes
        + sample.backward_bytes
        + sample.exchange_bytes
        + sample.state_bytes
        + sample.control_bytes
    )


@dataclass(frozen=True, slots=True)
class Change:
    """Something that was heard and changed the picture. `message` is None for a worker that was forgotten."""

    kind: Kind
    worker_id: str
    message: Message | None


@dataclass
class BusPicture:
    """Everything that was heard of one job."""

    job: str
    members: dict[str, Member] = field(default_factory=dict)
    plan: bus_pb2.PlanNotice | None = None
    progress: bus_pb2.EventNotice | None = None
    events: deque[control_pb2.Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    losses: deque[control_pb2.LossPoint] = field(default_factory=lambda: deque(maxlen=POINTS_KEPT))
    # Of all that were heard, kept or not.
    event_count: int = 0
    # Payloads that were none: somebody writes what is no message of its topic.
    malformed: int = 0

    def hear(self, topic: str, payload: bytes, now_s: float) -> Change | None:
        """Takes one message off the bus; `now_s` is seconds since 1970. None: it says nothing new."""
        named = parse(topic)
        if named is None or named.job != self.job:
            return None
        if named.kind is Kind.STATUS and not payload:
            known = self.members.pop(named.worker_id, None)
            return Change(named.kind, named.worker_id, None) if known is not None else None
        try:
            message = decode(named, payload)
        except MalformedPayload:
            self.malformed += 1
            return None
        match message:
            case bus_pb2.BusStatus():
                member = self.members.setdefault(named.worker_id, Member())
                before = member.present.status if member.present is not None else None
                member.present = fold(member.present, message, now_s)
                if member.present is None or member.present.status is before:
                    return None
            case control_pb2.Telemetry():
                self.members.setdefault(named.worker_id, Member()).measured(message, now_s)
            case bus_pb2.PlanNotice():
                self.plan = message
            case bus_pb2.EventNotice():
                self._heard_events(message)
            case bus_pb2.CommandHint():
                pass
        return Change(named.kind, named.worker_id, message)

    def _heard_events(self, notice: bus_pb2.EventNotice) -> None:
        self.progress = notice
        newest = self.events[-1].sequence if self.events else 0
        if max((event.sequence for event in notice.events), default=newest) < newest:
            newest = 0  # a coordinator that was started again counts from the beginning
        for event in notice.events:
            if event.sequence > newest:
                # Whoever draws it need not trust the sender's characters.
                cleaned = control_pb2.Event(sequence=event.sequence, at_s=event.at_s)
                cleaned.kind, cleaned.text = clean_text(event.kind, 40), clean_text(event.text, TEXT_LIMIT)
                self.events.append(cleaned)
                self.event_count += 1
        if notice.losses:
            # A job that went back to a checkpoint repeats steps: the newer points count.
            first = notice.losses[0].step
            while self.losses and self.losses[-1].step >= first:
                self.losses.pop()
            self.losses.extend(notice.losses)

    @property
    def silent(self) -> bool:
        """Whether nothing has been heard at all."""
        return not self.members and self.plan is None and self.progress is None

    @property
    def phase(self) -> str:
        latest = max(
            (notice for notice in (self.plan, self.progress) if notice is not None),
            key=lambda notice: notice.wall_time_s,
            default=None,
        )
        return latest.phase if latest is not None else ""

    @property
    def coordinator_seen_at_s(self) -> float | None:
        """On the coordinator's clock, seconds since 1970."""
        return max((n.wall_time_s for n in (self.plan, self.progress) if n is not None), default=None)

    def counts(self) -> dict[str, int]:
        """Workers by presence."""
        found: dict[str, int] = {}
        for member in self.members.values():
            word = presence_word(member.presence)
            found[word] = found.get(word, 0) + 1
        return dict(sorted(found.items()))

    def spans(self) -> dict[str, str]:
        """Who holds which stages by the last plan notice."""
        if self.plan is None:
            return {}
        return {
            h.worker_id: str(h.span.first_stage)
            if h.span.first_stage == h.span.last_stage
            else f"{h.span.first_stage}-{h.span.last_stage}"
            for h in self.plan.holdings
        }
