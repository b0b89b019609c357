"""A swarm as the MQTT bus tells it, for machines: one object per change, or the whole picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlings.output import as_dict
from starlings.views.bus_picture import BusPicture, Change, Member, presence_word
from starlings_protos import bus_pb2, control_pb2


def change_record(change: Change, picture: BusPicture) -> dict[str, Any]:
    """`event` says what: status, telemetry, plan, event, command; the other keys are the message's own."""
    record: dict[str, Any] = {"event": change.kind.value}
    match change.message:
        case None:
            return record | {"worker_id": change.worker_id, "presence": "forgotten"}
        case bus_pb2.BusStatus():
            return record | as_dict(change.message) | {"presence": presence_word(change.message.presence)}
        case control_pb2.Telemetry():
            member = picture.members[change.worker_id]
            return record | as_dict(change.message) | {"rates": _rates(member)}
        case _:
            return record | as_dict(change.message)


def picture_record(picture: BusPicture) -> dict[str, Any]:
    """Everything that is known; the latest loss is None while none was heard."""
    plan, progress = picture.plan, picture.progress
    latest = progress or plan or bus_pb2.PlanNotice()
    return {
        "event": "picture",
        "job": picture.job,
        "phase": picture.phase,
        "step": latest.step,
        "steps_total": latest.steps_total,
        "plan_version": plan.plan_version if plan is not None else 0,
        "tokens": progress.tokens if progress is not None else None,
        "tokens_per_second": progress.tokens_per_second if progress is not None else None,
        "loss": picture.losses[-1].loss if picture.losses else None,
        "counts": picture.counts(),
        "workers": [_worker(name, member, picture) for name, member in sorted(picture.members.items())],
        "events": [as_dict(event) for event in picture.events],
        "malformed": picture.malformed,
    }


def _worker(worker_id: str, member: Member, picture: BusPicture) -> dict[str, Any]:
    said = member.present.status if member.present is not None else bus_pb2.BusStatus()
    return {
        "worker_id": worker_id,
        "presence": presence_word(member.presence),
        "state": said.state,
        "reason": said.reason,
        "device": said.device,
        "device_class": said.device_class,
        "stages": picture.spans().get(worker_id),
        "seen_at_s": member.seen_at_s,
        "rates": _rates(member),
        "ages": _ages(member),
    }


def _ages(member: Member) -> dict[str, float] | None:
    """Of a job without a barrier: inner steps, and how old gradients are in them."""
    newest = member.samples[-1] if member.samples else None
    if newest is None or not newest.inner_steps:
        return None
    return {
        "inner_steps": newest.inner_steps,
        "staleness": newest.staleness,
        "staleness_most": newest.staleness_most,
        "gradients_stale": newest.gradients_stale,
    }


def _rates(member: Member) -> dict[str, float] | None:
    return asdict(member.rates) if member.rates is not None else None
