"""What must hold of a worker's core between any two events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlings_protos.messages import LeaseKind, MicrobatchKey, WorkerId
from starlings_worker.core.effects import ComputeBackward, ComputeForward
from starlings_worker.core.losses import absent
from starlings_worker.core.microbatches import Phase
from starlings_worker.core.observing import STEPS_BEHIND_AT_MOST

if TYPE_CHECKING:
    from starlings_worker.core.core import WorkerCore


def check(core: WorkerCore) -> None:
    """Slots, phases, epochs, the device and bounded memory; raises AssertionError with the figures."""
    if core.stopped:
        return
    _check_microbatches(core)
    _check_device(core)
    _check_exchange(core)
    _check_observing(core)


def _check_microbatches(core: WorkerCore) -> None:
    table = core.table
    place = table.place
    if place is None:
        assert not table.held, "microbatches are held without a place in the plan"
        assert not table.leases, "leases wait without a place in the plan"
        return
    for key, held in table.held.items():
        assert key == held.key
        assert held.entry_stage in place.span, f"{key} entered outside the span"
        assert (held.entry_stage == 0) == (not held.route), f"{key}: only leases enter at stage 0"
        assert held.trains or held.phase <= Phase.AWAY, f"{key}: a forward-only kind has no {held.phase.name}"
        assert (held.arriving is not None) == (held.phase in (Phase.ARRIVING, Phase.GRADIENT_ARRIVING))
        if held.trains:
            assert not table.is_past(key), f"{key} is older than {table.epoch}"
            assert held.phase <= Phase.QUEUED or table.is_current(key), f"{key} ran before its time"
        if held.phase >= Phase.FORWARD:
            assert held.entry_stage <= held.exit_stage <= place.span.last_stage
        if held.phase is Phase.AWAY:
            assert held.next_worker not in (None, core.worker_id)
        assert core.worker_id not in {hop.worker_id for hop in held.route}, f"{key} came twice"
    for key in table.leases:
        assert key not in table.held, f"{key} is leased and held"
    if core.training.commit is None:
        _check_routes(core, place.workers)
    indices = [stage for stage in table.accumulated if stage not in place.span]
    assert not indices, f"gradient of stages {indices} that are not held"


def _check_routes(core: WorkerCore, present: frozenset[WorkerId]) -> None:
    """Nobody who is in the plan no more has a part in what is computed, unless the attempt was reported as void."""
    table = core.table
    for key, held in table.held.items():
        gone = absent(held.route, present) if held.trains else []
        assert not gone, f"{key} came through {gone}, who left the plan"
    for index, route in table.routes.items():
        key = MicrobatchKey(LeaseKind.TRAIN, *table.epoch, index)
        assert key in table.failed or not absent(route, present), f"{key} was accumulated on {route}"
    for stage, indices in table.accumulated.items():
        assert indices <= table.routes.keys(), f"what was accumulated for stage {stage} has no route"


def _check_device(core: WorkerCore) -> None:
    running = core.device.running
    on_device = (Phase.FORWARD, Phase.BACKWARD)
    busy = [held.key for held in core.table.held.values() if held.phase in on_device]
    if isinstance(running, ComputeForward | ComputeBackward):
        assert busy == [running.key] or (not busy and running.key in core.table.doomed), (
            f"{busy} != {running}"
        )
    else:
        assert not busy, f"{busy} run although the device does {running}"
        assert not core.table.doomed, "dropped microbatches wait for a device that does something else"
    groups = len(core.training.round.groups if core.training.round else ())
    meeting = len(core.meeting.rounds.stages) if core.meeting.rounds is not None else 0
    assert len(core.device.waiting) <= 16 + 8 * (groups + meeting)


def _check_exchange(core: WorkerCore) -> None:
    training = core.training
    if not core.loaded:
        assert training.round is None, "a round is open although nothing is loaded"
        assert len(core.parts) == 0, "parts are kept although nothing is loaded"
        return
    if training.round is not None:
        assert training.round.epoch == training.epoch, "a round of another epoch is open"
    assert all(epoch >= training.epoch for epoch in core.parts.epochs()), "parts of an old epoch are kept"
    if training.applying:
        assert training.commit is not None
    place = core.table.place
    assert place is not None
    assert training.version == training.epoch[0], f"version {training.version} at {training.epoch}"


def _check_observing(core: WorkerCore) -> None:
    observing = core.observing
    steps = [commit.step for commit in observing.queue]
    assert steps == list(range(observing.version, observing.version_ahead)), f"{steps} at {observing.version}"
    assert len(steps) <= STEPS_BEHIND_AT_MOST, f"{len(steps)} commits wait to be replayed"
    if not observing.active:
        assert not steps, "commits wait although nothing is being caught up with"
        assert core.assignment is None or not core.assignment.observer
    elif core.loaded:
        assert core.training.applying, "a holder that is behind must not compute yet"
        assert core.training.version == observing.version_ahead - 1
    else:
        assert core.table.place is None, "an observer takes no part"
