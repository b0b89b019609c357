"""What members of groups report of their rounds."""

from __future__ import annotations

from collections import OrderedDict

from starlings_coordinator.core.pairing.outcomes import Named, OutcomeBook
from starlings_protos.group_messages import GroupDecided, GroupMatched
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import RoundOutcome, SwapResult

ROUNDS_REMEMBERED = 64


class GroupBook(OutcomeBook):
    """Of one stage. A round counts as averaged once, when its first member says so."""

    def __init__(self) -> None:
        super().__init__()
        self._matches: OrderedDict[int, GroupMatched] = OrderedDict()
        self._reported: OrderedDict[int, set[WorkerId]] = OrderedDict()
        self._averaged: set[int] = set()

    def opened(self, match: GroupMatched) -> None:
        self._matches[match.round_id] = match
        self._reported[match.round_id] = set()
        while len(self._matches) > ROUNDS_REMEMBERED:
            forgotten, _ = self._matches.popitem(last=False)
            self._reported.pop(forgotten, None)
            self._averaged.discard(forgotten)

    def decided(self, message: GroupDecided) -> None:
        """Everybody hears who was left out; it is written down here."""
        for dropped in message.dropped:
            self.name(Named(dropped.worker_id, None, f"slot {message.slot}: {dropped.reason}"))

    def told(self, worker_id: WorkerId, outcome: RoundOutcome) -> bool:
        """Returns whether it was expected: of a round that the worker was told of, once."""
        if outcome.round_id == 0:
            return super().told(worker_id, outcome)
        match = self._matches.get(outcome.round_id)
        reported = self._reported.get(outcome.round_id, set())
        expected = (
            match is not None
            and outcome.slot == match.slot
            and worker_id not in reported
            and (worker_id in match.adopters or any(seat.worker_id == worker_id for seat in match.seats))
            and outcome.result in (SwapResult.COMMITTED, SwapResult.SOLO)
        )
        if not expected:
            self.unexpected += 1
            return False
        reported.add(worker_id)
        self._count(worker_id, outcome)
        if outcome.result is SwapResult.COMMITTED and outcome.round_id not in self._averaged:
            self._averaged.add(outcome.round_id)
            self.rounds_averaged += 1
        return True
