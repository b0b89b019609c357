"""The weighted sum of encoded contributions, chunk by chunk: each is decoded, weighted and added while a processor's
cache has it. No contribution is ever whole in memory, nor is the sum where a lossy codec takes it away piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_compression.errors import CodecError
from starlings_compression.tensors import chunk_elements
from starlings_compression.terms import Landing, Term
from starlings_compression.wire import WireReader
from starlings_protos.messages import WorkerId
from starlings_worker.digest import Fingerprint, is_finite
from starlings_worker.open_group import RefusedPart

# On a host: a chunk of the sum and one of a summand fit a core's own cache together.
_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Summand:
    """What one member contributed to a part."""

    worker_id: WorkerId
    weight: float
    reader: WireReader


class WeightedSum:
    """A `starlings_compression.codec.Source`: the sum is computed when it is read, in the order of the summands. They
    are of one codec, but for those that never travelled.
    """

    def __init__(self, summands: Sequence[Summand], size: int, device: torch.device) -> None:
        self.shape: tuple[int, ...] = (size,)
        self.device = device
        self._summands = tuple(summands)
        self._unchecked = any(not summand.reader.checked for summand in summands)
        self.granularity = max((summand.reader.granularity for summand in summands), default=1)
        step = chunk_elements(device, self.granularity)
        if device.type == "cpu":
            step = min(step, max(_CHUNK_ELEMENTS // self.granularity, 1) * self.granularity)
        self._step = step
        self._scratch: Tensor | None = None
        # Where what it is encoded as is wanted once it is decoded.
        self.landing: Landing | None = None

    def terms(self) -> Sequence[Term]:
        terms = [summand.reader.term(summand.weight) for summand in self._summands]
        found = [term for term in terms if term is not None]
        return found if len(found) == len(terms) else ()

    def write(self, result: Fingerprint | None, values: Tensor, begin: int, end: int) -> Tensor:
        """All of it into elements begin..end of `values`, which may be the memory of a summand: of no use afterwards.
        `result` is of that vector, and takes what is written.

        Raises:
            RefusedPart: as `read`; some is written then.
            CodecError: no summand is to blame, but the sum is not finite.
        """
        out = values[begin:end]
        terms = self.terms() if result is not None else ()
        chunk = torch.empty(min(self._step, out.numel()), dtype=torch.float32, device=self.device)
        start = 0
        while start < out.numel():
            if result is not None and (done := result.write(terms, begin, start, out.numel())) > start:
                start = done
                continue
            stop = min(start + self._step, out.numel())
            if terms and result is not None:
                stop = min(stop, result.border(begin, start, self.granularity))
            total = self.read(start, stop, chunk[: stop - start])
            if not is_finite(total):
                raise CodecError("the sum of finite values is not finite")
            out[start:stop].copy_(total)
            if result is not None:
                result.take(begin + start, begin + stop)
            start = stop
        return out

    def read(self, start: int, stop: int, into: Tensor) -> Tensor:
        """Elements start..stop, multiples of the contributions' granularity or the end, in `into`.

        Raises:
            RefusedPart: names the first whose values are not finite.
        """
        if not self._summands:
            return into.zero_()
        for first in range(start, stop, self._step):
            last = min(first + self._step, stop)
            self._add_up(first, last, into[first - start : last - start])
        return into

    def _add_up(self, start: int, stop: int, into: Tensor) -> None:
        if self._scratch is None:
            size = min(self._step, self.shape[0])
            self._scratch = torch.empty(size, dtype=torch.float32, device=self.device)
        spare = self._scratch[: stop - start]
        total: Tensor | None = None
        for summand in self._summands:
            target = into if total is None else spare
            values = summand.reader.read(start, stop, target)
            if summand.weight != 1.0:
                values = torch.mul(values, summand.weight, out=target)
            total = values if total is None else torch.add(total, values, out=into)
        if total is not None and total is not into:
            into.copy_(total)
        # A sum in which one number is not finite is not finite either. The other way round it is the encoder's to
        # refuse: finite numbers may add up to more than float32 holds.
        if self._unchecked and not is_finite(into):
            for summand in self._summands:
                if not is_finite(summand.reader.read(start, stop, spare)):
                    raise RefusedPart(
                        summand.worker_id, "the contribution is malformed: NaN or infinite values"
                    )
