"""What coordinator and replicas say about exchanges in groups: records that mirror control.proto and data.proto.

Who says what, in the order of a slot (clock, readiness and outcome are those of `pair_messages.py`):

    coordinator -> replicas   GroupMatched           who averages with whom, by which weights, until when
    member -> owner           GroupHeader            CONTRIBUTION: a part of its displacement
    owner -> coordinator      GroupHeld              whose contributions are here
    coordinator -> members    GroupClosed            whose contributions count
    owner -> members          GroupHeader            AGGREGATE: what everybody decodes
    member -> coordinator     GroupPrepared          which aggregates are here, and verified
    coordinator -> members    GroupDecided           which of them everybody applies
    donor -> newcomer         GroupHeader            ANCHOR: where the others stand after that
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from starlings_protos.vocabulary import WorkerId

NOBODY = WorkerId("")


class GroupLeg(enum.IntEnum):
    UNSPECIFIED = 0
    CONTRIBUTION = 1
    AGGREGATE = 2
    ANCHOR = 3


@dataclass(frozen=True, slots=True)
class GroupSeat:
    worker_id: WorkerId
    incarnation: int
    share: float
    weight: float


@dataclass(frozen=True, slots=True)
class GroupPart:
    part: int
    sha256: str


@dataclass(frozen=True, slots=True)
class GroupDropped:
    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class GroupMatched:
    stage: int
    slot: int
    fragment: int
    round_id: int
    seats: tuple[GroupSeat, ...]
    anchor: str
    deadline_s: float
    adopters: tuple[WorkerId, ...] = ()
    donor: WorkerId = NOBODY


@dataclass(frozen=True, slots=True)
class GroupClosed:
    stage: int
    slot: int
    round_id: int
    members: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDecided:
    stage: int
    slot: int
    round_id: int
    parts: tuple[GroupPart, ...] = ()
    members: tuple[WorkerId, ...] = ()
    dropped: tuple[GroupDropped, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupHeld:
    stage: int
    slot: int
    round_id: int
    members: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupPrepared:
    stage: int
    slot: int
    round_id: int
    parts: tuple[GroupPart, ...] = ()
    dropped: tuple[GroupDropped, ...] = ()
    complete: bool = False


GroupFromCoordinator = GroupMatched | GroupClosed | GroupDecided
GroupFromMember = GroupHeld | GroupPrepared


# ------------------------------------------------------------------ between replicas


@dataclass(frozen=True, slots=True)
class GroupHeader:
    stage: int
    fragment: int
    slot: int
    round_id: int
    leg: GroupLeg
    part: int
    sha256: str
