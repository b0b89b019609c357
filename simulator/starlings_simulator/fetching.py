"""How an engine gets what others have: a span's blocks at a version, and the updates that a late joiner replays."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING

from starlings_protos.messages import KEEPER, Assignment, WorkerId
from starlings_simulator.faults import Moment
from starlings_simulator.history import NotYet
from starlings_simulator.symbolic import Device, Piece, fingerprint
from starlings_worker.core.effects import ReplayStep
from starlings_worker.core.events import LoadFailed, ReplayFailed, SpanLoaded, StepReplayed

if TYPE_CHECKING:
    from starlings_simulator.engine import Engine

REPLAY_TRIES, REPLAY_AGAIN_S = 20, 0.1


class Fetching:
    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng
        self._donors: tuple[WorkerId, ...] = ()
        # Blocks of a load under way that have come already.
        self._early: dict[int, str] = {}

    def load(self, assignment: Assignment) -> None:
        """Blocks that came early stay when their donor is gone at the end."""
        engine, worker_id = self._engine, self._engine.spec.worker_id
        self.meet(assignment)
        engine.drop_everything()
        early, self._early = self._early, {}
        states = early | self._engine.world.donations.blocks(assignment, worker_id)
        blocks = [block for stage in assignment.span.stages for block in assignment.stages[stage].blocks]
        if set(states) != set(blocks) or self._rng.random() < self._engine.spec.load_failure:
            self._engine.handle(LoadFailed(assignment.plan_version, "no donor answered"))
            return
        engine.device = Device(
            assignment.stages,
            assignment.span,
            assignment.version,
            states,
            self._engine.spec.numeric_class,
            plan_version=assignment.plan_version,
            passes=self._engine.spec.passes,
        )
        self._engine.world.checker.assigned(assignment)
        self._engine.world.checker.loaded(worker_id, engine.device, observes=assignment.observer)
        digests = engine.device.digests(self._engine.world.block_names)
        self._engine.handle(SpanLoaded(assignment.plan_version, assignment.version, digests))

    def begin(self, assignment: Assignment) -> None:
        """Some blocks are there long before the others."""
        found = self._engine.world.donations.blocks(assignment, self._engine.spec.worker_id)
        self._early = {block: state for block, state in found.items() if self._rng.random() < 0.5}
        if assignment.observer:
            self._engine.world.reached(Moment.OBSERVE, self._engine.spec.worker_id)
            for donor in assignment.donors[:1]:
                if donor.worker_id != KEEPER:
                    self._engine.world.reached(Moment.DONATE, donor.worker_id)

    def meet(self, assignment: Assignment) -> None:
        if assignment.donors or assignment.observer:
            self._donors = tuple(peer.worker_id for peer in assignment.donors)

    def replay(self, device: Device, effect: ReplayStep, tries: int = 1) -> None:
        """Each group's update from the first donor that keeps it; who has not applied the step yet will do so soon."""
        found = self._updates(device, effect.step)
        if len(found) < len(device.groups()):
            if tries < REPLAY_TRIES:
                again = lambda: self.replay(device, effect, tries + 1)  # noqa: E731
                self._engine.world.clock.after(REPLAY_AGAIN_S, lambda: self._engine.process.deliver(again))
            else:
                self._engine.handle(ReplayFailed(effect.step, "no donor keeps its update"))
            return
        device.replay(effect.step, found, effect.learning_rate, effect.clip_factor)
        self._engine.world.checker.holds(self._engine.spec.worker_id, device)
        self._engine.handle(StepReplayed(effect.step, {g: int(fingerprint(p), 16) for g, p in found.items()}))

    def _updates(self, device: Device, step: int) -> dict[str, Piece]:
        found: dict[str, Piece] = {}
        for group, donor in product(device.groups(), self._donors):
            if group in found or donor == KEEPER:
                continue
            try:
                piece = self._engine.world.donations.update(donor, self._engine.spec.worker_id, step, group)
            except NotYet:
                continue
            if piece is not None:
                found[group] = piece
        return found
