"""How many leases a worker asks the coordinator for."""

from __future__ import annotations

from starlings_protos.messages import LeaseGrant, LeaseKind, LeaseRequest
from starlings_worker.core.flow import Flow
from starlings_worker.core.outbox import Outbox
from starlings_worker.core.peers import PeerTable
from starlings_worker.core.table import MicrobatchTable
from starlings_worker.core.timings import WorkerTimings
from starlings_worker.core.training import Training


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

    def forget(self) -> None:
        """Nothing that was asked for will come."""
        self._open = 0

    def granted(self, message: LeaseGrant, *, opens_attempts: bool) -> None:
        """`opens_attempts`: a training lease may be the first that this worker hears of a new attempt."""
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
            self._outbox.say(LeaseRequest(wish))

    def others_can_begin(self) -> bool:
        """Whether another worker holds the first stage: without one, a step ends only with this one's help."""
        return any(0 in peer.span for peer in self._peers.states.values())
