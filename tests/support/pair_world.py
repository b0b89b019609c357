"""Both halves of pair exchanges, the coordinator's and some workers', on a virtual clock and a seeded network.

Vectors are one number per fragment, and a payload is the number with a tag of where it comes from. The world keeps
books of its own of everything that a commit rests on (`Evidence`), and raises AssertionError as soon as a promise is
broken; `PairWorld.finish` checks what can be said at the end. Nothing here looks into the state of a swap.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from starlings_coordinator.core.pairing.links import PassiveEstimates
from starlings_coordinator.core.pairing.rounds import PairSettings, StageRounds, Told
from starlings_coordinator.core.pairing.weights import TokenCount
from starlings_job.exchange_rules import Phase, rules_for
from starlings_protos.messages import Refusal, WorkerId
from starlings_protos.pair_messages import (
    RoundOutcome,
    RoundReady,
    SlotClock,
    SwapResult,
)
from starlings_worker.core.pairing.work import (
    PairKey,
    PairNetworkEvent,
)
from support.pair_worker import (
    CALM,
    INNER_STEPS,
    LATEST_COPY_S,
    STEP_S,
    TOKENS_PER_STEP,
    UNANSWERED_S,
    Evidence,
    Trouble,
    Worker,
)


class PairWorld:
    def __init__(
        self,
        seed: int,
        workers: int,
        *,
        trouble: Trouble = CALM,
        fragments: int = 1,
        swaps: int = 2,
        rounds_class: type[StageRounds] = StageRounds,
        skews: tuple[int, ...] = (),
        worker_class: type[Worker] = Worker,
    ) -> None:
        """
        Args:
            skews: slots that each worker's counter is ahead of what the coordinator says.
        """
        self.seed = seed
        self.rng = random.Random(seed)
        self.trouble = trouble
        self.fragments = fragments
        self.now_s = 0.0
        self.poisoned: WorkerId | None = None
        self.tokens: defaultdict[WorkerId, int] = defaultdict(int)
        self.coordinator_here = True
        self._rounds_class = rounds_class
        self._worker_class = worker_class
        self._skews = {WorkerId(f"w{number}"): skew for number, skew in enumerate(skews)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._digests = itertools.count(1)
        self._settings = PairSettings(
            rules_for(
                "pairs",
                main=Phase(INNER_STEPS, 1.0, 0.0),
                warmup=None,
                warmup_fraction=0.0,
                swaps=swaps,
                fragments=fragments,
            ),
            seed,
            10**9,
            64 * fragments,
        )
        self.coordinator = self._new_coordinator()
        self.lives: dict[WorkerId, int] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.all_lives: list[Worker] = []
        for number in range(workers):
            self._begin_life(WorkerId(f"w{number}"))
        self._tick()

    # ---------------------------------------------------------------- time

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._sequence), action))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = until_s

    def digest(self) -> str:
        return f"{next(self._digests):064x}"

    # ---------------------------------------------------------------- the coordinator

    def trains(self, worker: Worker) -> bool:
        """It is about to step: whether it has something to train, and then it is counted."""
        self.tokens[worker.worker_id] += TOKENS_PER_STEP
        return True

    def tokens_of(self, worker_id: WorkerId) -> TokenCount:
        trained = self.tokens[worker_id]
        return TokenCount(trained, trained + 10 * TOKENS_PER_STEP, TOKENS_PER_STEP / STEP_S)

    def _new_coordinator(self) -> StageRounds:
        world = self

        class Ledger:
            def tokens(self, worker_id: WorkerId, stage: int) -> TokenCount:
                return world.tokens_of(worker_id)

        return self._rounds_class(0, self._settings, PassiveEstimates(), Ledger())

    def _tick(self) -> None:
        if self.coordinator_here:
            self._tell(self.coordinator.look_at_time(0, self.now_s))
        self.at(self.now_s + 0.25, self._tick)

    def _tell(self, told: list[Told]) -> None:
        for worker_id, message in told:
            worker = self.workers.get(worker_id)
            if isinstance(message, SlotClock):
                message = replace(message, slot=message.slot + self._skews.get(worker_id, 0))
            if worker is not None:
                self._control(worker, lambda w=worker, m=message: w.do(lambda: w.hear(m)))

    def _control(self, worker: Worker, action: Callable[[], None]) -> None:
        """In order, as on a stream; lost when the stream is gone at its arrival."""
        self.at(self.now_s + 0.03, lambda: action() if self.coordinator_here else None)

    def control_up(self, worker: Worker, message: RoundReady | RoundOutcome) -> None:
        def arrive() -> None:
            if isinstance(message, RoundReady):
                self._tell(
                    self.coordinator.ready(worker.worker_id, worker.incarnation, message, 0, self.now_s)
                )
            else:
                self.coordinator.outcome(worker.worker_id, worker.incarnation, message)

        if self.coordinator_here:
            self._control(worker, arrive)

    def coordinator_away(self, seconds: float, *, restarts: bool) -> None:
        self.coordinator_here = False

        def back() -> None:
            self.coordinator_here = True
            if restarts:
                self.coordinator = self._new_coordinator()
            for worker_id, worker in self.workers.items():
                self._tell(self.coordinator.joined(worker_id, worker.incarnation, "", self.now_s))
                worker.do(lambda w=worker: w.rounds.reconnected(self.now_s))

        self.at(self.now_s + seconds, back)

    # ---------------------------------------------------------------- lives

    def _begin_life(self, worker_id: WorkerId) -> Worker:
        self.lives[worker_id] = self.lives.get(worker_id, 0) + 1
        worker = self._worker_class(self, worker_id, self.lives[worker_id])
        self.workers[worker_id] = worker
        self.all_lives.append(worker)
        self._tell(self.coordinator.joined(worker_id, worker.incarnation, "", self.now_s))
        self._spread_lives()
        return worker

    def _spread_lives(self) -> None:
        lives = {w: worker.incarnation for w, worker in self.workers.items()}
        for worker in self.workers.values():
            self.at(self.now_s + 0.03, lambda w=worker: w.do(lambda: w.rounds.lives(lives, self.now_s)))

    def _lost(self, worker_id: WorkerId, incarnation: int) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and worker.incarnation == incarnation:
            del self.workers[worker_id]
            self.coordinator.left(worker_id)
            self._spread_lives()

    def crash(self, worker_id: WorkerId, *, back_after_s: float | None = 3.0) -> None:
        worker = self.workers[worker_id]
        worker.alive = False
        # The stream breaks at once, and the coordinator waits for a moment.
        self.at(self.now_s + 1.5, lambda: self._lost(worker_id, worker.incarnation))
        if back_after_s is not None:
            self.at(self.now_s + back_after_s, lambda: self._back(worker_id))

    def freeze(self, worker_id: WorkerId, seconds: float) -> None:
        """Longer than 7 s: a new life afterwards; the old one still does what it had in hand."""
        worker = self.workers[worker_id]
        worker.frozen_until_s = self.now_s + seconds
        if seconds > 7.0:
            self.at(self.now_s + 7.0, lambda: self._lost(worker_id, worker.incarnation))

            def renew() -> None:
                worker.alive = False
                self._back(worker_id)

            self.at(self.now_s + seconds + 1.0, renew)

    def _back(self, worker_id: WorkerId) -> None:
        if worker_id not in self.workers:
            self._begin_life(worker_id)

    # ---------------------------------------------------------------- calls between workers

    def call(
        self,
        sender: Worker,
        to: WorkerId,
        deliver: Callable[[Worker], tuple[float, Refusal | None, str]],
        answer: Callable[[Refusal | None, str], PairNetworkEvent],
    ) -> None:
        """A call and its answer; either may be lost, the call may come twice, and everything takes a while."""
        trouble, rng = self.trouble, self.rng
        over = [False]

        def reply(refusal: Refusal | None, reason: str) -> None:
            if not over[0]:
                over[0] = True
                sender.do(lambda: sender.rounds.handle(answer(refusal, reason), self.now_s))

        def delay_s() -> float:
            return trouble.delay_s + rng.uniform(0, trouble.jitter_s)

        def arrive() -> None:
            receiver = self.workers.get(to)
            if receiver is None or not receiver.alive:
                self.at(self.now_s + delay_s(), lambda: reply(Refusal.UNSPECIFIED, "no connection"))
                return

            def take() -> None:
                seconds, refusal, reason = deliver(receiver)
                if rng.random() >= trouble.answer_loss:
                    self.at(self.now_s + seconds + delay_s(), lambda: reply(refusal, reason))

            receiver.do(take)

        if rng.random() >= trouble.loss:
            self.at(self.now_s + delay_s(), arrive)
        if rng.random() < trouble.duplicate:
            # Some come in a later slot.
            self.at(self.now_s + rng.uniform(0, LATEST_COPY_S), arrive)
        self.at(self.now_s + UNANSWERED_S, lambda: reply(Refusal.UNSPECIFIED, "no answer"))

    # ---------------------------------------------------------------- the end

    def finish(self) -> None:
        """What can be said of the whole run."""
        sides: defaultdict[PairKey, list[Evidence]] = defaultdict(list)
        for worker in self.all_lives:
            for key, evidence in worker.evidence.items():
                sides[key].append(evidence)
        for evidences in sides.values():
            assert len(evidences) <= 2
            if len(evidences) == 2:
                one, other = evidences
                assert abs(one.match.weight + other.match.weight - 1) < 1e-12
                if one.correction is not None and other.correction is not None:
                    moved = one.match.weight * one.correction + other.match.weight * other.correction
                    assert abs(moved) < 1e-12, "the weighted mean of a pair moved"
                for mine, theirs in ((one, other), (other, one)):
                    if mine.outcome is not None and mine.outcome.result is SwapResult.COMMITTED:
                        # Confirmed means that the partner knows; it may still fail on its own device.
                        assert theirs.prepared
        for worker in self.all_lives:
            slots = [slot for slot, _ in worker.slots_taken]
            assert slots == sorted(set(slots)), "a slot was taken twice"
            spoken = {outcome.slot for outcome in worker.outcomes}
            assert set(slots[:-1]) <= spoken, "a slot ended without an outcome"
            self._check_solo_counts(worker)

    def _check_solo_counts(self, worker: Worker) -> None:
        """The rule is told how many rounds of the fragment were alone in a row."""
        in_a_row: Counter[int] = Counter()
        averaged = {o.slot for o in worker.outcomes if o.result is not SwapResult.SOLO}
        for number, (slot, _) in enumerate(worker.slots_taken):
            fragment = slot % self.fragments
            assert worker.solo_told[number] == in_a_row[fragment], f"{worker.worker_id} slot {slot}"
            in_a_row[fragment] = 0 if slot in averaged else in_a_row[fragment] + 1

    def results(self, since_slot: int = 0) -> Counter[str]:
        """What came of swaps in the present lives, by name of result or of the reason to be alone."""
        counted: Counter[str] = Counter()
        for worker in self.workers.values():
            for outcome in worker.outcomes:
                if outcome.slot >= since_slot:
                    counted[came(outcome)] += 1
        return counted


def came(outcome: RoundOutcome) -> str:
    solo = outcome.result is SwapResult.SOLO
    return outcome.solo_reason.name if solo else outcome.result.name
