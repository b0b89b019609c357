"""Exchanges in groups on the device: displacements, aggregates, outer steps. What `core/groups` decides, done.

`execute` runs on the compute thread; `keep`, `forget`, `outgoing` and the questions are called on the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from starlings_compression.codec import Buffer, make_codec
from starlings_compression.errors import CodecError
from starlings_compression.spec import parse_spec
from starlings_job.codecs import may_return, return_spec
from starlings_job.exchange_rules import ExchangeRules, Phase
from starlings_protos.group_messages import GroupDropped, GroupHeader, GroupLeg, GroupSeat
from starlings_protos.messages import WorkerId
from starlings_worker import wire
from starlings_worker.core.groups.work import (
    AdoptAnchor,
    AnchorAdopted,
    AnchorEncoded,
    AnchorsDigested,
    Applied,
    Apply,
    DigestAnchors,
    Displace,
    Displaced,
    EncodeAnchor,
    GroupKey,
    GroupResult,
    GroupTask,
    GroupWork,
    GroupWorked,
    Judge,
    Judged,
    Reduce,
    Reduced,
    TaskFailed,
)
from starlings_worker.errors import EngineFault
from starlings_worker.flat import FlatVector
from starlings_worker.outer.diloco import DiLoCo
from starlings_worker.outer.fragments import Bounds
from starlings_worker.outer.outcome import explain
from starlings_worker.outer.sparseloco import SparseLoCo
from starlings_worker.outer.state import FragmentState, norm_of
from starlings_worker.pair_device import Encoded, digest_of, forget_first_moment, fragments_by_stage
from starlings_worker.parts import cut
from starlings_worker.robust import NORM_FACTOR, Contribution, aggregate

PART, PHI, MOMENTUM = "part", "phi", "m"
EXACT = "exact"
# Contributions whose median says what is usual.
MAJORITY = 3
# Rounds that are over, whose late pieces of work are recognised.
FORGOTTEN_REMEMBERED = 64


def rule_of(rules: ExchangeRules) -> DiLoCo | SparseLoCo:
    """The arithmetic of a preset that exchanges in groups, every H steps.

    Raises:
        EngineFault: another preset.
    """
    match rules.preset:
        case "diloco":
            return DiLoCo(rules)
        case "sparseloco":
            return SparseLoCo(rules)
        case _:
            raise EngineFault(f'[exchange] preset = "{rules.preset}" does not exchange in groups')


@dataclass(slots=True)
class _Kept:
    """Of one round."""

    # Bounds of the parts inside the fragment, by seat.
    parts: tuple[Bounds, ...] = ()
    me: int = 0
    phase: Phase | None = None
    # The own displacement by parts, encoded; and what that decodes to, whole.
    own: list[Buffer] = field(default_factory=list)
    own_decoded: Tensor | None = None
    # By sender: their contributions to the own part.
    contributions: dict[str, Buffer] = field(default_factory=dict)
    # By part: encoded, and in which codec.
    aggregates: dict[int, tuple[Buffer, str]] = field(default_factory=dict)
    anchor: tuple[Encoded, ...] = ()
    arrived_anchor: dict[str, Buffer] = field(default_factory=dict)


class GroupDevice:
    """Of one held span."""

    def __init__(self, rules: ExchangeRules, vectors: Mapping[int, FlatVector]) -> None:
        """`vectors`: by stage, with the weights that training begins (or goes on) with.

        Raises:
            EngineFault: the preset does not exchange in groups, or a stage has fewer rows than the job has fragments.
        """
        self._rule = rule_of(rules)
        self._rules = rules
        self._spec = parse_spec(rules.codec)
        self._codec = make_codec(rules.codec)
        self._exact = make_codec(EXACT)
        self._vectors = dict(vectors)
        self._bounds = fragments_by_stage(vectors, rules.fragments)
        self._states: dict[tuple[int, int], FragmentState] = {}
        # By place and part: the largest norm per root of elements that an aggregate had. What is much longer is wrong.
        self._usual: dict[tuple[int, int], float] = {}
        self._kept: dict[GroupKey, _Kept] = {}
        self._forgotten: OrderedDict[GroupKey, None] = OrderedDict()
        self.restart()

    def restart(self) -> None:
        """The weights are new: displacements are measured from them, and neither momentum nor residual is left."""
        # First, so that there is never memory for both.
        self._states.clear()
        self._usual.clear()
        momentum = isinstance(self._rule, DiLoCo)
        self._states = {
            (stage, fragment): FragmentState.starting_at(self._theta(stage, fragment), momentum=momentum)
            for stage, bounds in self._bounds.items()
            for fragment in range(len(bounds))
        }

    def _theta(self, stage: int, fragment: int) -> Tensor:
        begin, end = self._bounds[stage][fragment]
        return self._vectors[stage].parameters[begin:end]

    # ---------------------------------------------------------------- questions of the data plane

    def holds(self, stage: int) -> bool:
        return stage in self._bounds

    @property
    def largest_bytes(self) -> int:
        """Of any payload, decoded."""
        elements = (end - begin for bounds in self._bounds.values() for begin, end in bounds)
        return 8 * max(elements, default=0)

    def elements(self, stage: int, fragment: int) -> int:
        """Of a fragment; 0 when there is none of that number."""
        bounds = self._bounds.get(stage, ())
        return bounds[fragment][1] - bounds[fragment][0] if 0 <= fragment < len(bounds) else 0

    def takes(self, leg: GroupLeg, codec: str) -> bool:
        """Whether something of that leg may travel in that codec."""
        match leg:
            case GroupLeg.CONTRIBUTION:
                return codec == self._spec.text
            case GroupLeg.AGGREGATE:
                return may_return(codec, self._spec)
            case _:
                return codec == EXACT

    def anchor_tensors(self) -> list[str]:
        return [PHI, MOMENTUM] if isinstance(self._rule, DiLoCo) else [PHI]

    def outgoing(self, header: GroupHeader) -> tuple[Encoded, ...]:
        """What is kept under a header that this worker sends; empty when it is not here (any more)."""
        kept = self._kept.get(GroupKey.of(header))
        if kept is None:
            return ()
        match header.leg:
            case GroupLeg.CONTRIBUTION if header.part < len(kept.own):
                begin, end = kept.parts[header.part]
                return (Encoded(PART, end - begin, self._spec.text, kept.own[header.part]),)
            case GroupLeg.AGGREGATE if header.part in kept.aggregates:
                begin, end = kept.parts[header.part]
                data, codec = kept.aggregates[header.part]
                return (Encoded(PART, end - begin, codec, data),)
            case GroupLeg.ANCHOR:
                return kept.anchor
            case _:
                return ()

    def keep(self, header: GroupHeader, sender: str, tensors: Mapping[str, tuple[Buffer, str]]) -> bool:
        """What came, whole and with the right digest: bytes and codec by name. False when the round is over."""
        key = GroupKey.of(header)
        if key in self._forgotten:
            return False
        kept = self._kept.setdefault(key, _Kept())
        match header.leg:
            case GroupLeg.CONTRIBUTION:
                kept.contributions[sender] = tensors[PART][0]
            case GroupLeg.AGGREGATE:
                kept.aggregates[header.part] = tensors[PART]
            case _:
                kept.arrived_anchor = {name: data for name, (data, _) in tensors.items()}
        return True

    def forget(self, key: GroupKey) -> None:
        self._forgotten[key] = None
        self._kept.pop(key, None)
        while len(self._forgotten) > FORGOTTEN_REMEMBERED:
            self._forgotten.popitem(last=False)

    # ---------------------------------------------------------------- work

    @torch.no_grad()
    def execute(self, effect: GroupWork) -> GroupWorked:
        task = effect.task
        try:
            result = self._execute(task)
        except CodecError as error:
            result = TaskFailed(str(error))
        return GroupWorked(task, result)

    def _execute(self, task: GroupTask) -> GroupResult:
        match task:
            case DigestAnchors(stage):
                fragments = range(len(self._bounds.get(stage, ())))
                return AnchorsDigested(tuple(self._anchor(stage, fragment) for fragment in fragments))
            case Displace():
                return self._displace(task)
            case Reduce():
                return self._reduce(task)
            case Judge():
                return self._judge(task)
            case Apply():
                return self._apply(task)
            case EncodeAnchor(key):
                return self._encode_anchor(key)
            case AdoptAnchor(key):
                return self._adopt(key)
            case _:
                assert_never(task)

    def _anchor(self, stage: int, fragment: int) -> str:
        """A digest of where displacements are measured from, and of the momentum: equal on all that took the same
        rounds, since every operation of an outer step is rounded by itself, on whatever machine.
        """
        state = self._states[stage, fragment]
        return digest_of([_bytes(state.phi), _bytes(state.momentum)])

    def _displace(self, task: Displace) -> GroupResult:
        key = task.key
        state = self._states.get((key.stage, key.fragment))
        if key in self._forgotten or state is None:
            return TaskFailed("the round was over before it began, or is about no fragment of this job")
        phase = self._rules.warmup if task.warmup and self._rules.warmup is not None else self._rules.main
        outgoing = self._rule.at_slot(state, self._theta(key.stage, key.fragment), phase).z
        if state.residual is None:
            state.residual = torch.zeros_like(state.phi)
        elif isinstance(self._rule, DiLoCo) and self._rules.feedback_decay:
            # SparseLoCo's `at_slot` has done so by itself.
            outgoing.add_(state.residual, alpha=self._rules.feedback_decay)
        kept = self._kept.setdefault(key, _Kept())
        kept.parts, kept.me, kept.phase = cut(outgoing.numel(), _shares(task.seats)), task.me, phase
        kept.own_decoded = torch.empty_like(outgoing)
        digests = []
        for begin, end in kept.parts:
            data: Buffer = b""
            if end > begin:
                data = wire.encode(self._codec, outgoing[begin:end], "the own displacement")
                wire.decode_into(self._codec, data, kept.own_decoded[begin:end])
            kept.own.append(data)
            digests.append(digest_of([data]) if end > begin else "")
        if key in self._forgotten:
            # Meanwhile, on the event loop.
            self._kept.pop(key, None)
        return Displaced(tuple(digests))

    def _reduce(self, task: Reduce) -> GroupResult:
        kept = self._kept.get(task.key)
        if kept is None or kept.own_decoded is None:
            return TaskFailed("the round was over before it was reduced")
        begin, end = kept.parts[task.me]
        contributions, dropped = [], []
        for place in task.members:
            seat = task.seats[place]
            if place == task.me:
                vector = kept.own_decoded[begin:end]
            else:
                try:
                    data = kept.contributions.get(seat.worker_id, b"")
                    vector = wire.decode(self._codec, data, (end - begin,), kept.own_decoded.device)
                except CodecError as error:
                    dropped.append(GroupDropped(seat.worker_id, f"malformed or not finite: {error}"[:200]))
                    continue
            contributions.append(Contribution(seat.worker_id, vector, seat.weight))
        found = aggregate(
            contributions,
            self._rules.robust,
            reference_norm=self._reference(task.key, kept, task.me, [c.vector for c in contributions]),
        )
        dropped += [GroupDropped(WorkerId(d.member), explain(d.reason)[:200]) for d in found.dropped]
        if found.vector is None:
            return TaskFailed("no contribution is left to aggregate")
        spec = return_spec(self._spec, len(task.members))
        data = wire.encode(make_codec(spec.text), found.vector, "the aggregate")
        kept.aggregates[task.me] = (data, spec.text)
        return Reduced(digest_of([data]), tuple(dropped))

    def _reference(self, key: GroupKey, kept: _Kept, part: int, vectors: list[Tensor]) -> float:
        """What a norm is held against: the group's median, or what was usual before, whichever is larger, since
        replicas that have just come have hardly moved. Two are no majority, and then one's own counts as well.
        """
        begin, end = kept.parts[part]
        assert kept.own_decoded is not None
        norms = sorted(norm for vector in vectors if 0 < (norm := norm_of(vector)) < float("inf"))
        median: float = norms[(len(norms) - 1) // 2] if norms else 0.0
        usual = self._usual.get((key.stage, key.fragment), 0.0) * (end - begin) ** 0.5
        own = norm_of(kept.own_decoded[begin:end]) if len(norms) < MAJORITY else 0.0
        return float(max(median, own, usual))

    def _judge(self, task: Judge) -> GroupResult:
        key, kept = task.key, self._kept.get(task.key)
        if kept is None or kept.own_decoded is None or task.part not in kept.aggregates:
            return TaskFailed("the round was over before its aggregate was judged")
        norm = norm_of(self._decoded(kept, task.part))
        limit = NORM_FACTOR * self._reference(key, kept, task.part, [])
        if not norm <= limit and limit > 0:
            return Judged(f"a norm of {norm:.3g}, where {limit:.3g} is the most that is plausible")
        return Judged()

    def _decoded(self, kept: _Kept, part: int) -> Tensor:
        """Raises CodecError."""
        begin, end = kept.parts[part]
        data, codec = kept.aggregates[part]
        assert kept.own_decoded is not None
        return wire.decode(make_codec(codec), data, (end - begin,), kept.own_decoded.device)

    def _apply(self, task: Apply) -> GroupResult:
        key, kept = task.key, self._kept.get(task.key)
        if kept is None or kept.own_decoded is None or kept.phase is None:
            return TaskFailed("the round was forgotten before it was applied")
        # All before any: an aggregate that does not decode changes nothing.
        aggregates = {part: self._decoded(kept, part) for part in task.parts}
        place = (key.stage, key.fragment)
        state, theta = self._states[place], self._theta(*place)
        applied, squares = 0, 0.0
        for part, vector in aggregates.items():
            begin, end = kept.parts[part]
            here = slice(begin, end)
            self._outer_step(
                _part_of(state, here), theta[here], kept.own_decoded[here], vector, kept.phase, task
            )
            norm = norm_of(vector)
            self._usual[place] = max(0.9 * self._usual.get(place, 0.0), norm / max(1, end - begin) ** 0.5)
            applied += end - begin
            squares += norm * norm
        if self._rules.reset_first_moment:
            forget_first_moment(self._vectors[key.stage], self._bounds[key.stage][key.fragment])
        return Applied(self._anchor(*place), applied / max(1, state.size), squares**0.5)

    def _outer_step(
        self, state: FragmentState, theta: Tensor, own: Tensor, mean: Tensor, phase: Phase, task: Apply
    ) -> None:
        """On views of one part."""
        if isinstance(self._rule, SparseLoCo):
            self._rule.commit(state, theta, own, mean, phase, overlapped=task.overlapped)
            return
        if self._rules.feedback_decay:
            assert state.outgoing is not None
            assert state.residual is not None
            torch.sub(state.outgoing, own, out=state.residual)
        self._rule.commit(state, theta, mean, phase, overlapped=task.overlapped)

    # ---------------------------------------------------------------- anchors

    def _encode_anchor(self, key: GroupKey) -> GroupResult:
        state = self._states.get((key.stage, key.fragment))
        kept = self._kept.get(key)
        if state is None or kept is None:
            return TaskFailed("the round was over before its anchor was encoded")
        tensors = {PHI: state.phi, MOMENTUM: state.momentum}
        kept.anchor = tuple(
            Encoded(name, tensors[name].numel(), EXACT, wire.encode(self._exact, tensors[name], name))
            for name in self.anchor_tensors()
        )
        return AnchorEncoded(digest_of([part.data for part in kept.anchor]))

    def _adopt(self, key: GroupKey) -> GroupResult:
        state = self._states.get((key.stage, key.fragment))
        kept = self._kept.get(key)
        if state is None or kept is None or not kept.arrived_anchor:
            return TaskFailed("the round was over before its anchor was taken")
        theta = self._theta(key.stage, key.fragment)
        found = {
            name: wire.decode(self._exact, data, (state.size,), theta.device)
            for name, data in kept.arrived_anchor.items()
        }
        state.phi.copy_(found[PHI])
        if MOMENTUM in found:
            state.momentum.copy_(found[MOMENTUM])
        theta.copy_(state.phi)
        state.residual = None
        return AnchorAdopted(self._anchor(key.stage, key.fragment))


def _shares(seats: tuple[GroupSeat, ...]) -> list[float]:
    return [seat.share for seat in seats]


def _part_of(state: FragmentState, here: slice) -> FragmentState:
    """Views: what a rule does to them, it does to the whole."""
    momentum = state.momentum[here] if state.momentum.numel() else state.momentum
    outgoing = state.outgoing[here] if state.outgoing is not None else None
    residual = state.residual[here] if state.residual is not None else None
    return FragmentState(state.phi[here], momentum, outgoing, residual)


def _bytes(vector: Tensor) -> memoryview:
    return memoryview(vector.detach().contiguous().cpu().numpy().view("uint8"))  # type: ignore[arg-type]
