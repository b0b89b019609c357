"""Effects of the core on their way out: to streams, to the planner, to the keeper, to people."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from starlings_coordinator.clock import Clock
from starlings_coordinator.core.effects import (
    Announce,
    Answer,
    CloseSession,
    ComputePlan,
    Effect,
    JobEnded,
    SaveCheckpoint,
    Send,
)
from starlings_coordinator.keeper_link import KeeperLink
from starlings_coordinator.leases import Records, filled_grant
from starlings_coordinator.planner_link import PlannerLink
from starlings_coordinator.sessions import Ending, SessionTable, WorkerSession
from starlings_coordinator.signing import AssignmentSigner
from starlings_protos import control_pb2
from starlings_protos.convert import body_to_proto
from starlings_protos.messages import (
    Assignment,
    Finish,
    LeaseGrant,
    Refused,
    Standby,
    ToWorker,
    Welcome,
    WorkerId,
)

logger = logging.getLogger(__name__)


def envelope(message: ToWorker) -> control_pb2.ToWorker:
    filled = control_pb2.ToWorker()
    body_to_proto(message, filled)
    return filled


class Dispatcher:
    """Carries out one effect at a time; never waits."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        signer: AssignmentSigner,
        records: Records,
        planner: PlannerLink,
        keeper: KeeperLink,
        clock: Clock,
        on_announce: Callable[[str, str], None],
        on_job_ended: Callable[[JobEnded], None],
        on_answer: Callable[[Answer], None],
    ) -> None:
        self._sessions = sessions
        self._signer = signer
        self._records = records
        self._planner = planner
        self._keeper = keeper
        self._clock = clock
        self._on_announce = on_announce
        self._on_job_ended = on_job_ended
        self._on_answer = on_answer

    def __call__(self, effect: Effect) -> None:
        match effect:
            case Send():
                session = self._sessions.get(effect.session, effect.worker_id)
                if session is not None:  # else the core will hear of the end of the stream
                    session.send(envelope(self._filled(effect.message, session)))
            case CloseSession():
                session = self._sessions.get(effect.session, effect.worker_id)
                if session is not None:
                    self._close(session, effect)
            case ComputePlan():
                self._planner.compute(effect.request)
            case SaveCheckpoint():
                self._keeper.save(effect)
            case Announce():
                logger.info("%s: %s", effect.kind, effect.text)
                self._on_announce(effect.kind, effect.text)
            case JobEnded():
                self._on_job_ended(effect)
            case Answer():
                self._on_answer(effect)
            case _:
                assert_never(effect)

    def renew(self) -> None:
        """Called now and then: assignments are renewed at two thirds of their life."""
        for number, worker_id, message in self._signer.renewals(self._clock.now().wall_s):
            session = self._sessions.get(number, worker_id)
            if session is None:
                self._signer.forget(worker_id)
            else:
                session.send(envelope(message))
        self._keeper.renew()

    def _filled(self, message: ToWorker, session: WorkerSession) -> ToWorker:
        """What the pure core leaves to us: signatures, records, the wall clock."""
        worker_id = WorkerId(session.worker_id)
        match message:
            case Welcome():
                self._signer.welcomed(worker_id, message.incarnation)
                return replace(message, wall_time_s=self._clock.now().wall_s)
            case Assignment():
                return self._signer.sign(message, worker_id, session.number, self._clock.now().wall_s)
            case LeaseGrant():
                return filled_grant(message, self._records)
            case Standby() | Finish():
                self._signer.forget(worker_id)
        return message

    def _close(self, session: WorkerSession, effect: CloseSession) -> None:
        if effect.refusal is not None:
            session.send(envelope(Refused(effect.refusal, effect.message)))
        session.end(Ending(effect.refusal, effect.message))
