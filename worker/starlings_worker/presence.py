"""What a worker says of itself on the bus: pure. What it does is read off its traffic with the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus import payloads
from starlings_protos.bus.payloads import Form
from starlings_protos.bus.topics import Kind

REASON_LIMIT_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Standing:
    """One worker as others shall see it, in the words of WorkerStatus."""

    state: str = "joining"
    reason: str = ""
    incarnation: int = 0
    device: str = ""
    device_class: str = ""
    version: str = ""


def ordered(now: Standing, message: control_pb2.ToWorker) -> Standing:
    """After a message of the coordinator."""
    match message.WhichOneof("body"):
        case "welcome":
            welcome = message.welcome
            if welcome.incarnation == now.incarnation and not welcome.probe_now:
                return now
            state = "probing" if welcome.probe_now else "joining"
            return replace(now, state=state, reason="", incarnation=welcome.incarnation)
        case "assignment":
            if message.assignment.observer:
                return replace(now, state="observing", reason="")
            # Who has caught up holds its span already.
            state = "training" if now.state == "observing" else "loading"
            return replace(now, state=state, reason="")
        case "lease_grant" | "exchange_opened" | "step_committed" if now.state == "loading":
            return replace(now, state="training", reason="")
        case "standby":
            return replace(now, state="standby", reason=message.standby.reason[:REASON_LIMIT_CHARACTERS])
        case "finish":
            return leaving(now, message.finish.reason)
        case _:
            return now


def reported(now: Standing, message: control_pb2.ToCoordinator) -> Standing:
    """After a message of the worker."""
    match message.WhichOneof("body"):
        case "leaving":
            return leaving(now, message.leaving.reason)
        case "engine_down":
            return replace(now, state="joining", reason=message.engine_down.reason[:REASON_LIMIT_CHARACTERS])
        case _:
            return now


def leaving(now: Standing, reason: str) -> Standing:
    return replace(now, state="leaving", reason=reason[:REASON_LIMIT_CHARACTERS])


def status(
    now: Standing,
    worker_id: str,
    presence: bus_pb2.Presence.ValueType,
    session: int,
    sequence: int,
    wall_time_s: float,
) -> bus_pb2.BusStatus:
    return bus_pb2.BusStatus(
        worker_id=worker_id,
        presence=presence,
        session=session,
        sequence=sequence,
        incarnation=now.incarnation,
        state=now.state,
        reason=now.reason,
        device=now.device,
        device_class=now.device_class,
        version=now.version,
        wall_time_s=wall_time_s,
    )


def batch(messages: Sequence[control_pb2.Telemetry], form: Form) -> bytes:
    """One payload with the newest samples of the newest life, as many as fit.

    Counters only rise, so a sample that is left out costs resolution and nothing else.

    Args:
        messages: at least one, oldest first.
    """
    newest = messages[-1]
    samples = [
        sample
        for message in messages
        if message.incarnation == newest.incarnation
        for sample in message.samples
    ]
    while True:
        whole = control_pb2.Telemetry(
            worker_id=newest.worker_id, incarnation=newest.incarnation, samples=samples
        )
        payload = payloads.encode(whole, form)
        if payloads.fits(Kind.TELEMETRY, payload) or not samples:
            return payload
        samples = samples[1:]
