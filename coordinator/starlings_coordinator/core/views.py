"""What people see of the core: the status reply, made from the state on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member
from starlings_coordinator.core.operating import eviction_words
from starlings_coordinator.core.records import WorkerEvicted
from starlings_protos.messages import GossipPeer, Span, WorkerId
from starlings_protos.status import StatusReply, WorkerStatus

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# The state of a worker that the owner sent away.
EVICTED = "evicted"


def gossip_peers(worker_id: WorkerId, span: Span, spans: Mapping[WorkerId, Span]) -> tuple[GossipPeer, ...]:
    """Whom `worker_id` exchanges with: the other holders of each of its stages, with equal weights."""
    peers = []
    for stage in span.stages:
        holders = sorted(w for w, other in spans.items() if stage in other)
        peers += [GossipPeer(w, f"stage:{stage}", 1 / len(holders)) for w in holders if w != worker_id]
    return tuple(peers)


def worker_status(core: Core, member: Member, elapsed_s: float) -> WorkerStatus:
    state, worker_id = core.state, member.worker_id
    span = state.spans.get(worker_id) if core.plan_is_shown else None
    planned = state.planned.get(worker_id)
    tokens = state.worker_tokens.get(worker_id, 0)
    counters, verdict = member.counters, core.watch.paces.verdict(worker_id)
    return WorkerStatus(
        worker_id,
        member.hello.device,
        member.hello.device_class,
        member.state.value,
        member.reason or (member.suspicion.reason if member.suspicion is not None else verdict.words()),
        span,
        gossip_peers(worker_id, span, state.spans) if span is not None else (),
        tokens,
        core.rates.worker_tokens_per_s(worker_id),
        member.counters.bytes_sent() if member.counters is not None else {},
        member.counters.seconds() if member.counters is not None else {},
        member.probe.memory_bytes if member.probe is not None else 0,
        planned.memory_bytes if span is not None and planned is not None else 0,
        *(
            (counters.inner_steps, counters.staleness, counters.staleness_most, counters.gradients_stale)
            if counters
            else (0, 0.0, 0, 0)
        ),
        suspect=member.suspicion is not None,
        pace=verdict.colour.name.lower() if span is not None else "",
        slowdown=round(verdict.slowdown, 1) if span is not None else 0.0,
        cause=verdict.cause.value,
        capacity_tokens_per_second=core.watch.capacity_tokens_per_s(member),
        uplink_bytes_per_s=member.probe.uplink_bytes_per_s if member.probe is not None else 0.0,
    )


def evicted_status(core: Core, eviction: WorkerEvicted) -> WorkerStatus:
    """One that the owner sent away, and that is not here."""
    tokens = core.state.worker_tokens.get(eviction.worker_id, 0)
    return WorkerStatus(
        eviction.worker_id, eviction.device, eviction.device_class, EVICTED, eviction_words(eviction), None, (),
        tokens, 0.0, {}, {}, 0, 0,
    )  # fmt: skip


def workers(core: Core, elapsed_s: float) -> tuple[WorkerStatus, ...]:
    """Everybody who is here, and those who may not be, by id."""
    found = {w: worker_status(core, member, elapsed_s) for w, member in core.members.items()}
    found |= {w: evicted_status(core, e) for w, e in core.state.evicted.items() if w not in found}
    return tuple(found[worker_id] for worker_id in sorted(found))


@dataclass(frozen=True, slots=True)
class Headline:
    """The job in one line: as cheap with a thousand workers as with one."""

    phase: str
    step: int
    steps_total: int
    tokens: int
    tokens_per_second: float
    loss: float
    waiting_for: str


def headline(core: Core) -> Headline:
    state = core.state
    return Headline(
        core.phase.value,
        state.step,
        core.config.job.steps_total,
        state.tokens,
        core.rates.tokens_per_s(),
        state.loss_curve[-1].loss if state.loss_curve else 0.0,
        core.waiting_words(),
    )


def status(core: Core, now_s: float) -> StatusReply:
    """Everything that `starlings status` and the page show."""
    state, job = core.state, core.config.job
    elapsed_s = max(0.0, now_s - core.started_at_s)
    microbatches, done = core.schedule.microbatches
    return StatusReply(
        job=job.job.name,
        phase=core.phase.value,
        waiting_for=core.waiting_words(),
        step=state.step,
        steps_total=job.steps_total,
        tokens=state.tokens,
        tokens_total=job.steps_total * job.tokens_per_step,
        tokens_per_second=core.rates.tokens_per_s(),
        loss=state.loss_curve[-1].loss if state.loss_curve else 0.0,
        validation_loss=state.validation_loss or 0.0,
        has_validation_loss=state.validation_loss is not None,
        workers=workers(core, elapsed_s),
        stages=state.stages,
        plan_version=state.plan_version,
        events=tuple(core.events),
        loss_curve=tuple(state.loss_curve),
        samples_leased=core.schedule.samples_leased,
        samples_trained=state.samples_trained,
        samples_lost=state.samples_lost,
        checkpoint=state.checkpoints[max(state.checkpoints)] if state.checkpoints else "",
        elapsed_s=elapsed_s,
        checkpoint_trouble=core.finishing.pace.trouble,
        failure=state.finished.reason if state.finished is not None and not state.finished.done else "",
        dropped_messages=core.dropped_messages,
        step_microbatches=microbatches,
        step_microbatches_done=done,
        samples_repeated=state.samples_repeated,
        samples_unmerged=state.samples_unmerged,
        exchanges=core.schedule.exchanges_shown,
        evaluations=tuple(state.live_evaluations),
        pause=core.operating.shown(),
        quarantined=core.quarantine.shown(),
    )
