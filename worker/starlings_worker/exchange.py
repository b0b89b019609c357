"""A group's vector in exchange: parts out, parts in, reduced, assembled. All of it on the compute thread.

The core (`starlings_worker.core.exchange`) says when; here are the tensors. Every member decodes the same
encoded aggregates, its own too, so replicas stay equal bit for bit. Contributions travel in the job's codec,
aggregates in what `starlings_job.codecs.return_spec` makes of it for that many contributors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from starlings_compression.codec import Codec, make_codec
from starlings_compression.errors import CodecError
from starlings_compression.spec import CodecSpec, parse_spec
from starlings_job.codecs import may_return, return_spec
from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangePurpose, WorkerId
from starlings_worker import wire
from starlings_worker.core.events import Leg
from starlings_worker.digest import bits_digest, is_finite, squared_norm
from starlings_worker.flat import FlatVector
from starlings_worker.history import Part
from starlings_worker.parts import cut
from starlings_worker.residuals import Residuals
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
    # In which contributions and aggregates travel.
    codecs: dict[Leg, Codec]
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
        # Codecs of aggregates, made once each.
        self._codecs = {c.spec: c for c in (self._codec, self._exact)}
        self._residuals: dict[tuple[str, Leg], Residuals] = {}

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
        return opened.codecs[leg].spec.text, end - begin, data

    def takes(self, leg: Leg, codec: str) -> bool:
        """Whether a part of that leg may be announced in `codec`, as far as can be told before a round is open."""
        if codec == self._exact.spec.text:
            return True
        spec = self._codec.spec
        return codec == spec.text if leg is Leg.CONTRIBUTION else may_return(codec, spec)

    @property
    def codec_text(self) -> str:
        """In which gradients travel to the owners of parts."""
        return self._codec.spec.text

    def owed(self) -> list[tuple[str, tuple[int, int], Tensor]]:
        """What lossy codecs have dropped here so far and will send later: (group, elements [begin, end), values)."""
        return [
            (group, bounds, residual)
            for (group, _), residuals in sorted(self._residuals.items(), key=lambda item: item[0][0])
            for bounds, residual in residuals.owed()
        ]

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

    def _codecs_of(self, group: ExchangeGroup, purpose: ExchangePurpose) -> dict[Leg, Codec]:
        if purpose is ExchangePurpose.STATE:
            return dict.fromkeys(Leg, self._exact)
        contributors = sum(member.weight > 0.0 for member in group.members)
        back = self._made(return_spec(self._codec.spec, contributors))
        # Replicas of other machines decode the same bytes, and must get the same bits.
        assert back.exact_decode, f"aggregates cannot travel in {back.spec}"
        return {Leg.CONTRIBUTION: self._codec, Leg.AGGREGATE: back}

    def _made(self, spec: CodecSpec) -> Codec:
        if spec not in self._codecs:
            self._codecs[spec] = make_codec(spec)
        return self._codecs[spec]

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
        opened = _Open(group, purpose, own, vector, bounds, self._codecs_of(group, purpose))
        self._open[step, attempt, group.group] = opened
        if len(group.members) == 1:
            return
        self._cut_residuals(opened)
        if group.members[own].weight <= 0.0:
            return
        for part, (begin, end) in enumerate(bounds):
            if group.members[part].share > 0.0:
                opened.contributions[part] = self._encode(opened, Leg.CONTRIBUTION, part, vector[begin:end])

    def reduce(self, step: int, attempt: int, group: str) -> None:
        """The weighted sum of all members' decoded contributions to the own part, in the members' order,
        encoded.

        Raises:
            RefusedPart: names who contributed something malformed or not finite.
        """
        opened = self._opened(step, attempt, group)
        begin, end = opened.bounds[opened.own]
        total = torch.zeros(end - begin, dtype=torch.float32, device=opened.vector.device)
        codec = opened.codecs[Leg.CONTRIBUTION]
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
        opened.aggregate = self._encode(opened, Leg.AGGREGATE, opened.own, total)

    def assemble(self, step: int, attempt: int, group: str) -> tuple[int, float]:
        """Every part's aggregate, decoded into the vector. Returns (digest, squared norm) of the whole.

        Raises:
            RefusedPart: names the owner of a part that was malformed or not finite.
        """
        opened = self._opened(step, attempt, group)
        if len(opened.group.members) > 1:
            codec = opened.codecs[Leg.AGGREGATE]
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
            codec = opened.codecs[Leg.AGGREGATE].spec.text
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
            if not self.takes(Leg.AGGREGATE, part.codec):
                raise RefusedPart(
                    WorkerId(""), f"the update of group {group} is encoded as {part.codec[:40]}"
                )
            codec = self._made(parse_spec(part.codec))
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
        for residuals in self._residuals.values():
            residuals.rollback()

    def commit(self, step: int) -> None:
        """The step was applied: codec state counts, and what belongs to the step or earlier ones is
        dropped.
        """
        for residuals in self._residuals.values():
            residuals.commit()
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
        for residuals in self._residuals.values():
            residuals.reset()

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

    def _cut_residuals(self, opened: _Open) -> None:
        """Error feedback follows the cut of this round: contributions to every part, the aggregate of the own one."""
        members, bounds, own = opened.group.members, opened.bounds, opened.own
        parts = {part: bounds[part] for part, member in enumerate(members) if member.share > 0.0}
        for leg, wanted in (
            (Leg.CONTRIBUTION, parts),
            (Leg.AGGREGATE, {p: b for p, b in parts.items() if p == own}),
        ):
            if opened.codecs[leg].lossless:
                continue
            key = (opened.group.group, leg)
            if key not in self._residuals:
                self._residuals[key] = Residuals(opened.group.group, opened.vector.device)
            self._residuals[key].cut(opened.codecs[leg], wanted)

    def _encode(self, opened: _Open, leg: Leg, part: int, tensor: Tensor) -> Buffer:
        codec, group = opened.codecs[leg], opened.group.group
        name = f"part {part} of {group}"
        try:
            if codec.lossless:
                return wire.encode(codec, tensor, name)
            return self._residuals[group, leg].of(part).encode(tensor, name=name)
        except CodecError as error:
            raise RefusedPart(self._worker_id, str(error)) from None

    def _decode(
        self, codec: Codec, data: Buffer | None, size: int, device: torch.device, sender: WorkerId, what: str
    ) -> Tensor:
        try:
            if data is None:
                raise CodecError("it is not here")
            return wire.decode(codec, data, (size,), device)
        except CodecError as error:
            raise RefusedPart(sender, f"the {what} is malformed: {error}") from None
