"""Pair exchanges on the device: the outer rule, fragments, payloads. What the core decides (`core/pairing`), done.

`execute` runs on the compute thread; `keep`, `forget`, `outgoing` and the questions are called on the event loop.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from starlings_compression.codec import Buffer, Codec, make_codec
from starlings_compression.errors import CodecError
from starlings_job.exchange_rules import ExchangeRules, Phase
from starlings_worker import wire
from starlings_worker.chunks import chunks
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    JudgePair,
    OuterStepTaken,
    PairCommitted,
    PairDeviceEffect,
    PairDeviceOutcome,
    PairEncoded,
    PairFailed,
    PairJudged,
    PairKey,
    TakeOuterStep,
)
from starlings_worker.errors import EngineFault
from starlings_worker.flat import FlatVector
from starlings_worker.optimizers.elementary import Optimizer
from starlings_worker.optimizers.quasi_global import QuasiGlobalOptimizer
from starlings_worker.outer.fragments import Bounds, cut_into_fragments
from starlings_worker.outer.noloco import NoLoCo
from starlings_worker.outer.outcome import Average, Refetch, Refuse, Verdict, explain
from starlings_worker.outer.pairs import Pairs
from starlings_worker.outer.palsgd import Palsgd
from starlings_worker.outer.state import FragmentState, Payload

WEIGHTS, MOMENTUM = "z", "m"
# Swaps that are over, whose late pieces of work are recognised.
FORGOTTEN_REMEMBERED = 256


def rule_of(rules: ExchangeRules) -> Pairs | NoLoCo:
    """The arithmetic of a preset that exchanges in pairs.

    Raises:
        EngineFault: another preset.
    """
    match rules.preset:
        case "pairs":
            return Pairs(rules)
        case "noloco":
            return NoLoCo(rules)
        case "palsgd":
            return Palsgd(rules)
        case "gossip":
            # With eta = 1 and mu = 0 nothing is left of the outer step, and a swap is an average.
            return Pairs(rules)
        case _:
            raise EngineFault(f'[exchange] preset = "{rules.preset}" does not exchange in pairs')


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor of a payload: a flat float32 vector in its codec."""

    name: str
    elements: int
    codec: str
    data: Buffer


@dataclass(slots=True)
class _Kept:
    """Of one swap."""

    own: tuple[Encoded, ...] = ()
    # One's own, decoded again: what the partner will see.
    own_decoded: Payload | None = None
    theirs: dict[str, Buffer] = field(default_factory=dict)
    theirs_decoded: Payload | None = None
    verdict: Verdict | None = None


def fragments_by_stage(vectors: Mapping[int, FlatVector], fragments: int) -> dict[int, tuple[Bounds, ...]]:
    """Where each stage's vector is cut.

    Raises:
        EngineFault: a stage has fewer rows than the job has fragments.
    """
    bounds = {}
    for stage, vector in vectors.items():
        try:
            bounds[stage] = cut_into_fragments(vector.slots, fragments)
        except ValueError as error:
            raise EngineFault(f"stage {stage}: {error}") from None
    return bounds


