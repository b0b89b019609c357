"""What rounds of groups ask of the device and of the network, and what comes of it.

What the shell keeps under a `GroupKey`: the own encoded parts (from Displaced on), contributions and aggregates that
arrived, the own aggregate, and an anchor; until ForgetGroup. A task whose key was forgotten ends with TaskFailed, and
changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.group_messages import (
    GroupDropped,
    GroupHeader,
    GroupLeg,
    GroupMatched,
    GroupSeat,
)
from starlings_protos.messages import Refusal, WorkerId


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """Names one round wherever it is spoken of; the round id alone is unique, the rest is checked against it."""

    stage: int
    fragment: int
    slot: int
    round_id: int

    @classmethod
    def of(cls, named: GroupMatched | GroupHeader) -> GroupKey:
        return cls(named.stage, named.fragment, named.slot, named.round_id)

    def header(self, leg: GroupLeg, part: int, sha256: str) -> GroupHeader:
        return GroupHeader(self.stage, self.fragment, self.slot, self.round_id, leg, part, sha256)


# ------------------------------------------------------------------ tasks of the device, one after another


@dataclass(frozen=True, slots=True)
class DigestAnchors:
    """-> AnchorsDigested. Of all fragments of a stage."""

    stage: int


@dataclass(frozen=True, slots=True)
class Displace:
    """-> Displaced | TaskFailed. The fragment's displacement, encoded by parts; weights stay as they are."""

    key: GroupKey
    seats: tuple[GroupSeat, ...]
    me: int
    warmup: bool


@dataclass(frozen=True, slots=True)
class Reduce:
    """-> Reduced | TaskFailed. The own part's aggregate of these seats' contributions, encoded."""

    key: GroupKey
    seats: tuple[GroupSeat, ...]
    members: tuple[int, ...]
    me: int


@dataclass(frozen=True, slots=True)
class Judge:
    """-> Judged. Whether an owner's aggregate can be applied. Changes nothing."""

    key: GroupKey
    part: int


@dataclass(frozen=True, slots=True)
class Apply:
    """-> Applied | TaskFailed. The outer step with these parts' aggregates, all or none; other parts stay."""

    key: GroupKey
    parts: tuple[int, ...]
    # Steps were taken since the slot.
    overlapped: bool


@dataclass(frozen=True, slots=True)
class EncodeAnchor:
    """-> AnchorEncoded | TaskFailed"""

    key: GroupKey


@dataclass(frozen=True, slots=True)
class AdoptAnchor:
    """-> AnchorAdopted | TaskFailed. Starting point and momentum as they came; the weights are the starting point."""

    key: GroupKey


GroupTask = DigestAnchors | Displace | Reduce | Judge | Apply | EncodeAnchor | AdoptAnchor


@dataclass(frozen=True, slots=True)
class AnchorsDigested:
    # By fragment.
    anchors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Displaced:
    # Of each part's encoded bytes; empty where the part has no elements.
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    sha256: str
    dropped: tuple[GroupDropped, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """`refused`: what is wrong with it, in words; empty when nothing is."""

    refused: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    anchor: str
    # Of the fragment's elements.
    fraction: float
    # Norm of the averaged displacement.
    distance: float


@dataclass(frozen=True, slots=True)
class AnchorEncoded:
    sha256: str


@dataclass(frozen=True, slots=True)
class AnchorAdopted:
    anchor: str


@dataclass(frozen=True, slots=True)
class TaskFailed:
    reason: str


GroupResult = (
    AnchorsDigested | Displaced | Reduced | Judged | Applied | AnchorEncoded | AnchorAdopted | TaskFailed
)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Device effect. -> GroupWorked"""

    task: GroupTask


@dataclass(frozen=True, slots=True)
class GroupWorked:
    task: GroupTask
    result: GroupResult


# ------------------------------------------------------------------ asked of the network, beside the device


@dataclass(frozen=True, slots=True)
class SendGroup:
    """-> GroupSent | GroupNotSent. What is kept under the header's key, leg and part."""

    header: GroupHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetGroup:
    """Free what is kept under the key, and break its transfers off. No outcome of its own."""

    key: GroupKey


GroupNetworkEffect = SendGroup | ForgetGroup


@dataclass(frozen=True, slots=True)
class GroupSent:
    """The receiver has all of it, now or before."""

    header: GroupHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class GroupNotSent:
    """`refusal`: how the receiver refused it; unspecified when it did not answer."""

    header: GroupHeader
    to: WorkerId
    refusal: Refusal = Refusal.UNSPECIFIED
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupArrived:
    """After an admission: the whole payload is kept, and its bytes have the digest that the header named."""

    header: GroupHeader
    sender: WorkerId


@dataclass(frozen=True, slots=True)
class GroupAborted:
    """After an admission: it broke off, or was not what the header said."""

    header: GroupHeader
    sender: WorkerId
    reason: str


GroupNetworkEvent = GroupSent | GroupNotSent | GroupArrived | GroupAborted
