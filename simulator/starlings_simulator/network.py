"""The data plane between processes: delays, cuts, broken and repeated transfers; processes that die or
freeze.

A push goes through the steps of a real one: connect, header, judgement by the receiver, body, receipt. Each
can fail, and what the sender then knows differs: refused and never connected are certain, everything later is
not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlings_protos.messages import ExchangeHeader, MicrobatchHeader, Receipt, Refusal, WorkerId
from starlings_simulator.clock import Call, Clock
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.events import Direction, Leg


@dataclass(slots=True)
class Process:
    """One life of a program. Calls reach it unless it is dead; a frozen one gets them when it thaws."""

    name: str
    alive: bool = True
    frozen: bool = False
    _waiting: list[Call] = field(default_factory=list)

    def deliver(self, call: Call) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._waiting.append(call)
        else:
            call()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.deliver(call)

    def kill(self) -> None:
        self.alive = False
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class Envelope:
    """A microbatch (with `direction`) or a part (with `leg`) on its way; `payload` holds its symbols."""

    sender: WorkerId
    to: WorkerId
    header: MicrobatchHeader | ExchangeHeader
    payload: object
    direction: Direction | None = None
    leg: Leg | None = None
    # Which life of the sender the assignment was signed for that it shows.
    incarnation: int = 0


@dataclass(slots=True)
class Receiver:
    """Where pushes to one life of a worker arrive."""

    process: Process
    admit: Callable[[Envelope], Admission]
    arrived: Callable[[Envelope], None]
    aborted: Callable[[Envelope], None]


# (certain, refusal or receipt, reason); what the sender learns.
Outcome = Receipt | Rejection | str
NOT_CONNECTED = "no connection"


def explain(outcome: Outcome) -> tuple[bool, Refusal, str]:
    """(certain, refusal, reason) of a push that did not succeed."""
    if isinstance(outcome, Rejection):
        return True, outcome.refusal, outcome.message
    assert isinstance(outcome, str)
    return outcome == NOT_CONNECTED, Refusal.UNSPECIFIED, outcome


@dataclass(slots=True)
class Conditions:
    """How bad the network is now. Probabilities are per transfer."""

    delay_s: tuple[float, float] = (0.002, 0.03)
    body_s: tuple[float, float] = (0.005, 0.05)
    broken: float = 0.0
    duplicated: float = 0.0
    late: float = 0.02
    timeout_s: float = 6.0


class Network:
    def __init__(self, clock: Clock, rng: random.Random, conditions: Conditions) -> None:
        self._clock = clock
        self._rng = rng
        self.conditions = conditions
        self.receivers: dict[WorkerId, Receiver] = {}
        # Pairs that cannot reach each other, each way listed, and by how many faults.
        self.cuts: Counter[tuple[str, str]] = Counter()
        self.slowness = 1.0
        self.broken_transfers = 0
        self.repeated_transfers = 0

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        for here, there in pairs:
            self.cuts[here, there] += 1
            self.cuts[there, here] += 1

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        for here, there in pairs:
            self.cuts[here, there] -= 1
            self.cuts[there, here] -= 1

    def is_cut(self, here: str, there: str) -> bool:
        return self.cuts[here, there] > 0

    def delay_s(self) -> float:
        """One way. A few come much later, as after a retransmission: paths overtake each other."""
        late = 25.0 if self._rng.random() < self.conditions.late else 1.0
        return self.slowness * late * self._rng.uniform(*self.conditions.delay_s)

    def body_s(self) -> float:
        return self.slowness * self._rng.uniform(*self.conditions.body_s)

    def push(self, source: Process, envelope: Envelope, report: Callable[[Outcome], None]) -> None:
        """Carry `envelope`; `report` is called exactly once if the sender lives, when the sender knows."""
        Transfer(self, self._clock, self._rng, source, envelope, report).begin()

    def repeat(self, source: Process, envelope: Envelope) -> None:
        """Now and then an accepted transfer comes a second time, as a blind repetition would make it."""
        if self._rng.random() < self.conditions.duplicated:
            self.repeated_transfers += 1
            ghost = Transfer(self, self._clock, self._rng, source, envelope, lambda _: None, ghost=True)
            self._clock.after(self._rng.uniform(0.0, 1.0), ghost.begin)


@dataclass(slots=True)
class Transfer:
    """One push. `_finish` tells the sender once; what the receiver sees goes on by itself."""

    network: Network
    clock: Clock
    rng: random.Random
    source: Process
    envelope: Envelope
    report: Callable[[Outcome], None]
    finished: bool = False
    ghost: bool = False

    def begin(self) -> None:
        network = self.network
        receiver = network.receivers.get(self.envelope.to)
        cut = network.is_cut(self.envelope.sender, self.envelope.to)
        if receiver is None or not receiver.process.alive or cut:
            # An established connection hangs until the timeout; a new one is never made.
            if cut and self.rng.random() < 0.5:
                self._later(network.conditions.timeout_s, "timed out")
            else:
                self._later(network.delay_s(), NOT_CONNECTED)
            return
        self.clock.after(network.conditions.timeout_s, lambda: self._finish("timed out"))
        if self.rng.random() < network.conditions.broken / 3:
            network.broken_transfers += 1
            self._later(network.delay_s() * 2, "connection reset before an answer")
            return
        self.clock.after(network.delay_s(), lambda: receiver.process.deliver(lambda: self._header(receiver)))
        if not receiver.process.frozen:
            self._watch(receiver)

    def _watch(self, receiver: Receiver) -> None:
        """A dead receiver resets its connections some time later."""

        def look() -> None:
            if self.finished:
                return
            if receiver.process.alive:
                self.clock.after(0.5, look)
            else:
                self._later(self.network.delay_s(), "connection reset by peer")

        self.clock.after(0.5, look)

    def _header(self, receiver: Receiver) -> None:
        if self.finished and self.rng.random() < 0.5:
            return  # Cancelled by its sender before the receiver looked.
        if self.network.is_cut(self.envelope.sender, self.envelope.to):
            return  # Lost on the way: the sender's patience ends it.
        cancelled = self.finished
        answer = receiver.admit(self.envelope)
        network = self.network
        if isinstance(answer, Rejection):
            self._later(network.delay_s(), answer)
        elif isinstance(answer, Duplicate):
            self._later(network.delay_s(), answer.receipt)
        else:
            if not self.ghost:
                network.repeat(self.source, self.envelope)
            body_s = network.body_s()
            breaks = cancelled or network.is_cut(self.envelope.sender, self.envelope.to)
            breaks = breaks or self.rng.random() < network.conditions.broken / 3
            call = self._break if breaks else self._body
            self.clock.after(body_s, lambda: receiver.process.deliver(lambda: call(receiver, answer)))

    def _break(self, receiver: Receiver, _: Receipt) -> None:
        self.network.broken_transfers += 1
        # Either side may notice first.
        self._later(self.rng.uniform(0.0, 0.2), "connection reset in the body")
        self.clock.after(
            self.rng.uniform(0.0, 0.2),
            lambda: receiver.process.deliver(lambda: receiver.aborted(self.envelope)),
        )

    def _body(self, receiver: Receiver, receipt: Receipt) -> None:
        receiver.arrived(self.envelope)
        if self.rng.random() < self.network.conditions.broken / 3:
            self.network.broken_transfers += 1
            self._later(self.rng.uniform(0.0, 0.2), "connection reset before the receipt")
        elif not self.network.is_cut(self.envelope.to, self.envelope.sender):
            self._later(self.network.delay_s(), receipt)

    def _later(self, delay_s: float, outcome: Outcome) -> None:
        self.clock.after(delay_s, lambda: self._finish(outcome))

    def _finish(self, outcome: Outcome) -> None:
        if self.finished:
            return
        self.finished = True
        self.source.deliver(lambda: self.report(outcome))
