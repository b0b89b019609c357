"""Which codec travels where in a job: what is refused, how aggregates come back, how many bytes it all takes.

The vector of a group is exchanged in two legs. *Contributions* go to the owner of a part in the job's codec; the
*aggregate* comes back in `return_spec`, because a sum is not what its summands were: that of sparse vectors has their
places together, and nobody but its owner could feed back what a coarse codec drops of it, a step later. Every member
decodes the same bytes, on whatever machine, so the return leg takes codecs whose decoding is exact. `lowrank` sums up
factors instead, in two passes, exactly both ways. Torch-free.
"""

from __future__ import annotations

from math import prod

from starlings_compression.errors import SpecError
from starlings_compression.families import Element
from starlings_compression.policy import LOW_BIT_BOUNDARIES, Role, checked, objection_to, policy_for
from starlings_compression.sizes import size_estimate
from starlings_compression.spec import CodecSpec, parse_spec

# Sums come back in at least this much.
RETURN_SPEC = parse_spec("int8:128")
_COARSE = ("int4", "int2", "sign")
# Reducers that keep some values at their places: a sum of such vectors has values at few places too.
_SPARSE = ("topk", "randk")
# Large enough for a codec's header not to matter.
_TYPICAL_ELEMENTS = 1 << 20


def check_codec(text: str, role: Role, *, force: bool = False) -> str:
    """The spec's text, if it may stand in a job at that place.

    Raises:
        SpecError: it is known to hurt there and `force` is not set; or the job could not use it, forced or not.
    """
    spec = parse_spec(text)
    rank = linear_rank(spec) if role is Role.GRADIENT else None
    if rank is not None and len(spec.elements) > 1:
        raise SpecError(
            f"codec {spec}: the factors of lowrank are summed up exactly, or replicas would differ; use "
            f"lowrank:{rank}"
        )
    plain_bytes = 4 * _TYPICAL_ELEMENTS
    if (
        not spec.raw
        and size_estimate(spec.without_squeezer, (_TYPICAL_ELEMENTS,)).most_bytes > plain_bytes + 1024
    ):
        raise SpecError(f"codec {spec} makes more bytes than exact; keep less, or use exact")
    return checked(spec, role, force=force).text


def linear_rank(spec: CodecSpec) -> int | None:
    """The rank at which an exchange sums up factors in two passes; None where it has one, as all others have."""
    if spec.reducer is None or spec.reducer.name != "lowrank":
        return None
    return spec.reducer.arguments[0]


def stages_most(pipeline_codec: str, *, force: bool = False) -> int:
    """Into how many stages a model may be cut with that codec on each boundary; 0: as many as it has blocks."""
    too_many = LOW_BIT_BOUNDARIES + 1
    if force or objection_to(pipeline_codec, Role.BOUNDARY, boundaries=too_many) is None:
        return 0
    return LOW_BIT_BOUNDARIES + 1


# ---------------------------------------------------------------------- the return leg


def return_spec(spec: CodecSpec, contributors: int) -> CodecSpec:
    """How the sum of `contributors` vectors travels, each of which came in `spec`.

    Sparse ones come back as their union, until that takes more bytes than a dense vector; formats of less than eight
    bits as `int8:128`, cosine codecs too, since their decoding is not exact; sums of factors exactly; all others as
    they came.
    """
    if linear_rank(spec) is not None:
        return CodecSpec()
    values = RETURN_SPEC.values if spec.values.name in _COARSE else spec.values
    if spec.reducer is None:
        return CodecSpec(values=values, squeezer=spec.squeezer)
    dense = CodecSpec(values=RETURN_SPEC.values, squeezer=spec.squeezer)
    if spec.reducer.name not in _SPARSE:
        return dense
    kept, chunk = spec.reducer.arguments
    union = kept * max(1, contributors)
    if union >= chunk:
        return dense
    sparse = CodecSpec(Element("topk", (union, chunk)), values, spec.squeezer)
    return sparse if _likely_bytes(sparse, chunk * 64) < _likely_bytes(dense, chunk * 64) else dense


def may_return(text: str, spec: CodecSpec) -> bool:
    """Whether an aggregate of any number of contributions in `spec` may travel as `text` says."""
    try:
        found = parse_spec(text)
    except SpecError:
        return False
    contributors = 1
    if spec.reducer is not None and linear_rank(spec) is None:
        if found.reducer is None:
            return found == CodecSpec(values=RETURN_SPEC.values, squeezer=spec.squeezer)
        contributors = found.reducer.arguments[0] // spec.reducer.arguments[0]
    return found == return_spec(spec, contributors)


# ---------------------------------------------------------------------- bytes


def _likely_bytes(spec: CodecSpec, *shape: int) -> int:
    return 4 * prod(shape) if spec.raw else size_estimate(spec, shape).likely_bytes


def boundary_bytes(pipeline_codec: str, shape: tuple[int, ...], *, backward: bool = False) -> int:
    """What a float32 tensor of `shape` takes on its way to another stage."""
    policy = policy_for(Role.BOUNDARY, pipeline_codec)
    return _likely_bytes(policy.spec_for(shape, backward=backward), *shape)


def exchange_bytes(
    exchange_codec: str, elements: int, members: int, *, matrix_elements: int = 0, matrix_sides: int = 0
) -> int:
    """What each of `members` equal members sends per exchange of a vector: contributions, then its aggregate.

    Args:
        matrix_elements: how many of the elements are in tensors of two or more dimensions.
        matrix_sides: the rows and columns of all those, added up.
    """
    if members < 2:
        return 0
    spec = parse_spec(exchange_codec)
    rank = linear_rank(spec)
    if rank is not None:
        elements = min(elements, elements - matrix_elements + rank * matrix_sides)
        spec = CodecSpec()
    part = -(-elements // members)
    return (members - 1) * (_likely_bytes(spec, part) + _likely_bytes(return_spec(spec, members), part))


def keeps_residual(exchange_codec: str) -> bool:
    """Whether every member keeps what the codec dropped, to send it a step later."""
    return policy_for(Role.GRADIENT, exchange_codec).feedback_decay is not None
