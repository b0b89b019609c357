"""A group's vector in exchange: parts out, parts in, reduced, assembled. All of it on the compute thread.

The core (`starlings_worker.core.exchange`) says when; here are the tensors. Every member decodes the same
encoded aggregates, its own too, so replicas stay equal bit for bit. Contributions travel in the job's codec,
aggregates in what `starlings_job.codecs.return_spec` makes of it for that many contributors.

`lowrank` sums up factors instead of the vector, exactly, and twice: in the first pass the left ones of all matrices
together with all that is no matrix, in the second the right ones (`starlings_compression.linear`). So `assemble` ends
the first of two passes and begins the second; what was made for the first stays, for those who still need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from starlings_compression.codec import Codec, make_codec
from starlings_compression.errors import CodecError
from starlings_compression.linear import LinearRounds
from starlings_compression.spec import CodecSpec, parse_spec
from starlings_compression.tensors import chunk_elements
from starlings_compression.wire import WireReader, plain_reader
from starlings_job.codecs import linear_rank, may_return, return_spec
from starlings_protos.buffers import fresh
from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangePurpose, WorkerId
from starlings_worker import wire
from starlings_worker.core.events import Leg
from starlings_worker.core.exchange import PASSES_MOST
from starlings_worker.digest import Fingerprint, fingerprint, is_finite
from starlings_worker.flat import FlatVector
from starlings_worker.history import Part
from starlings_worker.open_group import ArrivedKey, OpenGroup, Pass, RefusedPart, arrived_key, rounds_of
from starlings_worker.parts import cut
from starlings_worker.residuals import Residuals
from starlings_worker.summing import Summand, WeightedSum
from starlings_worker.wire import Buffer

# (step, attempt) -> whether that is over.
_Over = Callable[[int, int], bool]

__all__ = ["ExchangeBuffers", "RefusedPart"]


class ExchangeBuffers:
    """Everything that exchanges keep between a part's arrival and the step's end."""

    def __init__(self, worker_id: WorkerId, codec: str, vectors: dict[str, FlatVector]) -> None:
        """`codec`: the job's, for gradients. State always travels exactly."""
        self._worker_id = worker_id
        self._spec = parse_spec(codec)
        self._exact = make_codec("exact")
        rank = linear_rank(self._spec)
        # What travels is no Packed where factors are summed up.
        self._codec = make_codec(codec) if rank is None else self._exact
        self._vectors = vectors
        self._rounds = {} if rank is None else rounds_of(vectors, rank)
        self._open: dict[tuple[int, int, str], OpenGroup] = {}
        self._arrived: dict[ArrivedKey, Buffer] = {}
        # Codecs of aggregates, made once each.
        self._codecs = {c.spec: c for c in (self._codec, self._exact)}
        self._residuals: dict[tuple[str, Leg], Residuals] = {}

    # ---------------------------------------------------------------- parts in and out

    def keep(self, leg: Leg, header: ExchangeHeader, sender: WorkerId, data: Buffer) -> None:
        """Keeps an arrived part, perhaps before its exchange is opened here."""
        self._arrived[arrived_key(leg, header, sender)] = data

    def forget(self, leg: Leg, header: ExchangeHeader, sender: WorkerId) -> None:
        self._arrived.pop(arrived_key(leg, header, sender), None)

    def outgoing(self, leg: Leg, header: ExchangeHeader) -> tuple[str, int, Buffer] | None:
        """(codec, number of elements, bytes) of an own encoded part; None when it is not there (any more)."""
        opened = self._open.get((header.step, header.attempt, header.group))
        if opened is None or not 0 <= header.pass_number < len(opened.passes):
            return None
        made = opened.passes[header.pass_number]
        data = made.contributions.get(header.part) if leg is Leg.CONTRIBUTION else made.aggregate
        if data is None:
            return None
        begin, end = made.bounds[header.part]
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
        return self._spec.text

    def part_limit(self, group: str, pass_number: int) -> int:
        """Elements of the largest part that a pass of the group could have; 0 when there is no such pass."""
        if pass_number == 0:
            return self.vector_size(group)
        rounds = self._rounds.get(group)
        return rounds.second_size if rounds is not None and pass_number == 1 else 0

    def owed(self) -> list[tuple[str, tuple[int, int], Tensor]]:
        """What lossy codecs have dropped here so far and will send later: (group, elements [begin, end), values)."""
        return [
            (group, bounds, residual)
            for (group, _), residuals in sorted(self._residuals.items(), key=lambda item: item[0][0])
            for bounds, residual in residuals.owed()
        ] + [
            (group, bounds, residual)
            for group, rounds in sorted(self._rounds.items())
            for bounds, residual in rounds.owed
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
        return vector.whole_size if vector is not None else 0

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
        opened = OpenGroup(group, purpose, own, vector, self._codecs_of(group, purpose))
        values: Tensor | None = vector
        if len(group.members) > 1 and purpose is ExchangePurpose.GRADIENT:
            opened.rounds = self._rounds.get(group.group)
        if opened.rounds is not None:
            opened.rounds.rollback()
            values = opened.rounds.first(vector) if opened.contributes else None
        else:
            opened.result = Fingerprint(vector)
        self._begin_pass(opened, values, opened.rounds.first_size if opened.rounds else vector.numel())
        self._open[step, attempt, group.group] = opened

    def _begin_pass(self, opened: OpenGroup, values: Tensor | None, size: int) -> None:
        """Cuts what this worker adds to the sum, None: nothing, and encodes it."""
        members = opened.group.members
        try:
            bounds = cut(size, [member.share for member in members])
        except ValueError as error:
            raise RefusedPart(self._worker_id, f"group {opened.group.group}: {error}") from None
        if values is None:
            values = torch.empty(size, dtype=torch.float32, device=opened.vector.device)
        opened.passes.append(Pass(values, bounds))
        if len(members) == 1:
            return
        self._cut_residuals(opened)
        if not opened.contributes:
            return
        for part, (begin, end) in enumerate(bounds):
            if part == opened.own and opened.adds_own_as_it_is:
                opened.present.own_summand = self._with_owed(opened, begin, end)
            elif members[part].share > 0.0:
                encoded = self._encode(opened, Leg.CONTRIBUTION, part, values[begin:end])
                opened.present.contributions[part] = encoded

    def reduce(self, step: int, attempt: int, group: str) -> None:
        """The weighted sum of all members' decoded contributions to the own part of the present pass, in the members'
        order, encoded.

        Raises:
            RefusedPart: names who contributed something malformed or not finite.
        """
        opened = self._opened(step, attempt, group)
        present = opened.present
        begin, end = present.bounds[opened.own]
        number = len(opened.passes) - 1
        summands = []
        for position, member in enumerate(opened.group.members):
            if member.weight <= 0.0:
                continue
            if position == opened.own and present.own_summand is not None:
                reader = plain_reader(present.own_summand)
            else:
                key = (Leg.CONTRIBUTION, step, attempt, group, number, opened.own, member.worker_id)
                data = self._arrived.get(key) if position != opened.own else present.contributions[opened.own]
                reader = self._reader(
                    opened, Leg.CONTRIBUTION, data, end - begin, member.worker_id, "the contribution"
                )
            summands.append(Summand(member.worker_id, member.weight, reader))
        total = WeightedSum(summands, end - begin, opened.vector.device)
        present.aggregate = self._encode(opened, Leg.AGGREGATE, opened.own, total)
        # They are in the sum: their memory can take the aggregates that come next.
        for member in opened.group.members:
            key = (Leg.CONTRIBUTION, step, attempt, group, number, opened.own, member.worker_id)
            self._arrived.pop(key, None)

    def assemble(self, step: int, attempt: int, group: str) -> tuple[int, float] | None:
        """Every part's aggregate, decoded in place of what was summed up. Returns (digest, squared norm) of the whole
        vector; or None where that takes a second pass, which has begun now: `outgoing`, `keep`, `reduce` and `assemble`
        follow once more.

        Raises:
            RefusedPart: names the owner of a part that was malformed or not finite.
        """
        opened = self._opened(step, attempt, group)
        if len(opened.group.members) == 1:
            digest, norm = fingerprint(opened.vector)
            if not math.isfinite(norm):
                raise RefusedPart(self._worker_id, "its gradient is not finite")
            return digest, norm
        values = opened.present.values
        for part, begin, end, data in self._aggregates(opened, step, attempt, len(opened.passes) - 1):
            self._write_aggregate(opened, part, begin, end, data)
        if (rounds := opened.rounds) is not None:
            if len(opened.passes) == 1:
                self._begin_pass(opened, rounds.second(values), rounds.second_size)
                return None
            rounds.result(opened.passes[0].values, values, opened.vector)
        digest, norm = (opened.result or Fingerprint(opened.vector)).finish()
        if not math.isfinite(norm):
            raise RefusedPart(self._worker_id, "the product of the summed factors is not finite")
        return digest, norm

    def _write_aggregate(
        self, opened: OpenGroup, part: int, begin: int, end: int, data: Buffer | None
    ) -> None:
        """Decodes it chunk by chunk in place of what was summed up. Raises RefusedPart."""
        owner, what = opened.group.members[part].worker_id, f"the aggregate of part {part}"
        reader = self._reader(opened, Leg.AGGREGATE, data, end - begin, owner, what)
        size = chunk_elements(opened.vector.device, reader.granularity)
        result, term = opened.result, None if opened.result is None else reader.term(1.0)
        placed = opened.present.placed if part == opened.own else range(0)
        start, count = 0, end - begin
        while start < count:
            if start in placed:
                start = placed.stop
                continue
            # Up to what is there already.
            rest = placed.start if start < placed.start else count
            stop = min(start + size, rest)
            if result is not None and term is not None:
                if (written := result.write([term], begin, start, rest)) > start:
                    start = written
                    continue
                stop = min(stop, result.border(begin, start, reader.granularity))
            into = opened.present.values[begin + start : begin + stop]
            values = reader.read(start, stop, into)
            if not (reader.checked or is_finite(values)):
                raise RefusedPart(owner, f"{what} is malformed: NaN or infinite values")
            if values.data_ptr() != into.data_ptr():
                into.copy_(values)
            if result is not None:
                result.take(begin + start, begin + stop)
            start = stop

    def _aggregates(
        self, opened: OpenGroup, step: int, attempt: int, pass_number: int
    ) -> Iterator[tuple[int, int, int, Buffer | None]]:
        """(part, begin, end, encoded sum) of each part of a pass that is not empty."""
        made = opened.passes[pass_number]
        for part, (begin, end) in enumerate(made.bounds):
            if begin == end:
                continue
            if part == opened.own:
                yield part, begin, end, made.aggregate
                continue
            owner, group = opened.group.members[part].worker_id, opened.group.group
            key = (Leg.AGGREGATE, step, attempt, group, pass_number, part, owner)
            yield part, begin, end, self._arrived.get(key)

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
            found[group] = []
            for number in range(len(opened.passes)):
                for part, begin, end, encoded in self._aggregates(opened, step, attempt, number):
                    assert encoded is not None, f"part {part} of {group} was decoded and is gone"
                    if part == opened.own and opened.codecs[Leg.AGGREGATE].spec.raw:
                        encoded = bytes(
                            encoded
                        )  # It is the vector's own memory, which serves the next step too.
                    found[group].append(Part(begin, end, codec, encoded, number))
        return found

    def replay(self, updates: Mapping[str, Sequence[Part]]) -> dict[str, int]:
        """Another worker's `updates` become the gradients here, to be applied; what its codec begins the next exchange
        with becomes this one's. Returns the gradients' digests by group.

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
            for rounds in self._rounds.values():
                rounds.rollback()
            raise
        for rounds in self._rounds.values():
            rounds.commit()
        return {group: fingerprint(vector.gradient)[0] for group, vector in self._vectors.items()}

    def _decode_update(self, group: str, gradient: Tensor, parts: Sequence[Part] | None) -> None:
        if parts is None:
            raise RefusedPart(WorkerId(""), f"there is no update of group {group}")
        passes = [[p for p in parts if p.pass_number == number] for number in range(PASSES_MOST)]
        rounds = self._rounds.get(group) if passes[1] else None
        if rounds is None:
            if len(passes[0]) != len(parts):
                raise RefusedPart(WorkerId(""), f"the update of group {group} has a pass too many")
            self._decode_parts(group, gradient, parts)
            return
        # Factors, unless the step's only member had nobody to exchange with.
        sums = [torch.empty(n, device=gradient.device) for n in (rounds.first_size, rounds.second_size)]
        for values, of_pass in zip(sums, passes, strict=True):
            self._decode_parts(group, values, of_pass)
        rounds.rollback()
        rounds.second(sums[0])
        rounds.result(sums[0], sums[1], gradient)

    def _decode_parts(self, group: str, gradient: Tensor, parts: Sequence[Part]) -> None:
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
        for kept in self._memories():
            kept.rollback()

    def commit(self, step: int) -> None:
        """The step was applied: codec state counts, and what belongs to the step or earlier ones is
        dropped.
        """
        for kept in self._memories():
            kept.commit()
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
        for kept in self._memories():
            kept.reset()

    def _memories(self) -> Iterator[Residuals | LinearRounds]:
        """All that codecs remember from step to step."""
        yield from self._residuals.values()
        yield from self._rounds.values()

    def _drop(self, over: _Over) -> None:
        for key in [k for k in self._open if over(k[0], k[1])]:
            del self._open[key]
        for arrived in [k for k in self._arrived if over(k[1], k[2])]:
            del self._arrived[arrived]

    # ---------------------------------------------------------------- codecs

    def _opened(self, step: int, attempt: int, group: str) -> OpenGroup:
        opened = self._open.get((step, attempt, group))
        if opened is None:
            raise RefusedPart(self._worker_id, f"the exchange of {group} is not open here")
        return opened

    def _cut_residuals(self, opened: OpenGroup) -> None:
        """Error feedback follows the cut of this round: contributions to every part, the aggregate of the own one."""
        members, bounds, own = opened.group.members, opened.present.bounds, opened.own
        parts = {part: bounds[part] for part, member in enumerate(members) if member.share > 0.0}
        sent = {p: b for p, b in parts.items() if p != own or not opened.adds_own_as_it_is}
        for leg, wanted in (
            (Leg.CONTRIBUTION, sent),
            (Leg.AGGREGATE, {p: b for p, b in parts.items() if p == own}),
        ):
            if opened.codecs[leg].lossless:
                continue
            key = (opened.group.group, leg)
            if key not in self._residuals:
                self._residuals[key] = Residuals(opened.group.group, opened.vector.device)
            self._residuals[key].cut(opened.codecs[leg], wanted)

    def _with_owed(self, opened: OpenGroup, begin: int, end: int) -> Tensor:
        """The present pass's values of the own part, and what was dropped of them as long as others owned it."""
        values = opened.present.values[begin:end]
        if opened.codecs[Leg.CONTRIBUTION].lossless:
            return values
        owed = self._residuals[opened.group.group, Leg.CONTRIBUTION].carried((begin, end))
        return values if owed is None else values + owed

    def _encode(self, opened: OpenGroup, leg: Leg, part: int, values: Tensor | WeightedSum) -> Buffer:
        codec, group = opened.codecs[leg], opened.group.group
        name = f"part {part} of {group}"
        present, (begin, end) = opened.present, opened.present.bounds[part]
        try:
            if isinstance(values, WeightedSum):
                if codec.lossless:
                    # It takes the place of the own summand, where it would be written in the end: fresh memory of that
                    # size would cost more than the sum.
                    total = values.write(opened.result, present.values, begin, end)
                    present.placed = range(end - begin)
                    return wire.lend(codec, total, name, finite=True)
                if opened.result is not None:
                    values.landing = opened.result.landing(begin, end)
            elif codec.lossless:
                # Nobody changes the memory as long as it is needed: a pass keeps its values until all aggregates are
                # here, and then every owner has its contributions.
                return wire.lend(codec, values, name)
            feedback = self._residuals[group, leg].of(part)
            data = fresh(feedback.most_bytes(values))
            data = data[: feedback.encode_into(values, data, name=name)]
            if isinstance(values, WeightedSum) and opened.result is not None and values.landing is not None:
                present.placed = opened.result.landed(values.landing, begin)
            return data
        except CodecError as error:
            raise RefusedPart(self._worker_id, str(error)) from None

    @staticmethod
    def _reader(
        opened: OpenGroup, leg: Leg, data: Buffer | None, size: int, sender: WorkerId, what: str
    ) -> WireReader:
        try:
            if data is None:
                raise CodecError("it is not here")
            return wire.reader(opened.codecs[leg], data, size, opened.vector.device)
        except CodecError as error:
            raise RefusedPart(sender, f"{what} is malformed: {error}") from None
