"""The group of one stage: seats and adopters of each slot, its round, what came of it."""

from __future__ import annotations

from collections import Counter

from starlings_coordinator.core.grouping.book import GroupBook
from starlings_coordinator.core.grouping.round import GroupRound
from starlings_coordinator.core.pairing.clock import MOST_SLOT_S
from starlings_coordinator.core.pairing.links import LinkEstimates
from starlings_coordinator.core.pairing.outcomes import Named
from starlings_coordinator.core.pairing.rounds import (
    START_WAIT_S,
    PairSettings,
    Replica,
    StageRounds,
    Told,
    fingerprint,
)
from starlings_coordinator.core.pairing.weights import TokenLedger
from starlings_protos.group_messages import (
    GroupDecided,
    GroupHeld,
    GroupMatched,
    GroupPrepared,
    GroupSeat,
)
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import RoundOutcome, RoundReady, SoloReason, SwapResult

# A round is decided by this part of its slot; replicas say that they are ready for the next one when it is.
DEADLINE = 0.7
# Who is ready is seated this part of a slot before the slot begins, at the latest.
LATEST_SEATS = 0.12
# Who copies the group's starting point has the rest of one slot for that: exact values, several times what a round
# sends. When it was late so often, slots get this much longer, until it has come, or they are so many times as long.
LATE_COPIES = 2
LONGER_TO_COPY = 2.0
LONGEST_TO_COPY = 8.0
# Who could not even copy in the longest slots is left alone for so many.
COPY_AGAIN_AFTER = 64
# No member's part of a fragment is larger or smaller than the usual one by more than this.
SHARE_FACTOR = 4.0


