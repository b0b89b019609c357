"""What a device computes, as symbols: gradients are multisets of microbatches, weights are hashes of what was
committed.

A gradient accumulator of a stage is a Counter of tags (step, attempt, index). A group's vector is cut into
one piece per member; each piece carries the same tags, so that an aggregate which mixes attempts, misses a
part or counts one twice is seen in some piece. In a second pass the tags say beside which first sum they stand:
all members must have come to the same, and the second sum must be of what the first was of. A block's state is a
string: equal strings are equal weights, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlings_protos.messages import (
    ExchangeGroup,
    ExchangePurpose,
    Hop,
    LeaseKind,
    MicrobatchKey,
    Span,
    Stage,
    WorkerId,
)

# (which end of the model, for the tied group only; step, attempt, index)
Tag = tuple[str, int, int, int]
# The states of a stage's blocks, as a STATE exchange carries them.
States = tuple[tuple[int, str], ...]
# What one part of a vector holds: tags with their summed weights, or states with theirs.
Piece = tuple[tuple[Tag | States, float], ...]
# What a gradient is made of: (end, index of the microbatch, weight), sorted.
Gradient = tuple[tuple[str, int, float], ...]


class Inconsistent(AssertionError):
    """The symbols do not add up: something was computed from the wrong inputs, or twice, or not at all."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Inconsistent(message)


