"""Pair rounds of all stages of a span: the way in for messages, events and questions.

Order of a transfer in: header read -> `admit`; a Receipt means: read the body, compare its digest with the header's,
keep it, and report PairArrived, or PairAborted; exactly one of the two. Order of a word in: `judge_word`; None means:
answer, and report WordTold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import assert_never

from starlings_protos.messages import Receipt, Refusal, Span, WorkerId
from starlings_protos.pair_messages import (
    PairHeader,
    PairMatched,
    PairWord,
    RoundOutcome,
    RoundReady,
    SlotClock,
)
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.pairing.stage_rounds import StageRounds
from starlings_worker.core.pairing.swap import PairTimings, Swap
from starlings_worker.core.pairing.work import (
    OuterStepTaken,
    PairAborted,
    PairArrived,
    PairCommitted,
    PairDeviceEffect,
    PairDeviceOutcome,
    PairEncoded,
    PairFailed,
    PairJudged,
    PairMoved,
    PairNetworkEffect,
    PairNetworkEvent,
    PairNotSent,
    PairSent,
    WordNotSent,
    WordSent,
    WordTold,
)


class PairRounds:
    """`push` queues device work, in order; `emit` sends; `say` goes to the coordinator."""

    def __init__(
        self,
        push: Callable[[PairDeviceEffect], None],
        emit: Callable[[PairNetworkEffect], None],
        say: Callable[[RoundReady | RoundOutcome], None],
        counters: Counter[str],
        timings: PairTimings | None = None,
    ) -> None:
        self._push = push
        self._emit = emit
        self._say = say
        self._counters = counters
        self._timings = timings or PairTimings()
        self._paused = False
        self.stages: dict[int, StageRounds] = {}

    def hold(self, span: Span | None) -> None:
        """A new place in the plan, with other weights, or none: everything before is forgotten."""
        for stage in self.stages.values():
            stage.forget()
        stages = span.stages if span is not None else ()
        self.stages = {
            stage: StageRounds(stage, self._timings, self._push, self._emit, self._say, self._counters)
            for stage in stages
        }
        for rounds in self.stages.values():
            rounds.slots.held = self._paused

    def pause(self, paused: bool, now_s: float) -> None:
        """No slot begins in a pause; those that are missed are not made up for."""
        self._paused = paused
        for stage in self.stages.values():
            stage.slots.hold(paused, now_s)
            if not paused:
                stage.say_ready(now_s)

    # ------------------------------------------------------------------ the coordinator

    def told(self, message: SlotClock | PairMatched, now_s: float) -> None:
        stage = self.stages.get(message.stage)
        if stage is None:
            self._counters["stale_messages"] += 1
        elif isinstance(message, SlotClock):
            stage.clock(message, now_s)
        else:
            stage.matched(message, now_s)

    def reconnected(self, now_s: float) -> None:
        """The coordinator may have forgotten what it was told."""
        for stage in self.stages.values():
            stage.say_ready(now_s)

    def lives(self, incarnations: Mapping[WorkerId, int], now_s: float) -> None:
        """Who is in the plan, and in which life."""
        for stage in self.stages.values():
            stage.lives(incarnations, now_s)

    # ------------------------------------------------------------------ training and time

    def inner_stepped(self, stage: int, tokens: int, seconds: float, now_s: float) -> None:
        if stage in self.stages:
            self.stages[stage].inner_stepped(tokens, seconds, now_s)

    def look_at_time(self, now_s: float) -> None:
        for stage in self.stages.values():
            stage.look_at_time(now_s)

    def wake_at_s(self, now_s: float) -> float | None:
        times = [stage.wake_at_s(now_s) for stage in self.stages.values()]
        return min((time_s for time_s in times if time_s is not None), default=None)

    # ------------------------------------------------------------------ peers

    def admit(self, header: PairHeader, sender: WorkerId, receipt: Receipt, now_s: float) -> Admission:
        stage = self.stages.get(header.stage)
        if stage is None:
            return Rejection(Refusal.NOT_HELD, f"stage {header.stage} is not held here")
        return stage.admit(header, sender, receipt, now_s)

    def judge_word(self, word: PairWord, sender: WorkerId, now_s: float) -> Rejection | None:
        stage = self._knowing(word.round_id)
        if stage is None:
            return Rejection(Refusal.BUSY, "this swap is not known here yet")
        return stage.judge_word(word, sender, now_s)

    def _knowing(self, round_id: int) -> StageRounds | None:
        return next((stage for stage in self.stages.values() if stage.knows(round_id)), None)

    # ------------------------------------------------------------------ what happened

    def handle(self, event: PairDeviceOutcome | PairNetworkEvent, now_s: float) -> None:
        """Outcomes of effects, and arrivals. Those of what is over change nothing."""
        match event:
            case OuterStepTaken():
                if event.stage in self.stages:
                    self.stages[event.stage].outer_step_taken(event, now_s)
            case PairEncoded():
                self._swap(event.key.round_id, lambda swap: swap.encoded(event, now_s), now_s)
            case PairJudged():
                self._swap(event.key.round_id, lambda swap: swap.judged(event, now_s), now_s)
            case PairCommitted():
                self._swap(event.key.round_id, lambda swap: swap.commit_done(event, now_s), now_s)
            case PairFailed():
                self._swap(event.key.round_id, lambda swap: swap.failed(event, now_s), now_s)
            case PairSent():
                self._swap(event.key.round_id, lambda swap: swap.sent(now_s), now_s)
            case PairNotSent():
                self._swap(
                    event.key.round_id, lambda swap: swap.not_sent(event.refusal, event.reason, now_s), now_s
                )
            case WordSent():
                self._swap(event.word.round_id, lambda swap: swap.word_sent(event.word, now_s), now_s)
            case WordNotSent():
                self._swap(
                    event.word.round_id,
                    lambda swap: swap.word_not_sent(event.word, event.refusal, event.reason, now_s),
                    now_s,
                )
            case PairMoved():
                self._swap(event.key.round_id, lambda swap: swap.moved(now_s), now_s)
            case PairArrived():
                self._swap(
                    event.header.round_id,
                    lambda swap: swap.arrived(event.header, event.sender, now_s),
                    now_s,
                )
            case PairAborted():
                self._swap(
                    event.header.round_id, lambda swap: swap.aborted(event.header, event.sender), now_s
                )
            case WordTold():
                self._swap(event.word.round_id, lambda swap: swap.told(event.word, now_s), now_s)
            case _:
                assert_never(event)

    def _swap(self, round_id: int, change: Callable[[Swap], None], now_s: float) -> None:
        stage = self._knowing(round_id)
        if stage is None:
            self._counters["late_pair_events"] += 1
        else:
            stage.happened(round_id, change, now_s)
