"""One worker of a `PairWorld`: a PairRounds with a device, a network, training, and a life that may end.

It keeps books of its own of everything that a commit rests on (`Evidence`), and never looks into the state of a swap
but for its name and deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlings_protos.messages import Receipt, Refusal, Span, WorkerId
from starlings_protos.pair_messages import (
    PairMatched,
    PairWord,
    PairWordKind,
    RoundOutcome,
    RoundReady,
    SlotClock,
    SwapResult,
)
from starlings_worker.core.admission import Duplicate, Rejection
from starlings_worker.core.pairing.pair_rounds import PairRounds
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    ForgetPair,
    JudgePair,
    OuterStepTaken,
    PairAborted,
    PairArrived,
    PairCommitted,
    PairDeviceEffect,
    PairDeviceOutcome,
    PairEncoded,
    PairFailed,
    PairJudged,
    PairKey,
    PairNetworkEffect,
    PairNetworkEvent,
    PairNotSent,
    PairSent,
    SendPair,
    SendWord,
    TakeOuterStep,
    WordNotSent,
    WordSent,
    WordTold,
)

if TYPE_CHECKING:
    from support.pair_world import PairWorld

STEP_S = 1.0
# H: a slot lasts ten seconds.
INNER_STEPS = 10
TOKENS_PER_STEP = 100
# A sender that gets no answer gives up after this long.
UNANSWERED_S = 2.0
LATEST_COPY_S = 14.0
SPAN = Span(0, 0)


@dataclass(frozen=True)
class Trouble:
    """Chances, per message or piece of work."""

    loss: float = 0.0
    answer_loss: float = 0.0
    duplicate: float = 0.0
    abort: float = 0.0
    slow_device: float = 0.0
    delay_s: float = 0.02
    jitter_s: float = 0.0


CALM = Trouble()
ROUGH = Trouble(
    loss=0.12, answer_loss=0.12, duplicate=0.1, abort=0.1, slow_device=0.05, delay_s=0.05, jitter_s=0.6
)


@dataclass(frozen=True)
class Payload:
    """What travels: whose, for which swap, and the number."""

    sender: WorkerId
    key: PairKey
    value: float
    sha256: str


@dataclass
class Evidence:
    """The world's own record of one side of one swap."""

    match: PairMatched
    deadline_at_s: float | None = None
    own: Payload | None = None
    theirs: Payload | None = None
    # The partner said PREPARED, with the digest of `own`, in time.
    prepared: bool = False
    # (1 - w) (z_j - z_i), when it was applied.
    correction: float | None = None
    outcome: RoundOutcome | None = None