class PairDevice:
    """Of one held span."""

    def __init__(
        self, rules: ExchangeRules, vectors: Mapping[int, FlatVector], inner: Optimizer | None = None
    ) -> None:
        """
        Args:
            vectors: by stage, with the weights that training begins (or goes on) with.
            inner: the optimizer between exchanges, which may want to know of them.

        Raises:
            EngineFault: the preset does not exchange in pairs, or a stage has fewer rows than the job has fragments.
        """
        self._rule = rule_of(rules)
        self._rules = rules
        self._inner = inner if isinstance(inner, QuasiGlobalOptimizer) else None
        self._codecs: dict[str, Codec] = {WEIGHTS: make_codec(rules.codec)}
        if rules.momentum_codec is not None:
            self._codecs[MOMENTUM] = make_codec(rules.momentum_codec)
        self._vectors = dict(vectors)
        self._bounds = fragments_by_stage(vectors, rules.fragments)
        self._states: dict[tuple[int, int], FragmentState] = {}
        self._phases: dict[tuple[int, int], Phase] = {}
        self._kept: dict[PairKey, _Kept] = {}
        self._forgotten: OrderedDict[PairKey, None] = OrderedDict()
        self.restart()

    def restart(self) -> None:
        """The weights are new: displacements are measured from them, and no momentum is left."""
        # First, so that there is never memory for both.
        self._states.clear()
        if self._inner is not None:
            self._inner.restart()
        self._states = {
            (stage, fragment): FragmentState.starting_at(self._theta(stage, fragment))
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
        return 4 * len(self._codecs) * max(elements, default=0)

    def elements(self, stage: int, fragment: int) -> int:
        """Of a fragment; 0 when there is none of that number."""
        bounds = self._bounds.get(stage, ())
        if not 0 <= fragment < len(bounds):
            return 0
        begin, end = bounds[fragment]
        return end - begin

    def codec_text(self, name: str) -> str | None:
        """The codec in which the tensor of that name travels; None when it does not."""
        codec = self._codecs.get(name)
        return codec.spec.text if codec is not None else None

    def outgoing(self, key: PairKey) -> tuple[Encoded, ...]:
        """The own payload; empty when it is not here (any more)."""
        kept = self._kept.get(key)
        return kept.own if kept is not None else ()

    def keep(self, key: PairKey, tensors: Mapping[str, Buffer]) -> bool:
        """The partner's payload, whole and with the right digest. False when the swap is over: it is dropped."""
        if key in self._forgotten:
            return False
        self._kept.setdefault(key, _Kept()).theirs = dict(tensors)
        return True

    def forget(self, key: PairKey) -> None:
        self._forgotten[key] = None
        self._kept.pop(key, None)
        while len(self._forgotten) > FORGOTTEN_REMEMBERED:
            self._forgotten.popitem(last=False)

    # ---------------------------------------------------------------- work

    @contextmanager
    def averages(self, stages: Iterable[int]) -> Iterator[None]:
        """Within it the stages compute with their phi: what they had at their last averages, or outer steps.

        No graph may point to the weights meanwhile.
        """
        places = [place for place in self._states if place[0] in set(stages)]
        self._swap(places)
        try:
            yield
        finally:
            self._swap(places)

    @torch.no_grad()
    def _swap(self, places: Iterable[tuple[int, int]]) -> None:
        for place in places:
            theta, phi = self._theta(*place), self._states[place].phi
            for here in chunks(theta):
                kept = theta[here].clone()
                theta[here].copy_(phi[here])
                phi[here].copy_(kept)

    @torch.no_grad()
    def execute(self, effect: PairDeviceEffect) -> PairDeviceOutcome:
        match effect:
            case TakeOuterStep():
                return self._take_outer_step(effect)
            case EncodePair():
                return self._encode(effect.key)
            case JudgePair():
                return self._judge(effect)
            case CommitPair():
                return self._commit(effect)
            case _:
                assert_never(effect)

    def _take_outer_step(self, effect: TakeOuterStep) -> OuterStepTaken:
        place = (effect.stage, effect.fragment)
        state = self._states.get(place)
        if state is None:
            # Another cut than the job's: there is nothing to step on, and `_encode` will say so.
            return OuterStepTaken(effect.stage, effect.slot)
        warmup = self._rules.warmup
        phase = warmup if effect.warmup and warmup is not None else self._rules.main
        state.solo_rounds = effect.solo_rounds
        if self._inner is not None:
            self._inner.after_gossip(self._vectors[effect.stage])
        self._phases[place] = phase
        self._rule.at_slot(state, self._theta(*place), phase)
        if self._rules.reset_first_moment:
            forget_first_moment(self._vectors[effect.stage], self._bounds[effect.stage][effect.fragment])
        return OuterStepTaken(effect.stage, effect.slot)

    @torch.no_grad()
    def pull(self, stage: int, times: int, learning_rate: float) -> None:
        """palsgd: towards the last average of each of the stage's fragments.

        Args:
            learning_rate: of the optimizer's steps, which is the paper's rate divided by 1 - p.
        """
        if not isinstance(self._rule, Palsgd):
            return
        for _ in range(times):
            for (of_stage, fragment), state in self._states.items():
                if of_stage == stage:
                    rate = learning_rate / self._rule.gradient_factor
                    self._rule.pull(state, self._theta(stage, fragment), rate)

    def _encode(self, key: PairKey) -> PairEncoded | PairFailed:
        if key in self._forgotten:
            return PairFailed(key, "the swap was over before its payload was encoded")
        if (key.stage, key.fragment) not in self._phases:
            return PairFailed(key, f"stage {key.stage} has no fragment {key.fragment} that stepped")
        payload = self._payload(key)
        sizes = {WEIGHTS: payload.z, MOMENTUM: payload.m}
        try:
            own = tuple(
                Encoded(name, tensor.numel(), codec.spec.text, wire.encode(codec, tensor, f"the own {name}"))
                for name, codec in self._codecs.items()
                if (tensor := sizes[name]) is not None
            )
            decoded = self._decoded(key, {part.name: part.data for part in own})
        except CodecError as error:
            return PairFailed(key, str(error))
        kept = self._kept.setdefault(key, _Kept())
        kept.own, kept.own_decoded = own, decoded
        if key in self._forgotten:
            # Meanwhile, on the event loop.
            self._kept.pop(key, None)
        return PairEncoded(key, digest_of([part.data for part in own]))

    def _payload(self, key: PairKey) -> Payload:
        place = (key.stage, key.fragment)
        state = self._states[place]
        if isinstance(self._rule, Pairs):
            return self._rule.payload(state, self._phases[place])
        return Payload(state.need_outgoing())

    def _decoded(self, key: PairKey, tensors: Mapping[str, Buffer]) -> Payload:
        """Raises CodecError."""
        theta = self._theta(key.stage, key.fragment)
        found = {
            name: wire.decode(self._codecs[name], data, (theta.numel(),), theta.device)
            for name, data in tensors.items()
        }
        return Payload(found[WEIGHTS], found.get(MOMENTUM))

    def _judge(self, effect: JudgePair) -> PairJudged | PairFailed:
        key = effect.key
        kept = self._kept.get(key)
        if kept is None or kept.own_decoded is None or not kept.theirs:
            return PairFailed(key, "the swap was over before it was judged")
        try:
            theirs = kept.theirs_decoded = self._decoded(key, kept.theirs)
        except CodecError as error:
            return PairJudged(key, refused=f"its payload is malformed or not finite: {error}")
        state = self._states[key.stage, key.fragment]
        verdict = kept.verdict = self._rule.judge(state, kept.own_decoded, theirs, effect.partner)
        match verdict:
            case Average(distance):
                return PairJudged(key, distance)
            case Refuse(dropped):
                return PairJudged(key, refused=explain(dropped.reason))
            case Refetch(distance, usual, rounds):
                words = f"{distance:.3g} away after {rounds} rounds alone, usually {usual:.3g}"
                return PairJudged(key, distance, refused=words, too_far=True)
            case _:
                assert_never(verdict)

    def _commit(self, effect: CommitPair) -> PairCommitted | PairFailed:
        key = effect.key
        kept = self._kept.get(key)
        if kept is None or kept.own_decoded is None or kept.theirs_decoded is None:
            return PairFailed(key, "the swap was forgotten before it was committed")
        verdict = kept.verdict
        state, theta = self._states[key.stage, key.fragment], self._theta(key.stage, key.fragment)
        averaged = isinstance(verdict, Average) and self._rule.commit(
            state, theta, kept.own_decoded, kept.theirs_decoded, effect.weight, verdict
        )
        if not isinstance(verdict, Average) or not averaged:
            return PairFailed(key, "the rule averages nothing that it did not find plausible")
        return PairCommitted(key, 1.0, verdict.distance)


def digest_of(buffers: list[Buffer] | list[memoryview]) -> str:
    """SHA-256 of all buffers' bytes in their order, hex."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def forget_first_moment(vector: FlatVector, bounds: Bounds) -> None:
    """Of the elements within `bounds`: it points along the steps that an outer step has just replaced."""
    begin, end = bounds
    for piece in vector.stretches("exp_avg"):
        first, last = max(begin, piece.start), min(end, piece.stop)
        if first < last:
            moved = piece.state_start - piece.start
            vector.state["exp_avg"][first + moved : last + moved].zero_()
