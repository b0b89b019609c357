"""In which codec each tensor crosses a stage boundary: by direction, and exactly when it is small."""

from __future__ import annotations

from starlings_compression.codec import Codec, make_codec
from starlings_compression.policy import Role, policy_for
from starlings_worker.core.events import Direction


class BoundaryCodecs:
    """What `[pipeline] codec` stands for; sender and receiver derive the same from direction and shape.

    Nothing is remembered from one microbatch to the next: what a codec drops of an activation is gone.
    """

    def __init__(self, spec: str) -> None:
        """Raises SpecError: there is no such codec, or a library for it is missing here."""
        self._policy = policy_for(Role.BOUNDARY, spec)
        exact = make_codec("exact")
        specs = (self._policy.spec, self._policy.backward_spec)
        self._codecs = {exact.spec: exact, **{spec: make_codec(spec) for spec in specs}}

    def of(self, direction: Direction, shape: tuple[int, ...]) -> Codec:
        """The codec of a float32 tensor of `shape` on its way forward, or of a gradient on its way back."""
        return self._codecs[self._policy.spec_for(shape, backward=direction is Direction.BACKWARD)]
