"""What the coordinator says to a worker, and which part of its core each message is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from starlings_protos.group_messages import GroupClosed, GroupDecided, GroupMatched
from starlings_protos.messages import (
    Assignment,
    AssignmentRenewed,
    ExchangeOpened,
    Finish,
    HeartbeatAck,
    LeaseGrant,
    Refused,
    Retain,
    Standby,
    StateWanted,
    StepCommitted,
    StepRestarted,
    ToWorker,
    Welcome,
)
from starlings_protos.pair_messages import PairMatched, SlotClock
from starlings_protos.reach_messages import ReachOrder, Routes
from starlings_protos.stream_messages import (
    DrainOrder,
    JobPaused,
    MicrobatchVoided,
    SwarmProgress,
    TrainingPaused,
)
from starlings_worker.core.effects import Effect, KeepHistory, Stop
from starlings_worker.core.pairing.meeting import Meeting
from starlings_worker.core.placement import Placement
from starlings_worker.core.streaming.stream import Stream
from starlings_worker.core.training import Training
from starlings_worker.core.wishes import Wishes


class Control:
    def __init__(
        self,
        placement: Placement,
        training: Training,
        stream: Stream | None,
        meeting: Meeting,
        wishes: Wishes,
        counters: Counter[str],
        emit: Callable[[Effect], None],
        stop: Callable[[Stop], None],
        draining: Callable[[], bool],
    ) -> None:
        self._placement = placement
        self._training = training
        self._stream = stream
        self._meeting = meeting
        self._wishes = wishes
        self._counters = counters
        self._emit = emit
        self._stop = stop
        self._draining = draining

    def heard(self, message: ToWorker, now_s: float) -> None:
        match message:
            case Assignment():
                self._placement.assigned(message, now_s)
                self._meeting.replanned(self._placement.assignment, now_s)
            case LeaseGrant():
                opens = self._placement.loaded and self._stream is None
                self._wishes.granted(message, now_s, opens_attempts=opens)
            case Finish():
                self._stop(Stop(message.done, message.reason, drained=self._draining()))
            case Refused():
                self._stop(Stop(False, message.message))
            case Standby():
                self._placement.standby(message.reason)
            case Retain():
                updates_from = message.updates_from if message.updates else None
                self._emit(KeepHistory(message.versions, updates_from))
            case StepCommitted() if self._placement.observing.active and not self._placement.loaded:
                self._placement.committed_elsewhere(message)
            case SwarmProgress():
                if self._stream is not None:
                    self._stream.heard(message, now_s)
            case StateWanted() | StepCommitted() | StepRestarted() | ExchangeOpened() if (
                not self._placement.loaded
            ):
                self._counters["stale_messages"] += 1
            case MicrobatchVoided() | TrainingPaused() | StateWanted() if (
                self._stream is not None
                and self._placement.loaded
                and self._said_to_stream(message, self._stream)
            ):
                pass
            case StepRestarted():
                self._training.restarted(message)
            case ExchangeOpened():
                self._training.opened(message, self._placement.plan_version, now_s)
            case StepCommitted():
                self._training.committed(message)
            case StateWanted():
                self._training.state_wanted(
                    replace(message, hand_over=message.hand_over and self._draining())
                )
            case JobPaused():
                self._pause(message.paused, now_s)
            case AssignmentRenewed() | Welcome() | HeartbeatAck() | ReachOrder() | Routes() | DrainOrder():
                pass  # The shell's business.
            case MicrobatchVoided() | TrainingPaused():
                self._counters["stale_messages"] += 1
            case SlotClock() | PairMatched() | GroupMatched() | GroupClosed() | GroupDecided():
                self._meeting.told(message, now_s)
            case _:
                assert_never(message)

    def _pause(self, paused: bool, now_s: float) -> None:
        """By the owner. Where steps are transactions, the one that has begun is finished, and no other is leased."""
        if self._stream is not None:
            self._stream.pause(paused, now_s)
            # What was asked for before was given back, or not given.
            self._wishes.forget()

    def _said_to_stream(
        self, message: MicrobatchVoided | TrainingPaused | StateWanted, stream: Stream
    ) -> bool:
        """Whether training without a barrier, or its end, is what the message is about."""
        match message:
            case MicrobatchVoided():
                stream.void(message.keys)
            case TrainingPaused():
                stream.paused(message)
            case StateWanted():
                if not stream.running:
                    return False
                stream.state_wanted(message)
            case _:
                assert_never(message)
        return True