class GroupStage(StageRounds):
    """One per stage. Every method returns what is to be sent, in order."""

    def __init__(
        self,
        stage: int,
        settings: PairSettings,
        links: LinkEstimates,
        ledger: TokenLedger,
        *,
        first_slot: int = 1,
        start_wait_s: float = START_WAIT_S,
    ) -> None:
        super().__init__(stage, settings, links, ledger, first_slot=first_slot, start_wait_s=start_wait_s)
        self.book: GroupBook = GroupBook()
        self.round: GroupRound | None = None
        # As said with the last readiness.
        self._anchors: dict[WorkerId, str] = {}
        # The newest slot after which a replica stood where others stood, by fragment.
        self._averaged_at: dict[tuple[WorkerId, int], int] = {}
        # How often in a row each could not copy which fragment in time; what slots last for the sake of these, and
        # would without.
        self._late_copies: dict[WorkerId, Counter[int]] = {}
        self._copy_slot_s = self._usual_slot_s = 0.0
        # Who is left alone, up to which slot.
        self._too_thin: dict[WorkerId, int] = {}

    # ------------------------------------------------------------------ who is here, what they say

    def joined(self, worker_id: WorkerId, incarnation: int, region: str, now_s: float) -> list[Told]:
        known = self.replicas.get(worker_id)
        if known is not None and known.incarnation != incarnation:
            self.left(worker_id)
        return super().joined(worker_id, incarnation, region, now_s)

    def left(self, worker_id: WorkerId) -> None:
        super().left(worker_id)
        self._anchors.pop(worker_id, None)
        self._late_copies.pop(worker_id, None)
        self._too_thin.pop(worker_id, None)
        self._usual_if_nobody_copies()
        self._averaged_at = {k: slot for k, slot in self._averaged_at.items() if k[0] != worker_id}
        if self.round is not None:
            self.round.leave(worker_id)

    def ready(
        self, worker_id: WorkerId, incarnation: int, message: RoundReady, tokens_done: int, now_s: float
    ) -> list[Told]:
        if self._replica(worker_id, incarnation) is not None:
            self._anchors[worker_id] = message.anchor
        return super().ready(worker_id, incarnation, message, tokens_done, now_s)

    def said(
        self, worker_id: WorkerId, incarnation: int, message: GroupHeld | GroupPrepared, now_s: float
    ) -> list[Told]:
        round_ = self.round
        known = self._replica(worker_id, incarnation) is not None
        if round_ is None or not known or round_.match.round_id != message.round_id:
            return []
        if isinstance(message, GroupHeld):
            return self._noted(round_.hold(worker_id, message, now_s))
        return self._noted(round_.prepare(worker_id, message, now_s))

    def outcome(self, worker_id: WorkerId, incarnation: int, message: RoundOutcome) -> bool:
        """Returns whether such a report was expected; any other counts for nothing."""
        if self._replica(worker_id, incarnation) is None or not self.book.told(worker_id, message):
            return False
        if message.result is SwapResult.COMMITTED:
            self._averaged_at[worker_id, message.fragment] = message.slot
            self._note_copied(worker_id, message.slot)
            self._note_fit(message.slot, in_time=True)
        elif message.partner and message.solo_reason is SoloReason.BEHIND:
            # Of use as long as the fragment's next seats are not given.
            if self._matched < message.slot + self.clock.fragments:
                self._note_copied(worker_id, message.slot)
            else:
                self._note_late_copy(worker_id, message.slot)
        elif message.partner and message.solo_reason is SoloReason.LATE:
            self._note_late_copy(worker_id, message.slot)
        elif message.solo_reason is SoloReason.LATE:
            self._note_fit(message.slot, in_time=False)
        return True

    # ------------------------------------------------------------------ time

    def look_at_time(self, tokens_done: int, now_s: float) -> list[Told]:
        told: list[Told] = []
        if self.round is not None:
            told += self._noted(self.round.look(now_s))
        return told + super().look_at_time(tokens_done, now_s)

    def _least_s(self) -> float:
        return max(super()._least_s(), self._copy_slot_s)

    def _note_late_copy(self, worker_id: WorkerId, slot: int) -> None:
        """What does not fit into a slot is dropped when the next begins, so it is never there."""
        if not self.clock.running or self.clock.length_of(slot) < self._copy_slot_s:
            return  # A longer one is announced already.
        late = self._late_copies.setdefault(worker_id, Counter())
        late[self.clock.fragment_of(slot)] += 1
        if late.total() < LATE_COPIES:
            return
        self._late_copies[worker_id] = Counter(dict.fromkeys(late, 0))
        length_s = self.clock.length_of(slot)
        self._usual_slot_s = self._usual_slot_s or length_s
        longer_s = min(MOST_SLOT_S, LONGER_TO_COPY * length_s)
        if length_s < longer_s <= LONGEST_TO_COPY * self._usual_slot_s:
            self._copy_slot_s = longer_s
            return
        del self._late_copies[worker_id]
        self._usual_if_nobody_copies()
        self._too_thin[worker_id] = slot + COPY_AGAIN_AFTER
        reason = (
            f"the others' starting point of {self._copy_bytes() / 1e6:.1f} MB does not come to it in a slot of "
            f"{length_s:.0f} s; a larger [exchange] every or more fragments would help"
        )
        self.book.name(Named(worker_id, None, reason))

    def _note_copied(self, worker_id: WorkerId, slot: int) -> None:
        late = self._late_copies.get(worker_id)
        if late is not None:
            del late[self.clock.fragment_of(slot)]
            if not late:
                del self._late_copies[worker_id]
        self._usual_if_nobody_copies()

    def _usual_if_nobody_copies(self) -> None:
        if not self._late_copies:
            self._copy_slot_s = self._usual_slot_s = 0.0

    def _copy_bytes(self) -> int:
        tensors = 2 if self.settings.rules.main.outer_momentum > 0 else 1
        return 4 * tensors * -(-self.settings.elements // self.settings.rules.fragments)

    def _noted(self, told: list[Told]) -> list[Told]:
        decided = next((message for _, message in told if isinstance(message, GroupDecided)), None)
        if decided is not None:
            self.book.decided(decided)
        return told

    def wake_at_s(self, now_s: float) -> float | None:
        times = [super().wake_at_s(now_s), self.round.wake_at_s() if self.round is not None else None]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def _latest_match_at_s(self, slot: int) -> float:
        return self.clock.begins_at(slot) - LATEST_SEATS * self.clock.length_of(slot - 1)

    # ------------------------------------------------------------------ seats

    def _match(self, slot: int, now_s: float) -> list[Told]:
        here = [r for r in self.replicas.values() if r.ready == slot and self._anchors.get(r.worker_id)]
        if not here:
            return []
        fragment = self.clock.fragment_of(slot)
        anchor = self._common_anchor(here, fragment)
        members = sorted((r for r in here if self._anchors[r.worker_id] == anchor), key=lambda r: r.worker_id)
        behind = sorted(r.worker_id for r in here if self._anchors[r.worker_id] != anchor)
        adopters = tuple(worker_id for worker_id in behind if self._too_thin.get(worker_id, 0) < slot)
        weights = self._weights(members, slot, now_s)
        if not any(weights.values()):
            weights = dict.fromkeys(weights, 1.0)
        shares = self._shares(members)
        seats = tuple(
            GroupSeat(r.worker_id, r.incarnation, shares[r.worker_id], weights[r.worker_id]) for r in members
        )
        deadline_s = DEADLINE * self.clock.length_of(slot)
        # Another one each time, so that none has all the work.
        donor = members[slot % len(members)].worker_id
        contract = (self.settings.job_seed, self.stage, slot, fragment, seats, anchor, adopters, donor)
        match = GroupMatched(
            self.stage, slot, fragment, fingerprint(*contract), seats, anchor, deadline_s, adopters, donor
        )
        self.round = GroupRound(match, self.clock.begins_at(slot))
        self.book.opened(match)
        return [(worker_id, match) for worker_id in sorted([*(r.worker_id for r in members), *adopters])]

    def _common_anchor(self, here: list[Replica], fragment: int) -> str:
        """That of the most replicas which have averaged this fragment before (of all, where none has): newcomers have
        no say. Among equals that of whoever averaged last, then that of the lowest worker id.
        """
        averaged = {r.worker_id: self._averaged_at.get((r.worker_id, fragment), -1) for r in here}
        voters = [r for r in here if averaged[r.worker_id] >= 0] or here
        counts = Counter(self._anchors[r.worker_id] for r in voters)

        def rank(replica: Replica) -> tuple[int, int, WorkerId]:
            worker_id = replica.worker_id
            return (-counts[self._anchors[worker_id]], -averaged[worker_id], worker_id)

        return self._anchors[min(voters, key=rank).worker_id]

    def _shares(self, members: list[Replica]) -> dict[WorkerId, float]:
        """Of the vector, by what each can send: an owner sends its aggregate to everybody else. Within a factor of what
        is usual: a bad measurement must not give somebody everything.
        """
        rates = {r.worker_id: self._links.rate_bytes_per_s(r.worker_id) for r in members}
        usual = sorted(rates.values())[len(rates) // 2]
        bounded = {w: min(SHARE_FACTOR * usual, max(usual / SHARE_FACTOR, rate)) for w, rate in rates.items()}
        total = sum(bounded.values())
        return {worker_id: rate / total for worker_id, rate in bounded.items()}
