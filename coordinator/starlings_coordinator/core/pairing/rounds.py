"""The rounds of one stage: who is ready, who meets whom, until when, and what each side weighs.

    RoundReady -> (clock runs?) ------ no: all have spoken, or 10 s after the first -> SlotClock to all
                        | yes
                        v
    its slot begins at another time than here -> SlotClock to it
    all are ready for slot k, or half of slot k - 1 is over -> match -> PairMatched to both sides of each pair
    a slot began -> look at step times and tokens -> perhaps SlotClock: another length from slot k + 2 on
    RoundOutcome -> OutcomeBook, LinkEstimates

A match is a whole contract. Its round id is a fingerprint of both lives, of stage, slot, fragment and swap, and of both
weights, so that two sides that were told different things (by a coordinator before its restart, and after) never find
together.

Slots that are too short for replicas to get ready in time get longer. A replica that was frozen hears a clock late,
and counts from when it heard it: its slots would begin late, and its rounds be solo, for ever. So it says with its
readiness when its next slot begins, and is told the clock again when that is wrong.

What fails: a replica that is frozen says nothing, so it is matched no more after the slot in which it froze. One that
was matched and is lost then costs its partner that swap (the partner learns of it by the new plan or by silence). One
that comes too late for a match sits out until the next slot. Nobody waits for anybody here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlings_coordinator.core.pairing.clock import LEAST_SLOT_S, StageClock, slot_length_s
from starlings_coordinator.core.pairing.exponential import match_exponentially
from starlings_coordinator.core.pairing.links import LinkEstimates
from starlings_coordinator.core.pairing.matching import (
    Candidate,
    SwapMatching,
    match_slot,
    worst_far_interval,
)
from starlings_coordinator.core.pairing.outcomes import Named, OutcomeBook
from starlings_coordinator.core.pairing.weights import (
    TokenLedger,
    TokenMark,
    credited,
    incredible,
)
from starlings_job.exchange_rules import ExchangeRules, Phase, pair_share
from starlings_job.exchange_traffic import swap_bytes
from starlings_protos.group_messages import GroupFromCoordinator
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import (
    PairMatched,
    RoundOutcome,
    RoundReady,
    SlotClock,
    SoloReason,
    SwapResult,
)

# After the first replica said that it trains, the others get so long to say so before the clock starts without them.
START_WAIT_S = 10.0
# A slot is matched when all are ready; at the latest, with those who are, this part of a slot before it begins.
LATEST_MATCH = 0.5
# After so many matches in a row for which replicas came a little too late, slots get longer by this factor.
LATE_MATCHES = 3
LONGER = 1.5
# The same when in so many slots no swap was in time, or over more slots so many times as many were late as not: most
# links are too slow for exchanges of this size every H steps. Lower share: one slow worker of three makes everybody's
# slots longer.
ALL_LATE_SLOTS = 6
LATE_SLOTS = 12
LATE_SHARE = 3
# A replica is told the clock again when its next slot begins this part of a slot earlier or later than it should.
# Lower: messages that take a while on the way are taken for a wrong clock. Higher: less of a slot is left for a pair.
CLOCK_OFF_MOST = 0.1

Told = tuple[WorkerId, SlotClock | PairMatched | GroupFromCoordinator]


@dataclass(frozen=True, slots=True)
class PairSettings:
    rules: ExchangeRules
    job_seed: int
    tokens_total: int
    # Of the stage's whole vector.
    elements: int

    def phase(self, *, warmup: bool) -> Phase:
        return self.rules.warmup if warmup and self.rules.warmup is not None else self.rules.main

    def is_warmup(self, tokens_done: int) -> bool:
        return self.rules.phase_at(tokens_done, self.tokens_total) == self.rules.warmup

    def swap_bytes(self, phase: Phase) -> int:
        return swap_bytes(self.rules, phase, self.elements)


@dataclass(slots=True)
class Replica:
    worker_id: WorkerId
    incarnation: int
    region: str
    # Where the ledger stood when it came.
    first_mark: TokenMark
    # The slot that it is ready for; 0: it has said nothing yet.
    ready: int = 0
    step_s: float = 0.0
    claimed_tokens: int = 0
    # Whether it has said anything since it is here.
    heard: bool = False
    # By fragment: where the ledger stood at its last round.
    marks: dict[int, TokenMark] = field(default_factory=dict)
    # The last slot in which it met another region (or could have), and whether it sat out in the last swap.
    last_far_slot: int = 0
    sat_out: bool = False


class StageRounds:
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
        """
        Args:
            first_slot: where the clock begins unless a replica has one already.
            start_wait_s: how long replicas that have said nothing are waited for, once one has spoken.
        """
        self.stage = stage
        self._first_slot = first_slot
        self._start_wait_s = start_wait_s
        self.settings = settings
        self.clock = StageClock(stage, settings.rules.fragments)
        self.book = OutcomeBook()
        self.replicas: dict[WorkerId, Replica] = {}
        self._links = links
        self._ledger = ledger
        self._first_heard_at_s: float | None = None
        # The newest slot that was matched, and the newest whose step times were looked at.
        self._matched = 0
        self._reviewed = 0
        # No slot is shorter than this: replicas were too slow for shorter ones.
        self._least_slot_s = LEAST_SLOT_S
        self._late_matches = 0
        # Swaps that were late, and in time, since that slot.
        self._fits: Counter[bool] = Counter()
        self._fits_from = first_slot

    # ------------------------------------------------------------------ who is here

    def joined(self, worker_id: WorkerId, incarnation: int, region: str, now_s: float) -> list[Told]:
        """A holder of the stage, or a new life of one. Also after its stream was down: it hears the clock again."""
        known = self.replicas.get(worker_id)
        if known is None or known.incarnation != incarnation:
            mark = TokenMark(self._ledger.tokens(worker_id, self.stage), now_s)
            self.replicas[worker_id] = Replica(worker_id, incarnation, region, mark)
            if self.clock.running:
                self.replicas[worker_id].last_far_slot = self.clock.slot_at(now_s)
        return self._clock_for(worker_id, now_s)

    def left(self, worker_id: WorkerId) -> None:
        """It is lost, leaves, or holds the stage no more. Its partners go on alone, by the plan or by its silence."""
        self.replicas.pop(worker_id, None)
        self.book.forget(worker_id)

    # ------------------------------------------------------------------ messages

    def ready(
        self, worker_id: WorkerId, incarnation: int, message: RoundReady, tokens_done: int, now_s: float
    ) -> list[Told]:
        replica = self._replica(worker_id, incarnation)
        if replica is None:
            return []
        replica.heard = True
        replica.ready = message.slot
        replica.claimed_tokens = message.tokens
        if message.step_s > 0:
            replica.step_s = message.step_s
        self._first_heard_at_s = now_s if self._first_heard_at_s is None else self._first_heard_at_s
        told: list[Told] = []
        if not self.clock.running and message.slot > 0:
            told = self._recover(message, tokens_done, now_s)
        elif self.clock.running and (message.slot == 0 or self._is_off(message, now_s)):
            told = self._clock_for(worker_id, now_s)
        return told + self.look_at_time(tokens_done, now_s)

    def outcome(self, worker_id: WorkerId, incarnation: int, message: RoundOutcome) -> bool:
        """Returns whether such a report was expected; any other counts for nothing."""
        if self._replica(worker_id, incarnation) is None or not self.book.told(worker_id, message):
            return False
        if message.result is SwapResult.COMMITTED:
            phase = self.settings.phase(warmup=self.clock.running and self.clock.warmup_at(message.slot))
            byte_count = self.settings.swap_bytes(phase)
            self._links.observe(worker_id, message.partner, byte_count, message.seconds)
            self._note_fit(message.slot, in_time=True)
        elif message.solo_reason is SoloReason.LATE:
            self._note_fit(message.slot, in_time=False)
        return True

    def _replica(self, worker_id: WorkerId, incarnation: int) -> Replica | None:
        replica = self.replicas.get(worker_id)
        return replica if replica is not None and replica.incarnation == incarnation else None

    # ------------------------------------------------------------------ time

    def look_at_time(self, tokens_done: int, now_s: float) -> list[Told]:
        """To be called a few times a second, and at `wake_at_s`."""
        if not self.clock.running:
            return self._start(tokens_done, now_s)
        told: list[Told] = []
        slot = self.clock.slot_at(now_s)
        if slot > self._reviewed:
            self._reviewed = slot
            warmup = self.settings.is_warmup(tokens_done)
            inner_steps = self.settings.phase(warmup=warmup).inner_steps
            steps = self._step_seconds()
            if self.clock.review(inner_steps, steps, warmup=warmup, now_s=now_s, least_s=self._least_s()):
                told += [message for who in sorted(self.replicas) for message in self._clock_for(who, now_s)]
        following = slot + 1
        if following > self._matched and self._may_match(following, now_s):
            self._matched = following
            self._note_late(following)
            told += self._match(following, now_s)
        return told

    def _least_s(self) -> float:
        return self._least_slot_s

    def wake_at_s(self, now_s: float) -> float | None:
        if not self.clock.running:
            first = self._first_heard_at_s
            return first + self._start_wait_s if first is not None else None
        following = self.clock.slot_at(now_s) + 1
        if following > self._matched:
            return self._latest_match_at_s(following)
        return self.clock.begins_at(following)

    def _start(self, tokens_done: int, now_s: float) -> list[Told]:
        """The clock begins when all replicas have said that they train, or some time after the first."""
        if self._first_heard_at_s is None:
            return []
        all_here = all(replica.heard for replica in self.replicas.values())
        warmup = self.settings.is_warmup(tokens_done)
        length_s = slot_length_s(self.settings.phase(warmup=warmup).inner_steps, self._step_seconds())
        if length_s is None or not (all_here or now_s >= self._first_heard_at_s + self._start_wait_s):
            return []
        self.clock.start(self._first_slot, now_s + length_s, length_s, warmup=warmup)
        return self._to_all(now_s)

    def _recover(self, message: RoundReady, tokens_done: int, now_s: float) -> list[Told]:
        """After a restart: the stage's clock goes on where the first replica that speaks has it."""
        warmup = self.settings.is_warmup(tokens_done)
        steps = self._step_seconds() or [message.step_s]
        length_s = slot_length_s(self.settings.phase(warmup=warmup).inner_steps, steps)
        if length_s is None:
            return []
        begins_at_s = now_s + max(0.0, message.begins_in_s)
        self.clock.start(message.slot, begins_at_s, length_s, warmup=warmup)
        # Who was matched for it before the restart keeps that match.
        self._matched = self._reviewed = message.slot
        return self._to_all(now_s)

    def _is_off(self, message: RoundReady, now_s: float) -> bool:
        """Whether the replica's next slot begins at another time there than here."""
        off_s = now_s + message.begins_in_s - self.clock.begins_at(message.slot)
        return abs(off_s) > CLOCK_OFF_MOST * self.clock.length_of(message.slot)

    def _step_seconds(self) -> list[float]:
        return [replica.step_s for replica in self.replicas.values() if replica.step_s > 0]

    def _clock_for(self, worker_id: WorkerId, now_s: float) -> list[Told]:
        if not self.clock.running:
            return []
        return [(worker_id, message) for message in self.clock.announcements(now_s)]

    def _to_all(self, now_s: float) -> list[Told]:
        return [told for worker_id in sorted(self.replicas) for told in self._clock_for(worker_id, now_s)]

    # ------------------------------------------------------------------ matching

    def _may_match(self, slot: int, now_s: float) -> bool:
        everybody = bool(self.replicas) and all(replica.ready == slot for replica in self.replicas.values())
        return everybody or now_s >= self._latest_match_at_s(slot)

    def _note_late(self, slot: int) -> None:
        """Who says of each slot that it is ready when its match is over needs longer slots, or meets nobody ever."""
        ready = sum(replica.ready == slot for replica in self.replicas.values())
        late = sum(replica.ready == slot - 1 for replica in self.replicas.values())
        self._late_matches = self._late_matches + 1 if ready < 2 <= ready + late else 0
        if self._late_matches >= LATE_MATCHES:
            self._late_matches = 0
            self._least_slot_s = max(self._least_slot_s, LONGER * self.clock.length_of(slot))

    def _note_fit(self, slot: int, *, in_time: bool) -> None:
        """Payloads that most swaps cannot deliver in time need longer slots; a few slow links lengthen nobody's."""
        if not self.clock.running or self.clock.length_of(slot) < self._least_slot_s:
            return  # A longer one is announced already.
        self._fits[in_time] += 1
        if slot - self._fits_from < (LATE_SLOTS if self._fits[True] else ALL_LATE_SLOTS):
            return
        if self._fits[False] >= LATE_SHARE * self._fits[True]:
            self._least_slot_s = LONGER * self.clock.length_of(slot)
        self._fits.clear()
        self._fits_from = slot

    def _latest_match_at_s(self, slot: int) -> float:
        return self.clock.begins_at(slot) - LATEST_MATCH * self.clock.length_of(slot - 1)

    def _match(self, slot: int, now_s: float) -> list[Told]:
        here = [replica for replica in self.replicas.values() if replica.ready == slot]
        phase = self.settings.phase(warmup=self.clock.warmup_at(slot))
        swaps = self.settings.rules.swaps_in(phase)
        weights = self._weights(here, slot, now_s)
        matchings: tuple[SwapMatching, ...]
        if self.settings.rules.topology == "exponential":
            matchings = (match_exponentially(weights, slot // self.clock.fragments),)
            # Even ones: a cycle of them makes the exact mean.
            weights = dict.fromkeys(weights, 1.0)
        else:
            matchings = match_slot(
                [Candidate(r.worker_id, r.region, slot - r.last_far_slot, r.sat_out) for r in here],
                self._links,
                job_seed=self.settings.job_seed,
                stage=self.stage,
                slot=slot,
                swaps=swaps,
                byte_count=self.settings.swap_bytes(phase),
            )
        one_region = len({replica.region for replica in here}) < 2
        told: list[Told] = []
        for swap, matching in enumerate(matchings):
            for one, other in matching.pairs:
                pair = (self.replicas[one], self.replicas[other])
                told += self._contract(slot, swap, swaps, pair, weights)
                if one_region or pair[0].region != pair[1].region:
                    pair[0].last_far_slot = pair[1].last_far_slot = slot
            for replica in here:
                replica.sat_out = replica.worker_id in matching.sitting
        return told

    def _weights(self, here: list[Replica], slot: int, now_s: float) -> dict[WorkerId, float]:
        fragment = self.clock.fragment_of(slot)
        weights = {}
        for replica in here:
            count = self._ledger.tokens(replica.worker_id, self.stage)
            mark = replica.marks.get(fragment, replica.first_mark)
            weights[replica.worker_id] = credited(count, mark, now_s)
            if incredible(replica.claimed_tokens, count, mark):
                leased = max(0.0, count.leased - mark.count.trained)
                reason = f"claims {replica.claimed_tokens} tokens; {leased:.0f} were leased"
                self.book.name(Named(replica.worker_id, None, reason))
            replica.marks[fragment] = TokenMark(count, now_s)
        return weights

    def _contract(
        self,
        slot: int,
        swap: int,
        swaps: int,
        pair: tuple[Replica, Replica],
        weights: Mapping[WorkerId, float],
    ) -> list[Told]:
        one, other = pair
        fragment = self.clock.fragment_of(slot)
        share = pair_share(weights[one.worker_id], weights[other.worker_id])
        # Each swap has its part of the slot, however long the ones before it took.
        deadline_s = self.clock.length_of(slot) * (swap + 1) / swaps
        round_id = fingerprint(
            self.settings.job_seed, self.stage, slot, fragment, swap, one.worker_id, one.incarnation,
            other.worker_id, other.incarnation, share.hex(),
        )  # fmt: skip
        told: list[Told] = []
        for own, partner, weight in ((one, other, share), (other, one, 1 - share)):
            match = PairMatched(
                self.stage, slot, fragment, swap, partner.worker_id, partner.incarnation, weight, deadline_s,
                round_id,
            )  # fmt: skip
            self.book.matched(own.worker_id, match)
            told.append((own.worker_id, match))
        return told

    def worst_far_interval(self) -> int | None:
        """In slots, with the replicas that are here: see `matching.worst_far_interval`."""
        sizes: dict[str, int] = {}
        for replica in self.replicas.values():
            sizes[replica.region] = sizes.get(replica.region, 0) + 1
        return worst_far_interval(sizes)


def fingerprint(*parts: object) -> int:
    """64 bits, never 0, equal on equal contracts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1
