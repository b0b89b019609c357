"""Exchanges in pairs in the worker's core: slots beside training, one device, plans, reconnections, the end."""

from __future__ import annotations

import random
from collections import Counter

from starlings_job.exchange_rules import rules_for
from starlings_job.sections import TrainSection
from starlings_protos.messages import LeaseRequest, Receipt, Refusal, Standby, StateWanted, WorkerId
from starlings_protos.pair_messages import (
    PairMatched,
    PairWord,
    PairWordKind,
    RoundOutcome,
    RoundReady,
    SlotClock,
    SoloReason,
    SwapResult,
)
from starlings_protos.stream_messages import TrainingPaused
from starlings_simulator.driver import Driver, assignment, train_key
from starlings_worker.core.admission import Rejection
from starlings_worker.core.effects import ComputeBackward, ComputeForward, Settle, StepStages, TakeCopy
from starlings_worker.core.events import ControlLost, ControlRestored
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    ForgetPair,
    JudgePair,
    PairAborted,
    PairArrived,
    PairFailed,
    PairKey,
    PairMoved,
    PairNotSent,
    PairSent,
    SendPair,
    SendWord,
    TakeOuterStep,
    WordNotSent,
    WordSent,
    WordTold,
)
from starlings_worker.core.streaming.rules import StreamRules
from starlings_worker.core.streaming.stream import FIRST_STEPS

B = WorkerId("b")
SLOT_S = 100.0
KEY = PairKey(0, 0, 3, 0, 77)
MATCH = PairMatched(0, 3, 0, 0, B, 1, 0.25, 50.0, 77)
THEIRS = "b" * 64


def driver(*, pairs: bool = True, inner_batch: int = 1) -> Driver:
    section = TrainSection.model_validate(
        {"schedule": "async", "batch": 8, "microbatch": 2, "inner_batch": inner_batch, "warmup": 0}
    )
    rules = rules_for("pairs", warmup=None, warmup_fraction=0.0) if pairs else None
    driver = Driver("me", rules=StreamRules(section, inner_batch, 256, 100, rules))
    driver.ready(assignment((0, 0), {"b": (0, 0)}, stages=1))
    return driver


def step(driver: Driver, index: int, after_s: float = 2.0) -> None:
    """A microbatch and its step."""
    driver.tick(after_s)
    driver.grant(train_key(index))
    assert [type(driver.compute()) for _ in range(3)] == [ComputeForward, ComputeBackward, StepStages]


def slot_begins(driver: Driver) -> None:
    """Slot 3, ten seconds from now."""
    driver.hear(SlotClock(0, 3, 10.0, SLOT_S, 1))
    driver.hear(MATCH)
    driver.tick(10.0)


def to_the_verdict(driver: Driver) -> None:
    """Own step, both payloads, and the own judgement; the partner has not said PREPARED."""
    slot_begins(driver)
    assert driver.compute() == TakeOuterStep(0, 3, 0, False, 0)
    assert driver.compute() == EncodePair(KEY)
    sent = driver.one(SendPair)
    assert (sent.key, sent.to) == (KEY, B)
    driver.handle(PairSent(KEY))
    header = KEY.header(THEIRS)
    assert isinstance(driver.core.meeting.admit(header, B, driver.now_s), Receipt)
    driver.handle(PairArrived(header, B))
    assert driver.compute() == JudgePair(KEY, B)
    assert driver.one(SendWord) == SendWord(PairWord(77, PairWordKind.PREPARED, THEIRS), B)


def hear_prepared(driver: Driver) -> None:
    word = PairWord(77, PairWordKind.PREPARED, f"{77:064x}")
    assert driver.core.meeting.judge_word(word, B, driver.now_s) is None
    driver.handle(WordTold(word, B))


def nothing_comes(driver: Driver, after_s: float) -> None:
    """But wishes for leases."""
    driver.tick(after_s)
    assert all(isinstance(message, LeaseRequest) for message in driver.said())
    assert len(driver.effects) == len(driver.said())


