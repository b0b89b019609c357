"""What came of swaps, as both sides report it: who averaged, who was alone for how long, who was named by whom.

Outcomes are believed only as far as they go: that a replica averaged, or did not, is its own affair; what it says of a
partner counts against that partner when several say so.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import PairMatched, RoundOutcome, SoloReason, SwapResult

# Rounds whose outcomes are still awaited, and outcomes that are shown to people.
ROUNDS_REMEMBERED = 8192
OUTCOMES_SHOWN = 256
# So many different partners must name a replica before it is suspected.
ACCUSERS_LEAST = 2

# Reasons that say something about the partner. LATE may be anybody's fault, DECLINED is the partner's own word.
_ACCUSING = frozenset({SoloReason.REFUSED, SoloReason.SILENT})


@dataclass(frozen=True, slots=True)
class Named:
    """Somebody says of a replica that it sent nonsense or nothing, or the coordinator saw an impossible claim."""

    worker_id: WorkerId
    # None: the coordinator itself.
    by: WorkerId | None
    reason: str


@dataclass(slots=True)
class ReplicaRecord:
    committed: int = 0
    solo: int = 0
    # Slots without an average, in a row.
    solo_slots_in_a_row: int = 0
    # Its own average stands and its partner's does not.
    one_sided: int = 0
    # Reasons for its solo swaps.
    reasons: Counter[SoloReason] = field(default_factory=Counter)
    accusers: set[WorkerId] = field(default_factory=set)
    last: RoundOutcome | None = None


@dataclass(slots=True)
class _Round:
    sides: tuple[WorkerId, WorkerId]
    slot: int
    outcomes: dict[WorkerId, RoundOutcome] = field(default_factory=dict)


class OutcomeBook:
    """Of one stage."""

    def __init__(self) -> None:
        self.records: dict[WorkerId, ReplicaRecord] = {}
        self.shown: deque[tuple[WorkerId, RoundOutcome]] = deque(maxlen=OUTCOMES_SHOWN)
        self.named: deque[Named] = deque(maxlen=OUTCOMES_SHOWN)
        self.rounds_averaged = 0
        # One side averaged and the other did not: permitted, and counted.
        self.rounds_one_sided = 0
        # Reports of rounds that nobody was matched for, or twice.
        self.unexpected = 0
        self._rounds: OrderedDict[int, _Round] = OrderedDict()
        # The newest slot that each replica spoke of, and whether it averaged in it.
        self._slots: dict[WorkerId, tuple[int, bool]] = {}
        # Of replicas without a match: the slots that they have reported.
        self._unmatched: dict[WorkerId, int] = {}

    def of(self, worker_id: WorkerId) -> ReplicaRecord:
        return self.records.setdefault(worker_id, ReplicaRecord())

    def forget(self, worker_id: WorkerId) -> None:
        """It is no replica any more."""
        for known in (self.records, self._slots, self._unmatched):
            known.pop(worker_id, None)

    def matched(self, worker_id: WorkerId, match: PairMatched) -> None:
        """To be called for both sides of a match."""
        self._rounds.setdefault(match.round_id, _Round((worker_id, match.partner), match.slot))
        while len(self._rounds) > ROUNDS_REMEMBERED:
            self._rounds.popitem(last=False)

    def name(self, named: Named) -> None:
        self.named.append(named)
        if named.by is not None:
            self.of(named.worker_id).accusers.add(named.by)

    def suspects(self) -> tuple[WorkerId, ...]:
        """Whom several partners have named, sorted."""
        return tuple(
            sorted(w for w, record in self.records.items() if len(record.accusers) >= ACCUSERS_LEAST)
        )

    def told(self, worker_id: WorkerId, outcome: RoundOutcome) -> bool:
        """Returns whether it was expected: of a round that the worker was matched for, with that partner, once."""
        round_ = self._rounds.get(outcome.round_id)
        if outcome.round_id == 0:
            expected = outcome.result is SwapResult.SOLO and outcome.slot > self._unmatched.get(worker_id, -1)
            self._unmatched[worker_id] = max(outcome.slot, self._unmatched.get(worker_id, -1))
        else:
            expected = (
                round_ is not None
                and outcome.slot == round_.slot
                and worker_id not in round_.outcomes
                and outcome.partner != worker_id
                and {worker_id, outcome.partner} == set(round_.sides)
                and outcome.result is not SwapResult.UNSPECIFIED
            )
        if not expected:
            self.unexpected += 1
            return False
        self._count(worker_id, outcome)
        if round_ is not None and outcome.round_id:
            round_.outcomes[worker_id] = outcome
            self._reconcile(round_)
        return True

    def _count(self, worker_id: WorkerId, outcome: RoundOutcome) -> None:
        record = self.of(worker_id)
        self.shown.append((worker_id, outcome))
        averaged = outcome.result is not SwapResult.SOLO
        record.last = outcome
        record.committed += averaged
        record.solo += not averaged
        if not averaged:
            record.reasons[outcome.solo_reason] += 1
            if outcome.solo_reason in _ACCUSING:
                self.name(
                    Named(outcome.partner, worker_id, outcome.detail or outcome.solo_reason.name.lower())
                )
        slot, before = self._slots.get(worker_id, (-1, False))
        if outcome.slot > slot:
            record.solo_slots_in_a_row = 0 if averaged else record.solo_slots_in_a_row + 1
            self._slots[worker_id] = (outcome.slot, averaged)
        elif averaged and not before:
            record.solo_slots_in_a_row = 0
            self._slots[worker_id] = (slot, True)

    def _reconcile(self, round_: _Round) -> None:
        """Once both sides have spoken it is known whether both averaged."""
        if len(round_.outcomes) < 2:
            return
        averaged = {w: o.result is not SwapResult.SOLO for w, o in round_.outcomes.items()}
        if all(averaged.values()):
            self.rounds_averaged += 1
        elif any(averaged.values()):
            self.rounds_one_sided += 1
            for worker_id, did in averaged.items():
                self.of(worker_id).one_sided += did
