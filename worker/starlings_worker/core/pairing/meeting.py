"""Exchanges in pairs as the worker's core sees them: where a job has none, whatever is about them is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlings_protos.messages import Assignment, Receipt, Refusal, WorkerId
from starlings_protos.pair_messages import PairHeader, PairMatched, PairWord, SlotClock
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.pairing.pair_rounds import PairRounds
from starlings_worker.core.pairing.work import PairDeviceOutcome, PairNetworkEvent

_NONE_HERE = Rejection(Refusal.NOT_HELD, "no exchange in pairs runs here")


class Meeting:
    """`rounds` are the job's, or None; `receipt` is what a sender is told of this worker."""

    def __init__(
        self, rounds: PairRounds | None, receipt: Callable[[], Receipt], counters: Counter[str]
    ) -> None:
        self.rounds = rounds
        self._receipt = receipt
        self._counters = counters

    def admit(self, header: PairHeader, sender: WorkerId, now_s: float) -> Admission:
        """Judge a partner's payload by its header, as `WorkerCore.admit` does; then PairArrived or PairAborted."""
        answer: Admission = _NONE_HERE
        if self.rounds is not None:
            answer = self.rounds.admit(header, sender, self._receipt(), now_s)
        self._count(answer)
        return answer

    def judge_word(self, word: PairWord, sender: WorkerId, now_s: float) -> Rejection | None:
        """None: a partner's word is let in; then WordTold."""
        answer = _NONE_HERE if self.rounds is None else self.rounds.judge_word(word, sender, now_s)
        self._count(answer)
        return answer

    def _count(self, answer: Admission | None) -> None:
        if isinstance(answer, Rejection):
            self._counters[f"refused_{answer.refusal.name.lower()}"] += 1

    def happened(self, event: PairDeviceOutcome | PairNetworkEvent, now_s: float) -> None:
        if self.rounds is not None:
            self.rounds.handle(event, now_s)

    def told(self, message: SlotClock | PairMatched, now_s: float) -> None:
        """By the coordinator."""
        if self.rounds is not None:
            self.rounds.told(message, now_s)
        else:
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
