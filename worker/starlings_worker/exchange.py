"""A group's vector in exchange: parts out, parts in, reduced, assembled. All of it on the compute thread.

The core (`starlings_worker.core.exchange`) says when; here are the tensors. Every member decodes the same
encoded aggregates, its own too, so replicas stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from starlings_compression.codec import Codec, make_codec
from starlings_compression.errors import CodecError
from starlings_compression.feedback import ErrorFeedback
from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangePurpose, WorkerId
from starlings_worker import wire
from starlings_worker.core.events import Leg
from starlings_worker.digest import bits_digest, is_finite, squared_norm
from starlings_worker.flat import FlatVector
from starlings_worker.history import Part
from starlings_worker.parts import cut
from starlings_worker.wire import Buffer

# (step, attempt) -> whether that is over.
_Over = Callable[[int, int], bool]
_ArrivedKey = tuple[Leg, int, int, str, int, WorkerId]


class RefusedPart(Exception):
    """Something in an exchange was malformed or not finite; `culprit` sent it."""

    def __init__(self, culprit: WorkerId, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit


@dataclass(slots=True)
class _Open:
    """One group of one exchange in progress."""

    group: ExchangeGroup
    purpose: ExchangePurpose
    own: int
    vector: Tensor
    bounds: tuple[tuple[int, int], ...]
    # This worker's encoded parts by part number, and its encoded aggregate of its own part.
    contributions: dict[int, Buffer] = field(default_factory=dict)
    aggregate: Buffer | None = None


class ExchangeBuffers:
    """Everything that exchanges keep between a part's arrival and the step's end."""

    def __init__(self, worker_id: WorkerId, codec: str, vectors: dict[str, FlatVector]) -> None:
        """`codec`: the job's, for gradients. State always travels exactly."""
        self._worker_id = worker_id
        self._codec = make_codec(codec)
        self._exact = make_codec("exact")
        self._vectors = vectors
        self._open: dict[tuple[int, int, str], _Open] = {}
        self._arrived: dict[_ArrivedKey, Buffer] = {}
        # Error feedback by (group, leg, part); the bounds it was made for, because the cut moves with the
        # members.
        self._feedback: dict[tuple[str, Leg, int], tuple[tuple[int, int], ErrorFeedback]] = {}

    # ---------------------------------------------------------------- parts in and out

    def keep(self, leg: Leg, header: ExchangeHeader, sender: WorkerId, data: Buffer) -> None:
        """Keeps an arrived part, perhaps before its exchange is opened here."""
        self._arrived[leg, header.step, header.attempt, header.group, header.part, sender] = data

    def forget(self, leg: Leg, header: ExchangeHeader, sender: WorkerId) -> None:
        self._arrived.pop((leg, header.step, header.attempt, header.group, header.part, sender), None)

    def outgoing(self, leg: Leg, header: ExchangeHeader) -> tuple[str, int, Buffer] | None:
        """(codec, number of elements, bytes) of an own encoded part; None when it is not there (any more)."""
        opened = self._open.get((header.step, header.attempt, header.group))
        if opened is None:
            return None
        data = opened.contributions.get(header.part) if leg is Leg.CONTRIBUTION else opened.aggregate
        if data is None:
            return None
        begin, end = opened.bounds[header.part]
        return self._codec_of(opened).spec.text, end - begin, data

    @property
    def codec_text(self) -> str:
        """In which gradients travel."""
        return self._codec.spec.text

    @property
    def largest_vector(self) -> int:
        """Elements of the largest vector that any group could exchange."""
        return max(map(self.vector_size, self._vectors), default=0)

    def vector_size(self, group: str) -> int:
        """Elements of the largest vector that the group could exchange (that of its whole state); 0 when not
        held.
        """
        vector = self._vectors.get(group)
        return vector.size * (1 + len(vector.state)) if vector is not None else 0

    def _codec_of(self, opened: _Open) -> Codec:
        return self._exact if opened.purpose is ExchangePurpose.STATE else self._codec

    # ---------------------------------------------------------------- the round, on the compute thread

    def open(self, step: int, attempt: int, group: ExchangeGroup, purpose: ExchangePurpose, own: int) -> None:
        """Makes the vector flat and encodes this worker's parts.

        Raises:
            RefusedPart: the culprit is this worker; its vector is not finite, or it holds no such group.
        """
        held = self._vectors.get(group.group)
        if held is None:
            raise RefusedPart(self._worker_id, f"group {group.group} is not held here")
        if group.members[own].worker_id != self._worker_id:
            raise RefusedPart(self._worker_id, f"member {own} of group {group.group} is another worker")
        vector = held.whole_state() if purpose is ExchangePurpose.STATE else held.gradient
        try:
            bounds = cut(vector.numel(), [member.share for member in group.members])
        except ValueError as error:
            raise RefusedPart(self._worker_id, f"group {group.group}: {error}") from None
        opened = _Open(group, purpose, own, vector, bounds)
        self._open[step, attempt, group.group] = opened
        if len(group.members) == 1 or group.members[own].weight <= 0.0:
            return
        for part, (begin, end) in enumerate(bounds):
            if group.members[part].share > 0.0:
                opened.contributions[part] = self._encode(
                    opened, Leg.CONTRIBUTION, part, vector[begin:end], (begin, end)
                )

    def reduce(self, step: int, attempt: int, group: str) -> None:
        """The weighted sum of all members' decoded contributions to the own part, in the members' order,
        encoded.

        Raises:
            RefusedPart: names who contributed something malformed or not finite.
        """
        opened = self._opened(step, attempt, group)
        begin, end = opened.bounds[opened.own]
        total = torch.zeros(end - begin, dtype=torch.float32, device=opened.vector.device)
        codec = self._codec_of(opened)
        for position, member in enumerate(opened.group.members):
            if member.weight <= 0.0:
                continue
            if position == opened.own:
                data: Buffer | None = opened.contributions[opened.own]
            else:
                data = self._arrived.get(
                    (Leg.CONTRIBUTION, step, attempt, group, opened.own, member.worker_id)
                )
            part = self._decode(codec, data, end - begin, total.device, member.worker_id, "contribution")
            total.add_(part if member.weight == 1.0 else part.mul_(member.weight))
        opened.aggregate = self._encode(opened, Leg.AGGREGATE, opened.own, total, (begin, end))

    def assemble(self, step: int, attempt: int, group: str) -> tuple[int, float]:
        """Every part's aggregate, decoded into the vector. Returns (digest, squared norm) of the whole.

        Raises:
            RefusedPart: names the owner of a part that was malformed or not finite.
        """
        opened = self._opened(step, attempt, group)
        if len(opened.group.members) > 1:
            codec = self._codec_of(opened)
            for part, (begin, end) in enumerate(opened.bounds):
                if begin == end:
                    continue
                owner = opened.group.members[part].worker_id
                if part == opened.own:
                    data: Buffer | None = opened.aggregate
                else:
                    data = self._arrived.get((Leg.AGGREGATE, step, attempt, group, part, owner))
                try:
                    if data is None:
                        raise CodecError("it is not here")
                    wire.decode_into(codec, data, opened.vector[begin:end])
                except CodecError as error:
                    raise RefusedPart(owner, f"the aggregate of part {part} is malformed: {error}") from None
        elif not is_finite(opened.vector):
            raise RefusedPart(self._worker_id, "its gradient is not finite")
        return bits_digest(opened.vector), squared_norm(opened.vector)

    # ---------------------------------------------------------------- for late joiners

    def updates(self, step: int) -> dict[str, list[Part]]:
        """What every group decoded in `step`, which is committed and not applied yet: each part's encoded aggregate, or
        the gradient of a group of one.
        """
        found: dict[str, list[Part]] = {}
        for (opened_step, attempt, group), opened in self._open.items():
            if opened_step != step or opened.purpose is not ExchangePurpose.GRADIENT:
                continue
            if len(opened.group.members) == 1:
                data = wire.encode(self._exact, opened.vector, group)
                found[group] = [Part(0, opened.vector.numel(), self._exact.spec.text, data)]
                continue
            codec = self._codec_of(opened).spec.text
            parts = []
            for part, (begin, end) in enumerate(opened.bounds):
                if begin == end:
                    continue
                owner = opened.group.members[part].worker_id
                own = part == opened.own
                encoded = (
                    opened.aggregate
                    if own
                    else self._arrived.get((Leg.AGGREGATE, step, attempt, group, part, owner))
                )
                assert encoded is not None, f"part {part} of {group} was decoded and is gone"
                parts.append(Part(begin, end, codec, encoded))
            found[group] = parts
        return found

    def replay(self, updates: Mapping[str, Sequence[Part]]) -> dict[str, int]:
        """Another worker's `updates` become the gradients here, to be applied. Returns their digests by group.

        Raises:
            RefusedPart: the culprit is unknown here (""); a group is missing, or its parts are malformed. Gradients
                are zero again.
        """
        try:
            for group, vector in self._vectors.items():
                self._decode_update(group, vector.gradient, updates.get(group))
        except RefusedPart:
            for vector in self._vectors.values():
                vector.gradient.zero_()
            raise
        return {group: bits_digest(vector.gradient) for group, vector in self._vectors.items()}

    def _decode_update(self, group: str, gradient: Tensor, parts: Sequence[Part] | None) -> None:
        if parts is None:
            raise RefusedPart(WorkerId(""), f"there is no update of group {group}")
        position = 0
        for part in sorted(parts, key=lambda part: part.begin):
            if part.begin != position or not position < part.end <= gradient.numel():
                raise RefusedPart(
                    WorkerId(""), f"the update of group {group} has a gap at element {position}"
                )
            codec = {c.spec.text: c for c in (self._codec, self._exact)}.get(part.codec)
            if codec is None:
                raise RefusedPart(
                    WorkerId(""), f"the update of group {group} is encoded as {part.codec[:40]}"
                )
            try:
                wire.decode_into(codec, part.data, gradient[part.begin : part.end])
            except CodecError as error:
                raise RefusedPart(
                    WorkerId(""), f"the update of group {group} is malformed: {error}"
                ) from None
            position = part.end
        if position != gradient.numel():
            raise RefusedPart(WorkerId(""), f"the update of group {group} ends at element {position}")

    # ---------------------------------------------------------------- ends

    def clear(self, step: int, attempt: int) -> None:
        """Drops what belongs to an attempt of `step` below `attempt`, and codec state that was not
        committed.
        """

        def over(key_step: int, key_attempt: int) -> bool:
            return key_step < step or (key_step == step and key_attempt < attempt)

        self._drop(over)
        for _, feedback in self._feedback.values():
            feedback.rollback()

    def commit(self, step: int) -> None:
        """The step was applied: codec state counts, and what belongs to the step or earlier ones is
        dropped.
        """
        for _, feedback in self._feedback.values():
            feedback.commit()
        self._drop(lambda key_step, _: key_step <= step)

    def adopt(self) -> None:
        """The assembled vectors of a STATE exchange become parameters and optimizer state; then nothing is
        kept.
        """
        for opened in self._open.values():
            if opened.purpose is ExchangePurpose.STATE:
                self._vectors[opened.group.group].adopt(opened.vector)
        self._open.clear()
        self._arrived.clear()
        for _, feedback in self._feedback.values():
            feedback.reset()

    def _drop(self, over: _Over) -> None:
        for key in [k for k in self._open if over(k[0], k[1])]:
            del self._open[key]
        for arrived in [k for k in self._arrived if over(k[1], k[2])]:
            del self._arrived[arrived]

    # ---------------------------------------------------------------- codecs

    def _opened(self, step: int, attempt: int, group: str) -> _Open:
        opened = self._open.get((step, attempt, group))
        if opened is None:
            raise RefusedPart(self._worker_id, f"the exchange of {group} is not open here")
        return opened

    def _encode(self, opened: _Open, leg: Leg, part: int, tensor: Tensor, bounds: tuple[int, int]) -> Buffer:
        codec = self._codec_of(opened)
        name = f"part {part} of {opened.group.group}"
        try:
            if codec.lossless:
                return wire.encode(codec, tensor, name)
            return self._feedback_for(opened.group.group, leg, part, bounds).encode(tensor, name=name)
        except CodecError as error:
            raise RefusedPart(self._worker_id, str(error)) from None

    def _feedback_for(self, group: str, leg: Leg, part: int, bounds: tuple[int, int]) -> ErrorFeedback:
        known = self._feedback.get((group, leg, part))
        if known is None or known[0] != bounds:
            known = (bounds, ErrorFeedback(self._codec))
            self._feedback[group, leg, part] = known
        return known[1]

    def _decode(
        self, codec: Codec, data: Buffer | None, size: int, device: torch.device, sender: WorkerId, what: str
    ) -> Tensor:
        try:
            if data is None:
                raise CodecError("it is not here")
            return wire.decode(codec, data, (size,), device)
        except CodecError as error:
            raise RefusedPart(sender, f"the {what} is malformed: {error}") from None
