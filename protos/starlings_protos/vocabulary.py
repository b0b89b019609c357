"""Words that several kinds of messages share: who, where, which kind, and why not. `messages.py` has them all."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

WorkerId = NewType("WorkerId", str)
KEEPER = WorkerId("keeper")


class Refusal(enum.IntEnum):
    UNSPECIFIED = 0
    INVITE_WRONG = 1
    INVITE_EXPIRED = 2
    INVITE_USED_UP = 3
    REVOKED = 4
    VERSION = 5
    JOB_MISMATCH = 6
    CLOCK = 7
    NOT_YOU = 8
    ASSIGNMENT = 9
    STALE = 10
    LIMIT = 11
    BUSY = 12
    MALFORMED = 13
    NOT_HELD = 14
    SUPERSEDED = 15
    NO_ROOM = 16
    IN_USE = 17
    EVICTED = 18
    NOT_NOW = 19


class LeaseKind(enum.IntEnum):
    UNSPECIFIED = 0
    TRAIN = 1
    EVALUATE = 2
    GENERATE = 3
    EVALUATE_AVERAGE = 4


class SlowedBy(enum.IntEnum):
    UNSPECIFIED = 0
    HEAT = 1
    POWER = 2


class ExchangePurpose(enum.IntEnum):
    UNSPECIFIED = 0
    GRADIENT = 1
    STATE = 2


@dataclass(frozen=True, slots=True, order=True)
class Span:
    first_stage: int
    last_stage: int

    def __contains__(self, stage: int) -> bool:
        return self.first_stage <= stage <= self.last_stage

    @property
    def stages(self) -> range:
        return range(self.first_stage, self.last_stage + 1)


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    first_block: int
    last_block: int

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.last_block + 1)


@dataclass(frozen=True, slots=True, order=True)
class MicrobatchKey:
    kind: LeaseKind
    step: int
    attempt: int
    index: int
