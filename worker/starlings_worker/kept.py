"""What the engine keeps for each microbatch, from its arrival until the core says ForgetMicrobatch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from starlings_protos.messages import MicrobatchKey
from starlings_worker.runs import Run
from starlings_worker.wire import Buffer


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor ready to be sent, or sent again: float32 of `shape`, in `codec`."""

    shape: tuple[int, ...]
    codec: str
    data: Buffer


@dataclass(slots=True)
class Kept:
    """The fields are filled one after another as the microbatch passes through."""

    # The samples' records: inputs for the model's first stage, labels for its last.
    records: Buffer | None = None
    # The boundary input, decoded, on the device.
    boundary: Tensor | None = None
    run: Run | None = None
    # The run's output for the next hop.
    hidden: Encoded | None = None
    # The gradient of the output, from the next hop.
    output_gradient: Tensor | None = None
    # The gradient at the run's entry, for the previous hop.
    entry_gradient: Encoded | None = None


class Microbatches:
    """Kept microbatches by key.

    The event loop and the compute thread both touch it; the core never lets them work on one key at the same
    time.
    """

    def __init__(self) -> None:
        self._kept: dict[MicrobatchKey, Kept] = {}

    def entry(self, key: MicrobatchKey) -> Kept:
        """The record of that key, made if need be."""
        return self._kept.setdefault(key, Kept())

    def get(self, key: MicrobatchKey) -> Kept | None:
        return self._kept.get(key)

    def forget(self, key: MicrobatchKey) -> None:
        self._kept.pop(key, None)

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