def outcomes(driver: Driver) -> list[RoundOutcome]:
    return [message for message in driver.said() if isinstance(message, RoundOutcome)]


def test_a_job_without_pairs_knows_nothing_of_them() -> None:
    lone = driver(pairs=False)
    stale = lone.core.counters["stale_messages"]
    lone.hear(SlotClock(0, 3, 0.0, SLOT_S, 1))
    lone.hear(MATCH)
    assert lone.core.counters["stale_messages"] == stale + 2
    for answer in (
        lone.core.meeting.admit(KEY.header(THEIRS), B, 0.0),
        lone.core.meeting.judge_word(PairWord(77, PairWordKind.WAITING), B, 0.0),
    ):
        assert isinstance(answer, Rejection)
        assert answer.refusal is Refusal.NOT_HELD
    assert lone.core.counters["refused_not_held"] == 2
    lone.handle(PairMoved(KEY))
    nothing_comes(lone, 1000.0)


def test_a_step_that_is_like_others_says_ready_and_a_slot_is_taken_between_microbatches() -> None:
    me = driver()
    for index in range(FIRST_STEPS):
        step(me, index)
        assert not [m for m in me.said() if isinstance(m, RoundReady)]
    step(me, FIRST_STEPS, after_s=3.0)
    assert [m for m in me.said() if isinstance(m, RoundReady)] == [
        RoundReady(0, 0, 0.0, 32 * (FIRST_STEPS + 1), 3.0)
    ]
    me.hear(SlotClock(0, 3, 10.0, SLOT_S, 1))
    assert me.core.wake_at_s == me.now_s + 10.0
    me.grant(train_key(8), train_key(9))
    me.tick(10.0)
    # Without the loss's graph: that points to the weights that the outer step changes.
    done = [type(me.compute()) for _ in range(7)]
    forward, backward = ComputeForward, ComputeBackward
    assert done == [forward, backward, TakeOuterStep, StepStages, forward, backward, StepStages]


def test_a_graph_is_gone_back_through_before_weights_change_and_before_other_gradients() -> None:
    me = driver(inner_batch=2)
    me.hear(SlotClock(0, 3, 10.0, SLOT_S, 1))
    me.grant(train_key(0), train_key(1))
    assert isinstance(me.core.device.running, ComputeForward)
    me.tick(10.0)
    me.hear(StateWanted(4, snapshot=True))
    assert isinstance(me.compute(), ComputeForward)
    assert isinstance(me.core.device.running, ComputeBackward)
    me.compute()
    assert [type(me.compute()) for _ in range(2)] == [TakeOuterStep, TakeCopy]


def test_a_swap_runs_beside_training_and_ends_with_both_averaged() -> None:
    me = driver()
    to_the_verdict(me)
    # The device is free for training meanwhile.
    step(me, 0)
    hear_prepared(me)
    assert me.compute() == CommitPair(KEY, B, 0.25)
    assert outcomes(me) == []
    me.handle(WordSent(PairWord(77, PairWordKind.PREPARED, THEIRS)))
    (found,) = outcomes(me)
    assert (found.result, found.partner, found.fraction, found.distance) == (
        SwapResult.COMMITTED,
        B,
        1.0,
        0.5,
    )
    assert me.one(ForgetPair) == ForgetPair(KEY)


def test_bytes_that_move_are_a_sign_of_life() -> None:
    me = driver()
    slot_begins(me)
    me.compute()
    me.compute()
    for _ in range(6):
        me.tick(2.0)
        me.handle(PairMoved(KEY))
        assert outcomes(me) == []
    me.tick(5.0)
    (found,) = outcomes(me)
    assert (found.result, found.solo_reason) == (SwapResult.SOLO, SoloReason.SILENT)
    assert me.of(ForgetPair)
    assert me.one(SendWord).word.kind is PairWordKind.DECLINED


