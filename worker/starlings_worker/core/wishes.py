"""How many leases a worker asks the coordinator for."""

from __future__ import annotations

import math

from starlings_protos.messages import LeaseGrant, LeaseKind, LeaseRequest
from starlings_worker.core.flow import Flow
from starlings_worker.core.outbox import Outbox
from starlings_worker.core.peers import PeerTable
from starlings_worker.core.table import MicrobatchTable
from starlings_worker.core.timings import WorkerTimings
from starlings_worker.core.training import Training

# Of the least time that an answer has taken, per answer.
ANSWER_FORGOTTEN = 0.02


class Wishes:
    """Asks for as many as could be begun, and keeps count of what is still owed."""

    def __init__(
        self,
        timings: WorkerTimings,
        table: MicrobatchTable,
        flow: Flow,
        training: Training,
        peers: PeerTable,
        outbox: Outbox,
    ) -> None:
        self._timings = timings
        self._table = table
        self._flow = flow
        self._training = training
        self._peers = peers
        self._outbox = outbox
        # What the coordinator still owes of the last LeaseRequest, and when that was sent.
        self._open = 0
        self._asked_at_s = 0.0
        # Whether nothing came since; and the least that an answer took of late. (More say only that nothing was left.)
        self._answer_due = False
        self._answer_s: float | None = None

    def forget(self) -> None:
        """Nothing that was asked for will come."""
        self._open = 0
        self._answer_due = False

    def _answered(self, now_s: float) -> None:
        """So many more microbatches as are begun while an answer is under way are wished for ahead."""
        if self._answer_due:
            took_s = max(0.0, now_s - self._asked_at_s)
            least_s = took_s if self._answer_s is None else self._answer_s
            self._answer_s = min(took_s, least_s + ANSWER_FORGOTTEN * (took_s - least_s))
            self._answer_due = False
        flight = self._table.in_flight
        ahead = math.ceil(flight.rate * (self._answer_s or 0.0)) - 1
        self._table.prefetch = min(max(0, ahead), flight.limit)

    def granted(self, message: LeaseGrant, now_s: float, *, opens_attempts: bool) -> None:
        """`opens_attempts`: a training lease may be the first that this worker hears of a new attempt."""
        self._answered(now_s)
        for lease in message.leases:
            self._open = max(0, self._open - 1)
            if opens_attempts and lease.key.kind is LeaseKind.TRAIN:
                self._training.raise_attempt(lease.key.step, lease.key.attempt)
            if not self._table.grant(lease):
                self._flow.refuse(lease.key)

    def go_on(self, now_s: float, *, draining: bool) -> None:
        """Ask, when more could be begun than what is on its way, or was perhaps lost."""
        if not self._outbox.up or (draining and self.others_can_begin()):
            return
        wish = self._table.wish()
        overdue = now_s - self._asked_at_s >= self._timings.wish_repeat_s and not self._table.held
        if wish > self._open or (wish > 0 and overdue):
            self._open = wish
            self._asked_at_s = now_s
            self._answer_due = True
            self._outbox.say(LeaseRequest(wish))

    def others_can_begin(self) -> bool:
        """Whether another worker holds the first stage: without one, a step ends only with this one's help."""
        return any(0 in peer.span for peer in self._peers.states.values())
