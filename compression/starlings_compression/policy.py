"""Which codec suits which role: what travels at a place, what error feedback goes with it, what is refused.

Standard library only: jobs are checked where torch is not installed.

| role | what travels | may drop | error feedback |
| --- | --- | --- | --- |
| boundary | activations forward, their gradients backward | a little: nothing returns later what was dropped | never |
| gradient | sums of weights' gradients, every step | much | yes |
| delta | differences of weights after several steps | much | yes |
| state | weights and optimizer state | next to nothing | never |
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlings_compression.errors import SpecError
from starlings_compression.families import Element
from starlings_compression.spec import CodecSpec, parse_spec

# Below this, headers and scales outweigh what a lossy codec saves, and norms and biases, which are what is this
# small, are worth their bits.
SMALL_TENSOR_ELEMENTS = 1024
# int4 at each of more boundaries than this adds up to noise that training does not get over (AQ-SGD, section 4).
LOW_BIT_BOUNDARIES = 4
EXACT_SPEC = CodecSpec()
# Value formats of less than eight bits.
_LOW_BITS = ("int4", "int2", "sign")


class Role(enum.Enum):
    """What a tensor is, which decides what a codec may do to it."""

    BOUNDARY = "boundary"
    GRADIENT = "gradient"
    DELTA = "delta"
    STATE = "state"

    @property
    def feeds_back(self) -> bool:
        """Whether dropped parts are added to the next tensor: only where tensors of one place are summed up."""
        return self in (Role.GRADIENT, Role.DELTA)


@dataclass(frozen=True, slots=True)
class Policy:
    """How the tensors of one role travel."""

    role: Role
    spec: CodecSpec
    # For gradients of activations, on their way back; as `spec` in the other roles.
    backward_spec: CodecSpec
    # e' = decay e + x - q; None: no error feedback.
    feedback_decay: float | None
    small_tensor_elements: int

    def spec_for(self, shape: Sequence[int], *, backward: bool = False) -> CodecSpec:
        """The spec by which a floating-point tensor of `shape` travels: exactly when it is small."""
        if math.prod(shape) < self.small_tensor_elements:
            return EXACT_SPEC
        return self.backward_spec if backward else self.spec


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a codec should not be used at a place."""

    spec: CodecSpec
    role: Role
    reason: str

    def __str__(self) -> str:
        return f"codec {self.spec} as {self.role.value} codec: {self.reason}"


def policy_for(
    role: Role,
    spec: str | CodecSpec,
    *,
    decay: float = 1.0,
    small_tensor_elements: int = SMALL_TENSOR_ELEMENTS,
) -> Policy:
    """The policy of `role` for a codec; `decay` is that of error feedback, where the role has any.

    Raises:
        SpecError: there is no such codec.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    feeds_back = role.feeds_back and not spec.lossless
    return Policy(
        role,
        spec,
        _backward(spec) if role is Role.BOUNDARY else spec,
        decay if feeds_back else None,
        small_tensor_elements,
    )


def _backward(spec: CodecSpec) -> CodecSpec:
    """Gradients of activations spread over more magnitudes: `fp8` goes back as e5m2 (Micikevicius 2022)."""
    values = spec.values
    return replace(spec, values=Element("fp8-e5m2", values.arguments)) if values.name == "fp8" else spec


def objection_to(spec: str | CodecSpec, role: Role, *, boundaries: int = 1) -> Objection | None:
    """What is known to hurt, or None. Meant for a job's settings; an owner who insists may overrule it.

    Args:
        boundaries: how many stage boundaries a sample passes (stages - 1), for the boundary role.

    Raises:
        SpecError: there is no such codec.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    reason = _hurts(spec, role, boundaries)
    return Objection(spec, role, reason) if reason else None


def _hurts(spec: CodecSpec, role: Role, boundaries: int) -> str:
    values = spec.values.name
    match role:
        case Role.BOUNDARY:
            if spec.reducer is not None:
                return (
                    f"{spec.reducer.name} drops whole parts of activations, and nothing brings them back; "
                    "use int8:128, fp8 or bf16"
                )
            if values in ("int2", "sign"):
                return f"{values} leaves too little of an activation; use int8:128, fp8 or bf16"
            if values in _LOW_BITS and boundaries > LOW_BIT_BOUNDARIES:
                return (
                    f"{values} on {boundaries} stage boundaries adds up to too much noise (at most "
                    f"{LOW_BIT_BOUNDARIES}); use int8:128"
                )
        case Role.STATE:
            if spec.reducer is not None or values in (*_LOW_BITS, "fp8", "fp8-e5m2"):
                return "state that loses this much is not the state that was trained; use exact, fp16 or int8:128"
        case Role.GRADIENT | Role.DELTA:
            if values in ("fp8", "fp8-e5m2"):
                return "fp8 takes as many bytes as int8:128 and keeps less of a block; use int8:128"
    return ""


def checked(spec: str | CodecSpec, role: Role, *, boundaries: int = 1, force: bool = False) -> CodecSpec:
    """The spec, unless it is known to hurt at that place and `force` is not set.

    Raises:
        SpecError: there is no such codec, or it is refused; the message says what to use instead.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    objection = None if force else objection_to(spec, role, boundaries=boundaries)
    if objection is not None:
        raise SpecError(f"{objection}; or set force = true")
    return spec
