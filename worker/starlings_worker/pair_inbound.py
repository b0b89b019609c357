"""What can be told of a partner's payload or word by itself, before the core is asked."""

from __future__ import annotations

from starlings_protos import convert, data_pb2
from starlings_protos.errors import RefusedError
from starlings_protos.frames import FrameError, is_sha256
from starlings_protos.messages import Refusal
from starlings_protos.pair_messages import PairHeader, PairWord, PairWordKind
from starlings_worker.pair_device import MOMENTUM, WEIGHTS, PairDevice, digest_of

# Of a word's reason, which is for people.
REASON_LIMIT_CHARACTERS = 512
# Tensors of a payload, in their order: momentum travels where the job and the phase say so.
_CARRIED = ([WEIGHTS], [WEIGHTS, MOMENTUM])


def check_payload(header: data_pb2.Header, subject: PairHeader, device: PairDevice) -> None:
    """By the header alone, before anything is allocated.

    Raises:
        RefusedError: NOT_HELD, no such stage is held here. FrameError: no swap of the job has such a payload.
    """
    if not device.holds(subject.stage):
        raise RefusedError(Refusal.NOT_HELD, f"stage {subject.stage} is not held here")
    elements = device.elements(subject.stage, subject.fragment)
    if not elements:
        raise FrameError(f"stage {subject.stage} has no fragment {subject.fragment}")
    names = [tensor.name for tensor in header.tensors]
    if names not in _CARRIED:
        raise FrameError(f"a payload must carry {WEIGHTS!r}, and may carry {MOMENTUM!r} after it")
    for tensor in header.tensors:
        codec = device.codec_text(tensor.name)
        if codec is None:
            raise FrameError(f"{tensor.name!r} does not travel in this job")
        if tensor.data_type != data_pb2.DATA_TYPE_FLOAT32 or tensor.codec != codec:
            raise FrameError(f"tensor {tensor.name!r} has the wrong type, or another codec than {codec}")
        if list(tensor.shape) != [elements]:
            raise FrameError(
                f"tensor {tensor.name!r} is no vector of {elements} elements, as fragment {subject.fragment} is",
                Refusal.LIMIT if len(tensor.shape) == 1 and tensor.shape[0] > elements else Refusal.MALFORMED,
            )


def check_bytes(sha256: str, buffers: list[memoryview]) -> None:
    """Raises FrameError: they are not those that the header is about."""
    if digest_of(buffers) != sha256:
        raise FrameError("the payload's bytes have another digest than its header says")


def word_of(message: data_pb2.PairWord) -> PairWord:
    """A checked word.

    Raises:
        FrameError: it is none.
    """
    try:
        word = convert.from_proto(message, PairWord)
    except ValueError as error:
        raise FrameError(str(error)) from None
    if word.kind is PairWordKind.UNSPECIFIED:
        raise FrameError("a word that says nothing")
    if word.sha256 and not is_sha256(word.sha256):
        raise FrameError("a word with a malformed SHA-256")
    if len(word.reason) > REASON_LIMIT_CHARACTERS:
        raise FrameError(f"a reason of {len(word.reason)} characters", Refusal.LIMIT)
    return word
