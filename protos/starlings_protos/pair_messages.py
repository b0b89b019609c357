"""What coordinator and replicas say about exchanges in pairs: records that mirror control.proto and data.proto.

Who says what, in the order of a slot:

    coordinator -> replicas   SlotClock              when slots begin; extrapolated while the coordinator is away
    replica -> coordinator    RoundReady             "I take part in the next slot"
    coordinator -> both       PairMatched            with whom, what each weighs, until when; one per swap
    replica <-> replica       PairHeader (payload)   weights and momentum, encoded
    replica <-> replica       PairWord               PREPARED, DECLINED, or a sign of life
    replica -> coordinator    RoundOutcome           what came of it, one per swap
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from starlings_protos.group_messages import GroupDropped
from starlings_protos.vocabulary import WorkerId


class SwapResult(enum.IntEnum):
    UNSPECIFIED = 0
    COMMITTED = 1
    ONE_SIDED = 2
    SOLO = 3


class SoloReason(enum.IntEnum):
    UNSPECIFIED = 0
    NOT_MATCHED = 1
    LATE = 2
    SILENT = 3
    REFUSED = 4
    DECLINED = 5
    FENCED = 6
    TOO_FAR = 7
    FAILED = 8
    BEHIND = 9


class PairWordKind(enum.IntEnum):
    UNSPECIFIED = 0
    PREPARED = 1
    DECLINED = 2
    WAITING = 3


@dataclass(frozen=True, slots=True)
class SlotClock:
    stage: int
    slot: int
    begins_in_s: float
    slot_length_s: float
    fragments: int
    warmup: bool = False


@dataclass(frozen=True, slots=True)
class PairMatched:
    stage: int
    slot: int
    fragment: int
    swap: int
    partner: WorkerId
    partner_incarnation: int
    weight: float
    deadline_s: float
    round_id: int


@dataclass(frozen=True, slots=True)
class RoundReady:
    stage: int
    slot: int
    begins_in_s: float
    tokens: int
    step_s: float
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    stage: int
    slot: int
    fragment: int
    swap: int
    round_id: int
    partner: WorkerId
    result: SwapResult
    solo_reason: SoloReason = SoloReason.UNSPECIFIED
    detail: str = ""
    fraction: float = 0.0
    distance: float = 0.0
    seconds: float = 0.0
    members: tuple[WorkerId, ...] = ()
    dropped: tuple[GroupDropped, ...] = ()


# ------------------------------------------------------------------ between replicas


@dataclass(frozen=True, slots=True)
class PairHeader:
    stage: int
    fragment: int
    slot: int
    swap: int
    round_id: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PairWord:
    round_id: int
    kind: PairWordKind
    sha256: str = ""
    reason: str = ""
