"""What pair rounds ask of the device and of the network, and what comes of it.

What the shell keeps under a `PairKey`: the own encoded payload (from PairEncoded on) and the partner's (from
PairArrived on), until ForgetPair. An effect whose key was forgotten meanwhile ends at once with its failure, and
changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.messages import Refusal, WorkerId
from starlings_protos.pair_messages import PairHeader, PairMatched, PairWord


@dataclass(frozen=True, slots=True, order=True)
class PairKey:
    """Names one swap wherever it is spoken of; the round id alone is unique, the rest is checked against it."""

    stage: int
    fragment: int
    slot: int
    swap: int
    round_id: int

    @classmethod
    def of(cls, named: PairMatched | PairHeader) -> PairKey:
        return cls(named.stage, named.fragment, named.slot, named.swap, named.round_id)

    def header(self, sha256: str) -> PairHeader:
        return PairHeader(self.stage, self.fragment, self.slot, self.swap, self.round_id, sha256)


# ------------------------------------------------------------------ asked of the device, one after another


@dataclass(frozen=True, slots=True)
class TakeOuterStep:
    """Device effect. -> OuterStepTaken

    The rule's `at_slot` on one fragment of a stage: its own outer step, applied at once.
    """

    stage: int
    slot: int
    fragment: int
    warmup: bool
    # Rounds of this fragment alone in a row: the rule becomes plain averaging after too many.
    solo_rounds: int


@dataclass(frozen=True, slots=True)
class EncodePair:
    """Device effect. -> PairEncoded | PairFailed

    The fragment's `payload` (weights, and momentum where it travels) becomes bytes, and is decoded again: one's own
    decoded copy is what `CommitPair` needs.
    """

    key: PairKey


@dataclass(frozen=True, slots=True)
class JudgePair:
    """Device effect. -> PairJudged | PairFailed

    Decode the partner's payload and ask the rule whether it is plausible. Changes nothing.
    """

    key: PairKey
    partner: WorkerId


@dataclass(frozen=True, slots=True)
class CommitPair:
    """Device effect. -> PairCommitted | PairFailed

    The rule's `commit`: both start and present weights (and momentum) move by the partner's share of the difference.
    """

    key: PairKey
    partner: WorkerId
    # The own share of the pair's weight.
    weight: float


PairDeviceEffect = TakeOuterStep | EncodePair | JudgePair | CommitPair


@dataclass(frozen=True, slots=True)
class OuterStepTaken:
    stage: int
    slot: int


@dataclass(frozen=True, slots=True)
class PairEncoded:
    key: PairKey
    # Of all tensors' bytes in their order, hex.
    sha256: str


@dataclass(frozen=True, slots=True)
class PairJudged:
    """`refused`: what is wrong with the payload, in words; empty when it is plausible."""

    key: PairKey
    distance: float = 0.0
    refused: str = ""
    # It is this worker that is too far from the others to be averaged with.
    too_far: bool = False


@dataclass(frozen=True, slots=True)
class PairCommitted:
    key: PairKey
    # Of the fragment's elements.
    fraction: float
    distance: float


@dataclass(frozen=True, slots=True)
class PairFailed:
    key: PairKey
    reason: str


PairDeviceOutcome = OuterStepTaken | PairEncoded | PairJudged | PairCommitted | PairFailed


# ------------------------------------------------------------------ asked of the network, beside the device


@dataclass(frozen=True, slots=True)
class SendPair:
    """-> PairSent | PairNotSent. The own encoded payload; a second one under the same key sends equal bytes."""

    key: PairKey
    sha256: str
    to: WorkerId


@dataclass(frozen=True, slots=True)
class SendWord:
    """-> WordSent | WordNotSent"""

    word: PairWord
    to: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetPair:
    """Free what is kept under the key, and break its transfers off. No outcome of its own."""

    key: PairKey


PairNetworkEffect = SendPair | SendWord | ForgetPair


@dataclass(frozen=True, slots=True)
class PairSent:
    """The partner has all of it, now or before."""

    key: PairKey


@dataclass(frozen=True, slots=True)
class PairNotSent:
    """`refusal`: how the partner refused it; unspecified when it did not answer, and then it may have it after all."""

    key: PairKey
    refusal: Refusal = Refusal.UNSPECIFIED
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WordSent:
    word: PairWord


@dataclass(frozen=True, slots=True)
class WordNotSent:
    """As PairNotSent."""

    word: PairWord
    refusal: Refusal = Refusal.UNSPECIFIED
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PairMoved:
    """Bytes of one of the swap's transfers went by. Once a second is enough."""

    key: PairKey


@dataclass(frozen=True, slots=True)
class PairArrived:
    """After an admission: the whole payload is kept, and its bytes have the digest that the header named."""

    header: PairHeader
    sender: WorkerId


@dataclass(frozen=True, slots=True)
class PairAborted:
    """After an admission: it broke off, or was not what the header said."""

    header: PairHeader
    sender: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WordTold:
    """A word that `judge_word` has let in."""

    word: PairWord
    sender: WorkerId


PairNetworkEvent = (
    PairSent | PairNotSent | WordSent | WordNotSent | PairMoved | PairArrived | PairAborted | WordTold
)
