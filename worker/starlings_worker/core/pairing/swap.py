"""One exchange with one partner, from match to outcome. States and failures: the package's docstring.

Design, section 6: a side commits iff it has verified the partner's whole payload and heard its PREPARED before the
deadline on its own clock. The own PREPARED is repeated until it is acknowledged; when that never happens, the partner
may have gone on alone, and the outcome says one-sided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from starlings_protos.messages import Receipt, Refusal, WorkerId
from starlings_protos.pair_messages import (
    PairHeader,
    PairMatched,
    PairWord,
    PairWordKind,
    RoundOutcome,
    SoloReason,
    SwapResult,
)
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    ForgetPair,
    JudgePair,
    PairCommitted,
    PairDeviceEffect,
    PairEncoded,
    PairFailed,
    PairJudged,
    PairKey,
    PairNetworkEffect,
    SendPair,
    SendWord,
)


@dataclass(frozen=True, slots=True)
class PairTimings:
    """Patience in a swap, seconds."""

    # Without a sign of life of the partner for so long the swap is given up. Raising it lets slower links live, and
    # makes a frozen partner cost more of the slot.
    progress_s: float = 5.0
    # While it waits, a side says so this often; the answer is a sign of life.
    poke_s: float = 1.5
    retry_first_s: float = 0.1
    retry_most_s: float = 1.0

    def retry_s(self, tries: int) -> float:
        return min(self.retry_most_s, self.retry_first_s * 2.0 ** min(tries - 1, 16))


@dataclass(slots=True)
class _Delivery:
    """Something that is repeated until the partner has it."""

    under_way: bool = False
    done: bool = False
    tries: int = 0
    again_at_s: float = 0.0

    def due(self, now_s: float) -> bool:
        return not (self.under_way or self.done) and now_s >= self.again_at_s

    def failed(self, now_s: float, timings: PairTimings) -> None:
        self.under_way = False
        self.tries += 1
        self.again_at_s = now_s + timings.retry_s(self.tries)


@dataclass(slots=True)
class Swap:
    match: PairMatched
    timings: PairTimings
    push: Callable[[PairDeviceEffect], None]
    emit: Callable[[PairNetworkEffect], None]
    key: PairKey = field(init=False)
    # Set when the slot has begun.
    deadline_at_s: float = math.inf
    # None: its turn has not come.
    started_at_s: float | None = None
    heard_at_s: float = 0.0
    own_sha256: str = ""
    # A payload of the partner was admitted, and is being read.
    arriving: bool = False
    their_sha256: str = ""
    judging: bool = False
    verdict: PairJudged | None = None
    partner_prepared: bool = False
    # The decision is made, and stands.
    committing: bool = False
    committed: PairCommitted | None = None
    decided_at_s: float = 0.0
    payload: _Delivery = field(default_factory=_Delivery)
    prepared: _Delivery = field(default_factory=_Delivery)
    poke: _Delivery = field(default_factory=_Delivery)
    # The partner will not confirm any more: it is over there.
    unconfirmable: bool = False
    outcome: RoundOutcome | None = None

    def __post_init__(self) -> None:
        self.key = PairKey.of(self.match)

    @property
    def partner(self) -> WorkerId:
        return self.match.partner

    @property
    def over(self) -> bool:
        return self.outcome is not None

    @property
    def settled(self) -> bool:
        """Its effect on the weights is known, so the next swap may begin."""
        return self.over or self.committed is not None

    @property
    def averages(self) -> bool:
        return self.committing and not (self.outcome is not None and self.outcome.result is SwapResult.SOLO)

    # ------------------------------------------------------------------ from slot to payload

    def slot_began(self, slot_at_s: float) -> None:
        self.deadline_at_s = slot_at_s + self.match.deadline_s

    def start(self, now_s: float) -> None:
        """The weights are those that this swap is about."""
        self.started_at_s = self.heard_at_s = now_s
        self.poke.again_at_s = now_s + self.timings.poke_s
        self.push(EncodePair(self.key))

    def encoded(self, event: PairEncoded, now_s: float) -> None:
        if not self.over and not self.own_sha256:
            self.own_sha256 = event.sha256
            self.advance(now_s)

    # ------------------------------------------------------------------ the partner's payload

    def admit(self, header: PairHeader, sender: WorkerId, receipt: Receipt, now_s: float) -> Admission:
        """A Receipt reserves: PairArrived or PairAborted follows. Payloads may come before the own slot begins."""
        if not self.fits(header, sender):
            return Rejection(
                Refusal.MALFORMED, "the round is not what the payload says, or with another worker"
            )
        if self.over or now_s >= self.deadline_at_s:
            return Rejection(Refusal.STALE, "the swap is over here")
        self.heard_at_s = now_s
        if self.their_sha256:
            if header.sha256 == self.their_sha256:
                return Duplicate(receipt)
            return Rejection(Refusal.MALFORMED, "another payload came for this round")
        if self.arriving:
            return Rejection(Refusal.BUSY, "this payload is being read")
        self.arriving = True
        return receipt

    def fits(self, header: PairHeader, sender: WorkerId) -> bool:
        """Whether a payload is the partner's, of this very swap."""
        return sender == self.partner and PairKey.of(header) == self.key

    def arrived(self, header: PairHeader, sender: WorkerId, now_s: float) -> None:
        if not (self.arriving and self.fits(header, sender)) or self.over:
            return
        self.arriving = False
        self.their_sha256 = header.sha256
        self.heard_at_s = now_s
        self.advance(now_s)

    def aborted(self, header: PairHeader, sender: WorkerId) -> None:
        """The partner sends it again."""
        if self.fits(header, sender):
            self.arriving = False

    def judged(self, event: PairJudged, now_s: float) -> None:
        if self.over or self.verdict is not None:
            return
        self.verdict = event
        if event.too_far:
            self.close(SoloReason.TOO_FAR, event.refused, now_s)
        elif event.refused:
            self.close(SoloReason.REFUSED, event.refused, now_s)
        else:
            self.advance(now_s)

    # ------------------------------------------------------------------ words

    def judge_word(self, word: PairWord, sender: WorkerId, now_s: float) -> Rejection | None:
        """None: let in."""
        if sender != self.partner:
            return Rejection(Refusal.MALFORMED, "the round is with another worker")
        if self.over or now_s >= self.deadline_at_s:
            return self.late_word(word)
        of_mine = bool(self.own_sha256) and word.sha256 == self.own_sha256
        if word.kind is PairWordKind.PREPARED and not of_mine:
            return Rejection(Refusal.MALFORMED, "that is not the digest of what was sent")
        if word.kind is PairWordKind.UNSPECIFIED:
            return Rejection(Refusal.MALFORMED, "a word that says nothing")
        return None

    def late_word(self, word: PairWord) -> Rejection | None:
        """Who has averaged says so to a partner whose PREPARED was answered before, and the answer lost."""
        if self.averages and word.kind is PairWordKind.PREPARED and word.sha256 == self.own_sha256:
            return None
        return Rejection(Refusal.STALE, "the swap is over here")

    def told(self, word: PairWord, now_s: float) -> None:
        """A word that `judge_word` has let in, at the same time."""
        if self.over:
            return
        self.heard_at_s = now_s
        if word.kind is PairWordKind.PREPARED and now_s < self.deadline_at_s:
            self.partner_prepared = True
            self.advance(now_s)
        elif word.kind is PairWordKind.DECLINED:
            self._partner_is_through(f"the partner declined: {word.reason}", now_s)

    def word_sent(self, word: PairWord, now_s: float) -> None:
        self.heard_at_s = now_s
        if word.kind is PairWordKind.PREPARED:
            self.prepared.under_way, self.prepared.done = False, True
            self._finish_if_confirmed(now_s)
        elif word.kind is PairWordKind.WAITING:
            self.poke.under_way = False
            self.poke.again_at_s = now_s + self.timings.poke_s

    def word_not_sent(self, word: PairWord, refusal: Refusal, reason: str, now_s: float) -> None:
        delivery = self.prepared if word.kind is PairWordKind.PREPARED else self.poke
        delivery.failed(now_s, self.timings)
        self._refused(refusal, reason, now_s)

    # ------------------------------------------------------------------ the own payload

    def sent(self, now_s: float) -> None:
        self.payload.under_way, self.payload.done = False, True
        self.heard_at_s = now_s

    def not_sent(self, refusal: Refusal, reason: str, now_s: float) -> None:
        self.payload.failed(now_s, self.timings)
        self._refused(refusal, reason, now_s)

    def moved(self, now_s: float) -> None:
        self.heard_at_s = now_s

    def _refused(self, refusal: Refusal, reason: str, now_s: float) -> None:
        if refusal is not Refusal.UNSPECIFIED:
            self.heard_at_s = now_s  # Alive, whatever it says.
        through = (Refusal.STALE, Refusal.MALFORMED, Refusal.LIMIT, Refusal.NOT_HELD)
        if refusal in through and not self.over:
            self._partner_is_through(reason or "it is over at the partner's", now_s)

    def _partner_is_through(self, reason: str, now_s: float) -> None:
        if self.committing:
            self.unconfirmable = True
            self._finish_if_confirmed(now_s)
        else:
            self.close(SoloReason.DECLINED, reason, now_s)

    # ------------------------------------------------------------------ decisions

    def advance(self, now_s: float) -> None:
        """Whatever has become possible or is due."""
        if self.over or self.started_at_s is None:
            return
        if now_s >= self.deadline_at_s and not self.committing:
            return  # `look_at_time` closes it: nobody may be told PREPARED any more.
        if self.own_sha256 and self.payload.due(now_s):
            self.payload.under_way = True
            self.emit(SendPair(self.key, self.own_sha256, self.partner))
        if self.own_sha256 and self.their_sha256 and not self.judging:
            self.judging = True
            self.push(JudgePair(self.key, self.partner))
        if self._plausible and self.prepared.due(now_s):
            self.prepared.under_way = True
            self._say(PairWord(self.key.round_id, PairWordKind.PREPARED, self.their_sha256))
        if self.poke.due(now_s) and not self.prepared.under_way:
            self.poke.under_way = True
            self._say(PairWord(self.key.round_id, PairWordKind.WAITING))
        if not self.committing and self.may_commit(now_s):
            self.committing = True
            self.decided_at_s = now_s
            self.push(CommitPair(self.key, self.partner, self.match.weight))

    @property
    def _plausible(self) -> bool:
        return self.verdict is not None and not (self.verdict.refused or self.verdict.too_far)

    def may_commit(self, now_s: float) -> bool:
        """Design, section 6: the commit rule."""
        return self._plausible and self.partner_prepared and now_s < self.deadline_at_s

    def commit_done(self, event: PairCommitted, now_s: float) -> None:
        if self.committing and not self.over:
            self.committed = event
            self._finish_if_confirmed(now_s)

    def failed(self, event: PairFailed, now_s: float) -> None:
        """The own device could not."""
        if not self.over:
            self.committing = False
            self.close(SoloReason.FAILED, event.reason, now_s)

    def fence(self, reason: str, now_s: float) -> None:
        """The partner's life is over: the plan says so."""
        if self.committing:
            self.unconfirmable = True
            self._finish_if_confirmed(now_s)
        elif not self.over:
            self.close(SoloReason.FENCED, reason, now_s)

    def look_at_time(self, now_s: float) -> None:
        if self.over or self.started_at_s is None:
            return
        silent = now_s - self.heard_at_s >= self.timings.progress_s
        if self.committing:
            if silent or now_s >= self.deadline_at_s:
                self.unconfirmable = True
                self._finish_if_confirmed(now_s)
        elif now_s >= self.deadline_at_s:
            self.close(SoloReason.LATE, self._missing(), now_s)
        elif silent:
            self.close(SoloReason.SILENT, f"nothing was heard of it for {self.timings.progress_s:g} s", now_s)
        self.advance(now_s)

    def wake_at_s(self) -> float | None:
        if self.over or self.started_at_s is None:
            return None
        times = [self.deadline_at_s, self.heard_at_s + self.timings.progress_s]
        for delivery, wanted in (
            (self.payload, bool(self.own_sha256)),
            (self.prepared, self._plausible),
            (self.poke, not self.prepared.under_way),
        ):
            if wanted and not (delivery.under_way or delivery.done):
                times.append(delivery.again_at_s)
        if self.committing and self.committed is None and self.unconfirmable:
            return None  # It waits for the own device alone.
        return min(times)

    def _missing(self) -> str:
        if not self.own_sha256:
            return "the own payload was not encoded by the deadline"
        if not self.their_sha256:
            return "the partner's payload was not here by the deadline"
        if self.verdict is None:
            return "the partner's payload was not judged by the deadline"
        return "the partner did not say that it is prepared by the deadline"

    # ------------------------------------------------------------------ the end

    def close(self, reason: SoloReason, detail: str, now_s: float) -> None:
        """Solo: the own step stands as it is. The partner is told, once, if it can be waiting for this side."""
        if self.over or self.committing:
            return
        self._end(SwapResult.SOLO, reason, detail)
        if reason not in (SoloReason.DECLINED, SoloReason.FENCED):
            text = detail or reason.name.lower().replace("_", " ")
            self._say(PairWord(self.key.round_id, PairWordKind.DECLINED, reason=text))

    def _finish_if_confirmed(self, now_s: float) -> None:
        if self.over or self.committed is None:
            return
        if self.prepared.done:
            self._end(SwapResult.COMMITTED)
        elif self.unconfirmable:
            self._end(SwapResult.ONE_SIDED, detail="the partner never confirmed that it was told")

    def _end(self, result: SwapResult, reason: SoloReason = SoloReason.UNSPECIFIED, detail: str = "") -> None:
        match, committed, started_at_s = self.match, self.committed, self.started_at_s
        decided = result is not SwapResult.SOLO and started_at_s is not None
        far = committed.distance if committed is not None else self.verdict.distance if self.verdict else 0.0
        self.outcome = RoundOutcome(
            match.stage,
            match.slot,
            match.fragment,
            match.swap,
            match.round_id,
            match.partner,
            result,
            reason,
            detail[:200],
            committed.fraction if committed is not None and result is not SwapResult.SOLO else 0.0,
            far if math.isfinite(far) else 0.0,
            self.decided_at_s - started_at_s if decided and started_at_s is not None else 0.0,
        )
        self.emit(ForgetPair(self.key))

    def _say(self, word: PairWord) -> None:
        self.emit(SendWord(word, self.partner))
