"""One push between two engines in virtual time: header, judgement, body, receipt.

The body travels with its header, as over a stream whose window is open; a receiver that refuses stops it one way later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlings_protos.messages import Receipt, WorkerId
from starlings_simulator.network import NOT_CONNECTED, Outcome
from starlings_simulator.timed.links import Transfer
from starlings_worker.core.admission import Admission, Duplicate

if TYPE_CHECKING:
    from starlings_simulator.timed.engine import Engine
    from starlings_simulator.timed.world import World

# What a sender believes of a machine that does not answer, and after how long.
TIMEOUT_S = 6.0
BROKEN = "connection reset"
SILENT = "timed out"


@dataclass(frozen=True, slots=True)
class Ends:
    """What a push means to its two ends."""

    admit: Callable[[Engine], Admission]
    arrived: Callable[[Engine], None]
    aborted: Callable[[Engine], None]
    report: Callable[[Outcome], None]
    # Called once a second at both ends while bytes go by.
    moved: Callable[[Engine], None] | None = None


class Push:
    def __init__(
        self,
        world: World,
        sender: Engine,
        to: WorkerId,
        byte_count: float,
        kind: str,
        ends: Ends,
        *,
        urgent: bool,
    ) -> None:
        self._world = world
        self._sender = sender
        self._ends = ends
        self._over = False
        self._admitted = False
        self._transfer: Transfer | None = None
        self._receiver = world.engines.get(to)
        here, there = sender.machine.site, world.site_of(to)
        self._one_way_s = world.swarm.one_way_s(here, there)
        if self._receiver is None:
            silent = to in world.vanished
            self._later(
                lambda: self._tell(NOT_CONNECTED),
                TIMEOUT_S if silent else 2 * self._one_way_s + world.connect_s,
            )
            return
        sender.pushes.add(self)
        self._receiver.incoming.add(self)
        host = sender.machine.host_id
        if host and host == self._receiver.machine.host_id:
            self._one_way_s, byte_count = 1e-5, 0.0
        self._body_is_here = False
        self._transfer = world.links.start(here, there, byte_count, kind, self._sent, urgent=urgent)
        self._later(self._header, self._one_way_s)
        if ends.moved is not None:
            self._watch()

    def _later(self, call: Callable[[], None], after_s: float) -> None:
        self._world.clock.after(after_s, call)

    # ------------------------------------------------------------------ its course

    def _header(self) -> None:
        receiver = self._receiver
        if self._over or receiver is None:
            return
        answer = self._ends.admit(receiver)
        if isinstance(answer, Receipt):
            self._admitted = True
            if self._body_is_here:
                self._arrive()
            return
        outcome = answer.receipt if isinstance(answer, Duplicate) else answer
        self._end()
        self._later(lambda: self._tell(outcome), self._one_way_s)

    def _sent(self) -> None:
        """The last byte has left; it is there one way later."""
        self._later(self._body, self._one_way_s)

    def _body(self) -> None:
        self._body_is_here = True
        if self._admitted and not self._over:
            self._arrive()

    def _arrive(self) -> None:
        receiver = self._receiver
        assert receiver is not None
        self._end()
        self._later(lambda: self._tell(receiver.receipt()), self._one_way_s)
        self._ends.arrived(receiver)

    def _watch(self) -> None:
        def look() -> None:
            if self._over or self._ends.moved is None:
                return
            for end in (self._sender, self._receiver):
                if end is not None and end.alive and (end is self._sender or self._admitted):
                    self._ends.moved(end)
            self._later(look, 1.0)

        self._later(look, 1.0)

    # ------------------------------------------------------------------ its ends

    def receiver_died(self, *, silently: bool) -> None:
        if not self._over:
            self._end()
            self._later(
                lambda: self._tell(SILENT if silently else BROKEN), TIMEOUT_S if silently else self._one_way_s
            )

    def sender_died(self, *, silently: bool) -> None:
        self.break_off(TIMEOUT_S if silently else self._one_way_s)

    def break_off(self, notice_s: float | None = None) -> None:
        """By its sender, or because that is no more."""
        if self._over:
            return
        self._end()
        receiver = self._receiver
        if self._admitted and receiver is not None:
            self._later(
                lambda: self._ends.aborted(receiver) if receiver.alive else None,
                self._one_way_s if notice_s is None else notice_s,
            )

    def _end(self) -> None:
        self._over = True
        if self._transfer is not None:
            self._world.links.cancel(self._transfer)
        self._sender.pushes.discard(self)
        if self._receiver is not None:
            self._receiver.incoming.discard(self)

    def _tell(self, outcome: Outcome) -> None:
        if self._sender.alive:
            self._ends.report(outcome)
