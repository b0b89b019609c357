"""Exchanges in pairs or in groups as the worker's core sees them. What the job has none of is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlings_protos.group_messages import GroupFromCoordinator, GroupHeader
from starlings_protos.messages import Assignment, Receipt, Refusal, WorkerId
from starlings_protos.pair_messages import PairHeader, PairMatched, PairWord, SlotClock
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.groups.group_rounds import GroupRounds
from starlings_worker.core.groups.work import GroupNetworkEvent, GroupWorked
from starlings_worker.core.pairing.pair_rounds import PairRounds
from starlings_worker.core.pairing.work import PairDeviceOutcome, PairNetworkEvent

_NONE_HERE = Rejection(Refusal.NOT_HELD, "no exchange in pairs runs here")
_NO_GROUPS_HERE = Rejection(Refusal.NOT_HELD, "no exchange in groups runs here")


class Meeting:
    """`rounds` are the job's, or None; `receipt` is what a sender is told of this worker."""

    def __init__(
        self,
        rounds: PairRounds | GroupRounds | None,
        receipt: Callable[[], Receipt],
        counters: Counter[str],
    ) -> None:
        self.rounds = rounds
        self._receipt = receipt
        self._counters = counters

    def admit(self, header: PairHeader | GroupHeader, sender: WorkerId, now_s: float) -> Admission:
        """Judge a payload by its header, as `WorkerCore.admit` does; then it arrives, or is aborted."""
        answer: Admission
        if isinstance(header, GroupHeader):
            answer = _NO_GROUPS_HERE
            if isinstance(self.rounds, GroupRounds):
                answer = self.rounds.admit(header, sender, self._receipt(), now_s)
        else:
            answer = _NONE_HERE
            if isinstance(self.rounds, PairRounds):
                answer = self.rounds.admit(header, sender, self._receipt(), now_s)
        self._count(answer)
        return answer

    def judge_word(self, word: PairWord, sender: WorkerId, now_s: float) -> Rejection | None:
        """None: a partner's word is let in; then WordTold."""
        answer: Rejection | None = _NONE_HERE
        if isinstance(self.rounds, PairRounds):
            answer = self.rounds.judge_word(word, sender, now_s)
        self._count(answer)
        return answer

    def _count(self, answer: Admission | None) -> None:
        if isinstance(answer, Rejection):
            self._counters[f"refused_{answer.refusal.name.lower()}"] += 1

    @property
    def holds_training(self) -> bool:
        """Nothing is to be computed for training now: a round would overwrite it."""
        return isinstance(self.rounds, GroupRounds) and self.rounds.holds_training

    def happened(
        self, event: PairDeviceOutcome | PairNetworkEvent | GroupWorked | GroupNetworkEvent, now_s: float
    ) -> None:
        if isinstance(self.rounds, PairRounds):
            if isinstance(event, PairDeviceOutcome | PairNetworkEvent):
                self.rounds.handle(event, now_s)
        elif self.rounds is not None and isinstance(event, GroupWorked | GroupNetworkEvent):
            self.rounds.handle(event, now_s)

    def told(self, message: SlotClock | PairMatched | GroupFromCoordinator, now_s: float) -> None:
        """By the coordinator."""
        match self.rounds:
            case PairRounds() if isinstance(message, SlotClock | PairMatched):
                self.rounds.told(message, now_s)
            case GroupRounds() if not isinstance(message, PairMatched):
                self.rounds.told(message, now_s)
            case _:
                self._counters["stale_messages"] += 1

    def replanned(self, assignment: Assignment | None, now_s: float) -> None:
        """Partners that left the plan, or began a new life, are none any more."""
        if self.rounds is not None and assignment is not None:
            self.rounds.lives({peer.worker_id: peer.incarnation for peer in assignment.peers}, now_s)

    def reconnected(self, now_s: float) -> None:
        if self.rounds is not None:
            self.rounds.reconnected(now_s)

    def wake_at_s(self, now_s: float) -> float | None:
        return self.rounds.wake_at_s(now_s) if self.rounds is not None else None