class Worker:
    """A PairRounds with a device that does one thing after another, a network, and a life that may end."""

    def __init__(self, world: PairWorld, worker_id: WorkerId, incarnation: int) -> None:
        self.world = world
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.alive = True
        self.frozen_until_s = 0.0
        self.counters: Counter[str] = Counter()
        self.theta = [world.rng.uniform(-1, 1) for _ in range(world.fragments)]
        self.phi = list(self.theta)
        self.evidence: dict[PairKey, Evidence] = {}
        # A word names the round alone.
        self._newest: dict[int, Evidence] = {}
        self.outcomes: list[RoundOutcome] = []
        self.slots_taken: list[tuple[int, float]] = []
        self.solo_told: list[int] = []
        self.claims = False
        self._own: dict[PairKey, Payload] = {}
        self._theirs: dict[PairKey, Payload] = {}
        self._forgotten: set[PairKey] = set()
        self._queue: list[PairDeviceEffect] = []
        self._running: PairDeviceEffect | None = None
        self._wake_at_s = float("inf")
        self.rounds = self._begin()

    def _begin(self) -> Any:
        """What decides; and training."""
        rounds = PairRounds(self._push, self._emit, self._say, self.counters)
        rounds.hold(SPAN)
        self.world.at(self.world.now_s + STEP_S * self.world.rng.uniform(0.5, 1.5), self._step)
        return rounds

    # ---------------------------------------------------------------- life

    def do(self, action: Callable[[], None]) -> None:
        """Now, or when it is not frozen any more; never after its death."""
        if not self.alive:
            return
        if self.frozen_until_s > self.world.now_s:
            self.world.at(self.frozen_until_s, lambda: self.do(action))
            return
        action()
        self._look()

    def _look(self) -> None:
        now_s = self.world.now_s
        self.rounds.look_at_time(now_s)
        self._check_nothing_hangs()
        wake_at_s = self.rounds.wake_at_s(now_s)
        if wake_at_s is not None and not now_s < self._wake_at_s <= wake_at_s:
            self._wake_at_s = max(wake_at_s, now_s + 1e-3)
            self.world.at(self._wake_at_s, lambda: self.do(lambda: None))

    def _check_nothing_hangs(self) -> None:
        for swap in self.rounds.stages[0].swaps():
            late = self.world.now_s > swap.deadline_at_s + 5.0
            # What it has decided, only its own device can hold up.
            at_work = any(isinstance(e, CommitPair) and e.key == swap.key for e in self._asked())
            assert at_work or not late, f"{self.worker_id}: {swap.key} hangs"

    def _asked(self) -> list[object]:
        """Of the device, and not done yet."""
        return [self._running, *self._queue]

    def _step(self) -> None:
        """Training: it never waits for an exchange."""

        def step() -> None:
            if self.world.trains(self):
                self._train()
                self.rounds.inner_stepped(0, TOKENS_PER_STEP, STEP_S, self.world.now_s)
            self.world.at(self.world.now_s + STEP_S, self._step)

        self.do(step)

    def _train(self) -> None:
        for fragment in range(self.world.fragments):
            self.theta[fragment] += self.world.rng.gauss(0, 0.1)

    # ---------------------------------------------------------------- device

    def _push(self, effect: PairDeviceEffect) -> None:
        self._note(effect)
        self._queue.append(effect)
        self._work()

    def _note(self, effect: PairDeviceEffect) -> None:
        """When it is asked for."""
        if isinstance(effect, CommitPair):
            self._check_decision(effect)
        if isinstance(effect, TakeOuterStep):
            self.slots_taken.append((effect.slot, self.world.now_s))
            self.solo_told.append(effect.solo_rounds)
            self._slot_began(effect.slot)

    def _slot_began(self, slot: int) -> None:
        began_at_s = self.rounds.stages[0].slots.begins_at(slot)
        assert began_at_s <= self.world.now_s + 1e-9
        for evidence in self.evidence.values():
            if evidence.match.slot == slot:
                evidence.deadline_at_s = began_at_s + evidence.match.deadline_s

    def _check_decision(self, effect: CommitPair) -> None:
        evidence = self.evidence[effect.key]
        assert evidence.deadline_at_s is not None
        assert self.world.now_s < evidence.deadline_at_s, "committed after the deadline"
        assert evidence.theirs is not None, "committed without the partner's payload"
        assert evidence.prepared, "committed without the partner's PREPARED"
        assert effect.weight == evidence.match.weight
        assert effect.partner == evidence.match.partner

    def _work(self) -> None:
        if self._running is not None or not self._queue:
            return
        rng, trouble = self.world.rng, self.world.trouble
        seconds = rng.uniform(0.001, 0.02)
        if rng.random() < trouble.slow_device:
            seconds += rng.uniform(0.5, 4.0)
        effect = self._running = self._queue.pop(0)

        def done() -> None:
            self._running = None
            self.rounds.handle(self._carried_out(effect), self.world.now_s)
            self._work()

        self.world.at(self.world.now_s + seconds, lambda: self.do(done))

    def _carried_out(self, effect: PairDeviceEffect) -> PairDeviceOutcome:
        match effect:
            case TakeOuterStep():
                self.phi[effect.fragment] = self.theta[effect.fragment]
                return OuterStepTaken(effect.stage, effect.slot)
            case EncodePair(key) if key in self._forgotten:
                return PairFailed(key, "forgotten meanwhile")
            case EncodePair(key):
                payload = Payload(self.worker_id, key, self.phi[key.fragment], self.world.digest())
                self._own[key] = payload
                self.evidence[key].own = payload
                return PairEncoded(key, payload.sha256)
            case JudgePair(key, partner):
                if key in self._forgotten:
                    return PairFailed(key, "forgotten meanwhile")
                theirs = self._theirs.get(key)
                assert theirs is not None, "the payload of another swap was taken"
                assert theirs.sender == partner
                if theirs.value != theirs.value:
                    return PairJudged(key, refused="its weights are not finite")
                return PairJudged(key, abs(theirs.value - self._own[key].value))
            case CommitPair(key, _, weight):
                own, theirs = self._own[key], self._theirs[key]
                assert theirs.key == own.key == key
                correction = (1 - weight) * (theirs.value - own.value)
                self.phi[key.fragment] += correction
                self.theta[key.fragment] += correction
                self.evidence[key].correction = correction
                return PairCommitted(key, 1.0, abs(theirs.value - own.value))

    # ---------------------------------------------------------------- network

    def _emit(self, effect: PairNetworkEffect) -> None:
        match effect:
            case SendPair():
                self._send_pair(effect)
            case SendWord():
                self._send_word(effect)
            case ForgetPair():
                self._forgotten.add(effect.key)
                self._own.pop(effect.key, None)
                self._theirs.pop(effect.key, None)

    def _send_pair(self, effect: SendPair) -> None:
        payload = self._own[effect.key]
        if self.world.poisoned == self.worker_id:
            payload = Payload(payload.sender, payload.key, float("nan"), payload.sha256)

        def answer(refusal: Refusal | None, reason: str) -> PairNetworkEvent:
            return PairSent(effect.key) if refusal is None else PairNotSent(effect.key, refusal, reason)

        self.world.call(self, effect.to, lambda to: to.take_payload(payload), answer)

    def _send_word(self, effect: SendWord) -> None:
        word = effect.word

        def answer(refusal: Refusal | None, reason: str) -> PairNetworkEvent:
            return WordSent(word) if refusal is None else WordNotSent(word, refusal, reason)

        self.world.call(self, effect.to, lambda to: to.take_word(word, self.worker_id), answer)

    def take_payload(self, payload: Payload) -> tuple[float, Refusal | None, str]:
        """Seconds until the answer, and what it is."""
        world = self.world
        header = payload.key.header(payload.sha256)
        admission = self.rounds.admit(header, payload.sender, Receipt(), world.now_s)
        if isinstance(admission, Rejection):
            return 0.0, admission.refusal, admission.message
        if isinstance(admission, Duplicate):
            return 0.0, None, ""
        seconds = world.rng.uniform(0.01, 0.1)
        aborted = world.rng.random() < world.trouble.abort

        def read() -> None:
            if aborted:
                event: PairNetworkEvent = PairAborted(header, payload.sender, "it broke off")
            else:
                self._theirs[payload.key] = payload
                self.evidence[payload.key].theirs = payload
                event = PairArrived(header, payload.sender)
            self.rounds.handle(event, world.now_s)

        world.at(world.now_s + seconds, lambda: self.do(read))
        return seconds, Refusal.UNSPECIFIED if aborted else None, "it broke off"

    def take_word(self, word: PairWord, sender: WorkerId) -> tuple[float, Refusal | None, str]:
        rejection = self.rounds.judge_word(word, sender, self.world.now_s)
        if rejection is not None:
            return 0.0, rejection.refusal, rejection.message
        evidence = self._newest.get(word.round_id)
        if evidence is not None and word.kind is PairWordKind.PREPARED:
            in_time = evidence.deadline_at_s is not None and self.world.now_s < evidence.deadline_at_s
            mine = evidence.own is not None and evidence.own.sha256 == word.sha256
            evidence.prepared |= in_time and mine and sender == evidence.match.partner
        self.rounds.handle(WordTold(word, sender), self.world.now_s)
        return 0.0, None, ""

    # ---------------------------------------------------------------- control

    def hear(self, message: SlotClock | PairMatched) -> None:
        if isinstance(message, PairMatched):
            evidence = self.evidence.setdefault(PairKey.of(message), Evidence(message))
            self._newest[message.round_id] = evidence
            slots = self.rounds.stages[0].slots
            if message.slot == slots.taken:
                began_at_s = slots.begins_at(message.slot)
                evidence.deadline_at_s = began_at_s + message.deadline_s
        self.rounds.told(message, self.world.now_s)

    def _say(self, message: RoundReady | RoundOutcome) -> None:
        if isinstance(message, RoundOutcome):
            self._check_outcome(message)
        elif self.claims:
            message = RoundReady(message.stage, message.slot, message.begins_in_s, 10**9, message.step_s)
        self.world.control_up(self, message)

    def _check_outcome(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)
        key = PairKey(outcome.stage, outcome.fragment, outcome.slot, outcome.swap, outcome.round_id)
        evidence = self.evidence.get(key)
        if evidence is None:
            assert outcome.round_id == 0
            return
        assert evidence.outcome is None, "two outcomes of one swap"
        evidence.outcome = outcome
        applied = evidence.correction is not None
        assert applied == (outcome.result is not SwapResult.SOLO), "the outcome is not what happened"
        assert outcome.fraction == (1.0 if applied else 0.0)