def test_a_plan_without_the_partner_or_with_a_new_life_of_it_fences_the_swap() -> None:
    me = driver()
    to_the_verdict(me)
    me.hear(assignment((0, 0), {"c": (0, 0)}, stages=1, plan_version=2))
    (found,) = outcomes(me)
    assert (found.solo_reason, found.partner) == (SoloReason.FENCED, B)
    hears = driver()
    to_the_verdict(hears)
    hears.hear(assignment((0, 0), {"b": (0, 0), "c": (0, 0)}, stages=1, plan_version=2))
    assert outcomes(hears) == []
    hear_prepared(hears)
    assert hears.compute() == CommitPair(KEY, B, 0.25)


def test_slots_go_on_without_the_coordinator_and_a_reconnection_says_where_they_are() -> None:
    me = driver()
    me.hear(SlotClock(0, 3, 10.0, SLOT_S, 1))
    me.handle(ControlLost())
    for number, after_s in ((3, 10.0), (4, SLOT_S)):
        me.tick(after_s)
        assert me.compute() == TakeOuterStep(0, number, 0, False, number - 3)
        assert me.said() == []
    me.now_s += 40.0
    me.handle(ControlRestored())
    ready = [message for message in me.said() if isinstance(message, RoundReady)]
    assert ready[-1] == RoundReady(0, 5, SLOT_S - 40.0, 0, 0.0)
    (found,) = outcomes(me)
    assert (found.slot, found.solo_reason) == (3, SoloReason.NOT_MATCHED)


def test_the_end_of_training_forgets_swaps_and_what_the_device_should_do_for_them() -> None:
    me = driver()
    to_the_verdict(me)
    me.grant(train_key(0))
    hear_prepared(me)
    assert CommitPair(KEY, B, 0.25) in me.core.device.waiting
    me.hear(TrainingPaused(5, 1))
    assert me.one(ForgetPair) == ForgetPair(KEY)
    assert list(me.core.device.waiting) == [Settle(5)]
    answer = me.core.meeting.admit(KEY.header(THEIRS), B, me.now_s)
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.NOT_HELD
    me.compute()
    assert me.compute() == Settle(5)
    nothing_comes(me, 10 * SLOT_S)


def test_a_worker_without_a_place_forgets_swaps_and_a_new_place_begins_without_a_clock() -> None:
    me = driver()
    to_the_verdict(me)
    me.hear(Standby("others train"))
    assert me.one(ForgetPair) == ForgetPair(KEY)
    nothing_comes(me, SLOT_S)
    me.ready(assignment((0, 0), {"b": (0, 0)}, stages=1, plan_version=3))
    me.tick(SLOT_S)
    assert me.core.device.running is None
    slot_begins(me)
    assert me.compute() == TakeOuterStep(0, 3, 0, False, 0)


