"""Group rounds of all stages of a span: the way in for messages, events and questions, as `PairRounds` is for pairs.

Order of a transfer in: header read -> `admit`; a Receipt means: read the body, compare its digest with the header's,
keep it, and report GroupArrived, or GroupAborted; exactly one of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import assert_never

from starlings_protos.group_messages import GroupClosed, GroupDecided, GroupHeader, GroupMatched
from starlings_protos.messages import Receipt, Refusal, Span, WorkerId
from starlings_protos.pair_messages import SlotClock
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.groups.round import GroupRound
from starlings_worker.core.groups.stage_groups import Said, StageGroups
from starlings_worker.core.groups.work import (
    DigestAnchors,
    GroupAborted,
    GroupArrived,
    GroupNetworkEffect,
    GroupNetworkEvent,
    GroupNotSent,
    GroupSent,
    GroupWork,
    GroupWorked,
)


class GroupRounds:
    """`push` queues device work, in order; `emit` sends; `say` goes to the coordinator."""

    def __init__(
        self,
        worker_id: WorkerId,
        overlapped: bool,
        push: Callable[[GroupWork], None],
        emit: Callable[[GroupNetworkEffect], None],
        say: Callable[[Said], None],
        counters: Counter[str],
    ) -> None:
        """`overlapped`: training goes on during rounds, because some of it stays (`merge_alpha` above 0)."""
        self._worker_id = worker_id
        self._overlapped = overlapped
        self._push = push
        self._emit = emit
        self._say = say
        self._counters = counters
        self._paused = False
        self.stages: dict[int, StageGroups] = {}

    def hold(self, span: Span | None) -> None:
        """A new place in the plan, with other weights, or none: everything before is forgotten."""
        for stage in self.stages.values():
            stage.forget()
        stages = span.stages if span is not None else ()
        self.stages = {
            stage: StageGroups(
                stage, self._worker_id, self._overlapped, self._push, self._emit, self._say, self._counters
            )
            for stage in stages
        }
        for groups in self.stages.values():
            groups.slots.held = self._paused

    def pause(self, paused: bool, now_s: float) -> None:
        """No slot begins in a pause; those that are missed are not made up for."""
        self._paused = paused
        for stage in self.stages.values():
            stage.slots.hold(paused, now_s)
            if not paused:
                stage.say_ready(now_s)

    @property
    def holds_training(self) -> bool:
        """Nothing is to be computed for training now: a round would overwrite it."""
        return any(stage.holds_training for stage in self.stages.values())

    # ------------------------------------------------------------------ the coordinator

    def told(self, message: SlotClock | GroupMatched | GroupClosed | GroupDecided, now_s: float) -> None:
        stage = self.stages.get(message.stage)
        if stage is None:
            self._counters["stale_messages"] += 1
            return
        match message:
            case SlotClock():
                stage.clock(message, now_s)
            case GroupMatched():
                stage.matched(message, now_s)
            case GroupClosed():
                stage.closed(message, now_s)
            case GroupDecided():
                stage.decided(message, now_s)
            case _:
                assert_never(message)

    def reconnected(self, now_s: float) -> None:
        """The coordinator may have forgotten what it was told."""
        for stage in self.stages.values():
            stage.say_ready(now_s)

    def lives(self, incarnations: Mapping[WorkerId, int], now_s: float) -> None:
        """Who left the plan, the coordinator closes and decides without."""

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

    # ------------------------------------------------------------------ peers, and what happened

    def admit(self, header: GroupHeader, sender: WorkerId, receipt: Receipt, now_s: float) -> Admission:
        stage = self.stages.get(header.stage)
        if stage is None:
            return Rejection(Refusal.NOT_HELD, f"stage {header.stage} is not held here")
        return stage.admit(header, sender, receipt)

    def handle(self, event: GroupWorked | GroupNetworkEvent, now_s: float) -> None:
        """Outcomes of effects, and arrivals. Those of what is over change nothing."""
        match event:
            case GroupWorked(task, result):
                number = task.stage if isinstance(task, DigestAnchors) else task.key.stage
                if number in self.stages:
                    self.stages[number].worked(task, result, now_s)
            case GroupSent(header, to):
                self._round(header, lambda round_: round_.sent(header, to), now_s)
            case GroupNotSent(header, to, refusal):
                self._round(header, lambda round_: round_.not_sent(header, to, refusal, now_s), now_s)
            case GroupArrived(header, sender):
                self._round(header, lambda round_: round_.arrived(header, sender, now_s), now_s)
            case GroupAborted(header, sender):
                self._round(header, lambda round_: round_.aborted(header, sender), now_s)
            case _:
                assert_never(event)

    def _round(self, header: GroupHeader, change: Callable[[GroupRound], None], now_s: float) -> None:
        if header.stage in self.stages:
            self.stages[header.stage].happened(header.round_id, change, now_s)
        else:
            self._counters["late_group_events"] += 1