def fingerprint(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Activation:
    """A boundary tensor: which stages it went through, with which version of the weights."""

    key: MicrobatchKey
    stages: int
    versions: tuple[int, ...]
    samples: tuple[int, ...] = ()


@dataclass(slots=True)
class Tensors:
    """What a shell keeps under a microbatch's key."""

    # The records.
    samples: tuple[int, ...] = ()
    entry: Activation | None = None
    output: Activation | None = None
    graph: bool = False
    gradient_in: str | None = None
    gradient_out: str | None = None

    @property
    def stages(self) -> tuple[int, int]:
        """First and last stage of the forward pass that was computed on them."""
        assert self.output is not None
        return (self.entry.stages if self.entry is not None else 0), self.output.stages - 1


@dataclass(slots=True)
class Pass:
    """What goes round in one pass."""

    own: Piece
    contributions: dict[WorkerId, Piece] = field(default_factory=dict)
    aggregates: dict[int, Piece] = field(default_factory=dict)


@dataclass(slots=True)
class Vector:
    """A group's flat vector in exchange form. Passes that are over are kept: others may still need what is in them."""

    group: ExchangeGroup
    purpose: ExchangePurpose
    position: int
    passes: list[Pass]
    # How many there are to be.
    passes_wanted: int = 1
    assembled: Piece | None = None


def whole_gradient(count: int) -> Gradient:
    """Each of a step's microbatches once."""
    return tuple(("", index, 1.0) for index in range(count))


def gradient_of(piece: Piece) -> Gradient:
    """A gradient's content without the attempt in which it was computed: the samples decide what it is."""
    content: dict[tuple[str, int], float] = {}
    for tag, weight in piece:
        end, index = str(tag[0]), tag[3]
        assert isinstance(index, int)
        content[end, index] = content.get((end, index), 0.0) + weight
    return tuple((end, index, weight) for (end, index), weight in sorted(content.items()))


def squared_norm(step: int, blocks: Iterable[int], *, tied: bool) -> float:
    """Of the gradient of some blocks: whole numbers, so that every cut into stages has the same sum."""
    return float(sum(1 + (7 * block + 3 * step) % 5 for block in blocks) + tied)


def next_state(state: str, gradient: Gradient, rate: float, clip: float, numeric_class: str) -> str:
    """A block after an optimizer step."""
    return fingerprint(state, gradient, rate, clip, numeric_class)


def merge(pieces: list[tuple[Piece, float]]) -> Piece:
    """Weighted sum, in the order given."""
    total: dict[Tag | States, float] = {}
    for piece, weight in pieces:
        for tag, amount in piece:
            total[tag] = total.get(tag, 0.0) + weight * amount
    return tuple(sorted(total.items(), key=lambda item: repr(item[0])))


def beside(piece: Piece, first_sum: Piece) -> Piece:
    """What a member contributes to a second pass, after the first came to `first_sum`."""
    mark = "@" + fingerprint(first_sum)
    return tuple(((f"{tag[0]}{mark}", *tag[1:]), weight) for tag, weight in piece)


@dataclass(slots=True)
class Device:
    """One engine's span. `states[block]`; `gradients[stage]`; `vectors[group]` of the present round."""

    stages: tuple[Stage, ...]
    span: Span
    version: int
    states: dict[int, str]
    numeric_class: str = ""
    # Set where the first state came from replicas of another numeric class: then it need not equal its own class's.
    lineage: str = ""
    # Under which it was loaded.
    plan_version: int = 0
    # In which gradients are summed up.
    passes: int = 1
    gradients: dict[int, Counter[Tag]] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)

    # ------------------------------------------------------------------ microbatches

    def forward(self, tensors: Tensors, key: MicrobatchKey, first: int, last: int) -> None:
        if first == 0:
            entry = Activation(key, 0, (), tensors.samples)
        else:
            require(tensors.entry is not None, f"{key}: no input for stage {first}")
            assert tensors.entry is not None
            entry = tensors.entry
        require(entry.key == key, f"{key}: input of {entry.key}")
        require(entry.stages == first, f"{key}: input after {entry.stages} stages for stage {first}")
        require(first in self.span and last in self.span, f"{key}: stages {first}-{last} are not held")
        versions = (*entry.versions, *[self.version] * (last - first + 1))
        require(len(set(versions)) == 1, f"{key}: stages of different versions {versions}")
        if key.kind is LeaseKind.TRAIN:
            require(self.version == key.step, f"{key}: computed with version {self.version}")
            tensors.graph = True
        tensors.output = Activation(key, last + 1, versions, entry.samples)

    def backward(self, tensors: Tensors, key: MicrobatchKey, first: int, last: int) -> None:
        require(tensors.graph, f"{key}: backward without a graph")
        if last != len(self.stages) - 1:
            require(
                tensors.gradient_in == f"gradient {key} at {last}", f"{key}: {tensors.gradient_in} at {last}"
            )
        tensors.graph = False
        tensors.gradient_out = f"gradient {key} at {first - 1}"
        for stage in range(first, last + 1):
            self.gradients.setdefault(stage, Counter())["", key.step, key.attempt, key.index] += 1

    def clear(self) -> None:
        self.gradients.clear()
        self.vectors.clear()

    # ------------------------------------------------------------------ exchange

    def open(self, group: ExchangeGroup, purpose: ExchangePurpose, position: int) -> None:
        own: Piece
        if purpose is ExchangePurpose.STATE and group.group == "tied":
            own = ()  # The states of both ends speak for their copies.
        elif purpose is ExchangePurpose.STATE:
            stage = self.stages[int(group.group.partition(":")[2])]
            own = ((tuple((block, self.states[block]) for block in stage.blocks), 1.0),)
        elif group.group == "tied":
            ends = ((0, "first"), (len(self.stages) - 1, "last"))
            own = merge([(self._gradient(stage, end), 1.0) for stage, end in ends if stage in self.span])
        else:
            own = merge([(self._gradient(int(group.group.partition(":")[2]), ""), 1.0)])
        passes = self.passes if purpose is ExchangePurpose.GRADIENT else 1
        self.vectors[group.group] = Vector(group, purpose, position, [Pass(own)], passes)

    def _gradient(self, stage: int, end: str) -> Piece:
        tags = self.gradients.get(stage, Counter[Tag]())
        return tuple(((end, *tag[1:]), float(count)) for tag, count in tags.items())

    def arrived(self, name: str, pass_number: int) -> Pass:
        """Where parts of a pass belong."""
        vector = self.vectors[name]
        require(pass_number == len(vector.passes) - 1, f"{name}: pass {pass_number} is not the present one")
        return vector.passes[pass_number]

    def reduce(self, name: str, pass_number: int = 0) -> Piece:
        """The sum over the group's contributors for this worker's own part."""
        vector, present = self.vectors[name], self.arrived(name, pass_number)
        pieces: list[tuple[Piece, float]] = []
        for index, member in enumerate(vector.group.members):
            if member.weight <= 0.0:
                continue
            if index == vector.position:
                pieces.append((present.own, member.weight))
            else:
                require(
                    member.worker_id in present.contributions, f"{name}: reduced without {member.worker_id}"
                )
                pieces.append((present.contributions[member.worker_id], member.weight))
        present.aggregates[vector.position] = merge(pieces)
        return present.aggregates[vector.position]

    def assemble(self, name: str, pass_number: int = 0) -> Piece | None:
        """What came of the last pass; None when the next one begins."""
        vector, present = self.vectors[name], self.arrived(name, pass_number)
        if len(vector.group.members) == 1:
            vector.assembled = present.own
            return present.own
        wanted = [index for index, member in enumerate(vector.group.members) if member.share > 0.0]
        missing = [index for index in wanted if index not in present.aggregates]
        require(not missing, f"{name}: assembled without parts {missing}")
        pieces = {present.aggregates[index] for index in wanted}
        require(len(pieces) == 1, f"{name}: the parts are sums of different contributions")
        (piece,) = pieces
        first = vector.passes[0]
        if pass_number + 1 < vector.passes_wanted:
            vector.passes.append(Pass(beside(first.own, piece)))
            return None
        if pass_number:
            (summed,) = {first.aggregates[index] for index in wanted}
            require(piece == beside(summed, summed), f"{name}: {piece} does not belong to {summed}")
            piece = summed
        vector.assembled = piece
        return piece

    def squared_norm(self, name: str, step: int) -> float:
        if name == "tied":
            return squared_norm(step, (), tied=True)
        return squared_norm(step, self.stages[int(name.partition(":")[2])].blocks, tied=False)

    def attempts(self) -> set[int]:
        """In which attempts the assembled gradients were computed."""
        assembled = [vector.assembled or () for vector in self.vectors.values()]
        return {attempt for piece in assembled for tag, _ in piece if isinstance(attempt := tag[2], int)}

    def exactly_once(self, step: int, attempt: int, count: int) -> None:
        """Every stage's assembled gradient holds each of the step's microbatches once, and nothing else."""
        wanted = {("", step, attempt, index): 1.0 for index in range(count)}
        for stage in self.span.stages:
            vector = self.vectors.get(f"stage:{stage}")
            require(
                vector is not None and vector.assembled is not None,
                f"step {step}: stage {stage} has no aggregate",
            )
            assert vector is not None
            assert vector.assembled is not None
            have = dict(vector.assembled)
            require(
                have == wanted, f"step {step} attempt {attempt}: stage {stage} holds {have}, not {wanted}"
            )
        tied = self.vectors.get("tied")
        if tied is not None and tied.assembled is not None:
            both = {(end, *tag[1:]): 1.0 for end in ("first", "last") for tag in wanted}
            require(dict(tied.assembled) == both, f"step {step}: the tied gradient holds {tied.assembled}")

    # ------------------------------------------------------------------ state

    def aggregates(self) -> dict[str, Piece]:
        """What each group of this worker exchanged in the step that is being applied."""
        return {name: v.assembled for name, v in self.vectors.items() if v.assembled is not None}

    def apply(self, step: int, rate: float, clip: float) -> None:
        require(self.version == step, f"step {step} applied to version {self.version}")
        for stage in self.span.stages:
            vector = self.vectors[f"stage:{stage}"]
            assert vector.assembled is not None
            gradient = gradient_of(vector.assembled)
            for block in self.stages[stage].blocks:
                self.states[block] = next_state(self.states[block], gradient, rate, clip, self.numeric_class)
        self.version = step + 1
        self.clear()

    def groups(self) -> list[str]:
        """The stages' groups: what a replay needs."""
        return [f"stage:{stage}" for stage in self.span.stages]

    def replay(self, step: int, pieces: dict[str, Piece], rate: float, clip: float) -> None:
        """Another worker's aggregates, applied as one's own would be."""
        for name, piece in pieces.items():
            group = ExchangeGroup(name, ())
            self.vectors[name] = Vector(group, ExchangePurpose.GRADIENT, 0, [], assembled=piece)
        self.apply(step, rate, clip)

    def adopt(self) -> None:
        """The weighted mean of equal states is that state; of different ones it is a new state, the same for
        all.
        """
        for name, vector in self.vectors.items():
            if name == "tied":
                continue
            assert vector.assembled is not None
            kinds = [dict(states) for states, _ in vector.assembled if not isinstance(states[0], str)]
            for block in self.stages[int(vector.group.group.partition(":")[2])].blocks:
                same = len(kinds) == 1
                self.states[block] = kinds[0][block] if same else fingerprint("mean", vector.assembled, block)
        self.vectors.clear()

    def digests(self, names: tuple[str, ...]) -> dict[str, str]:
        return {names[block]: state for block, state in sorted(self.states.items())}


def whole_route(route: tuple[Hop, ...], stage_count: int) -> bool:
    """Whether a route passes every stage once."""
    expected = 0
    for hop in route:
        if hop.first_stage != expected:
            return False
        expected = hop.last_stage + 1
    return expected == stage_count