class Monkey:
    """Mostly plausible nonsense about pairs, between steps of training: small numbers, so that rounds meet."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.driver = driver()
        self.plan_version = 1
        self.keys: list[PairKey] = []

    def number(self) -> int:
        return self.rng.choice([0, 0, 1, 1, 2, self.rng.randrange(8), 2**63])

    def real(self) -> float:
        return self.rng.choice([0.0, 0.3, 0.5, 1.0, 5.0, -1.0, 1e30, 1e-320, float("nan"), float("inf")])

    def key(self) -> PairKey:
        if self.keys and self.rng.random() < 0.85:
            return self.rng.choice(self.keys[-3:])
        rounds = self.driver.core.meeting.rounds
        taken = rounds.stages[0].slots.taken if rounds is not None and 0 in rounds.stages else 0
        slot = self.rng.choice([taken, taken + 1, taken + 1, taken + 2, self.number()])
        fragment = self.rng.choice([slot % 2, slot % 2, slot % 2, self.number()])
        stage, swap = self.rng.choice([0, 0, 0, 1]), self.rng.randrange(3)
        self.keys.append(PairKey(stage, fragment, slot, swap, self.rng.randrange(1, 2**64)))
        return self.keys[-1]

    def act(self) -> None:
        me, rng = self.driver, self.rng
        who = rng.choice([B] * 12 + [WorkerId("c"), WorkerId("me"), WorkerId("")])
        key, kind = self.key(), rng.choice([PairWordKind.PREPARED] * 4 + list(PairWordKind))
        word = PairWord(key.round_id, kind, rng.choice([f"{key.round_id:064x}"] * 4 + [THEIRS, ""]), "so")
        match rng.randrange(14):
            case 0:
                length, begins = rng.choice([4.0] * 6 + [self.real()]), rng.choice([1.0] * 4 + [self.real()])
                me.hear(SlotClock(self.number() % 2, key.slot, begins, length, 2, rng.random() < 0.3))
            case 1 | 2:
                weight, deadline = (
                    rng.choice([0.5] * 6 + [self.real()]),
                    rng.choice([4.0] * 6 + [self.real()]),
                )
                me.hear(
                    PairMatched(
                        key.stage, key.slot, key.fragment, key.swap, who, 1, weight, deadline, key.round_id
                    )
                )
            case 3 | 4:
                header = key.header(rng.choice([THEIRS] * 8 + ["c" * 64]))
                if isinstance(me.core.meeting.admit(header, who, me.now_s), Receipt):
                    lost = rng.random() < 0.2
                    me.handle(PairAborted(header, who, "lost") if lost else PairArrived(header, who))
            case 5 | 6:
                if me.core.meeting.judge_word(word, who, me.now_s) is None:
                    me.handle(WordTold(word, who))
            case 7:
                me.handle(rng.choice([PairSent(key), PairNotSent(key, rng.choice(list(Refusal)))]))
            case 8:
                me.handle(rng.choice([WordSent(word), WordNotSent(word, rng.choice(list(Refusal)))]))
            case 9 if rng.random() < 0.2:
                self.plan_version += rng.random() < 0.8
                span = rng.choice([(0, 0), (0, 0), (0, 0), (0, 1)])
                me.hear(assignment(span, {"b": span}, stages=span[1] + 1, plan_version=self.plan_version))
            case 10 if rng.random() < 0.05:
                me.hear(rng.choice([Standby("later"), TrainingPaused(3, 1)]))
            case 11:
                me.handle(rng.choice([ControlLost(), ControlRestored()]))
            case 12:
                self.keep_a_promise()
            case _:
                me.tick(rng.uniform(0, 1.5))
        while me.core.device.running is not None and rng.random() < 0.8:
            effect = me.core.device.running
            if isinstance(effect, EncodePair | JudgePair | CommitPair) and rng.random() < 0.1:
                me.handle(PairFailed(effect.key, "it could not"))
            else:
                me.compute()

    def keep_a_promise(self) -> None:
        """What an honest partner would do about the newest swap."""
        me, key = self.driver, self.keys[-1]
        if isinstance(me.core.meeting.admit(key.header(THEIRS), B, me.now_s), Receipt):
            me.handle(PairArrived(key.header(THEIRS), B))
        word = PairWord(key.round_id, PairWordKind.PREPARED, f"{key.round_id:064x}")
        if me.core.meeting.judge_word(word, B, me.now_s) is None:
            me.handle(WordTold(word, B))


def test_nothing_that_is_said_about_pairs_breaks_a_core() -> None:
    counters: Counter[str] = Counter()
    for seed in range(200):
        monkey = Monkey(seed)
        try:
            for _ in range(150):
                monkey.act()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        counters += monkey.driver.core.counters
    # Some of it was an exchange.
    for kind in ("swaps_committed", "swaps_one_sided", "swaps_solo", "senseless_clocks", "senseless_matches"):
        assert counters[kind] > 0, kind
