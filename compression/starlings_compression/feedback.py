"""Error feedback: what a codec dropped is added to the next input (Seide 2014; Karimireddy 2019, EF-SGD).

    x' = x + decay * residual ;   send encode(x') ;   residual = x' - decode(encode(x'))

State is transactional: a round that did not commit must not leave a residual of bytes that nobody applied.
"""

from __future__ import annotations

import torch

from starlings_compression.codec import Codec, Source, check_floating, filled
from starlings_compression.sizes import size_estimate
from starlings_compression.state import CodecState
from starlings_compression.tensors import data_type_of


class ErrorFeedback:
    """One per (stage, peer or group, part, direction): tensors of one shape, one after the other.

    `encode` may be called again before `commit` or `rollback`: it starts from the last commit each time.
    Residuals are float32 and stay on the tensor's device. Two of them are kept, 8 bytes per value, and take turns:
    fresh memory for each round would cost more than encoding does.
    """

    def __init__(
        self, codec: Codec, decay: float = 1.0, *, seed: int = 0, residual: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            seed: what random choices of the codec follow from.
            residual: what others, now replaced, have dropped so far (float32, of the tensors' shape); handed over.
        """
        if not 0.0 <= decay <= 1.0:
            raise ValueError("decay must lie between 0 and 1")
        self.codec = codec
        self.decay = decay
        self._state = CodecState(seed)
        self._committed = residual
        self._pending: torch.Tensor | None = None
        # What neither of them needs at the moment.
        self._spare: torch.Tensor | None = None

    @property
    def residual(self) -> torch.Tensor | None:
        """What the next input is corrected by, as of the last commit; None before the first.

        Its memory is used again after the next commit: copy what is needed longer.
        """
        return self._committed

    @torch.no_grad()
    def encode(self, tensor: torch.Tensor, *, name: str = "tensor") -> bytes:
        """The Packed (float32) of `tensor` plus the committed residual; of `tensor` itself if lossless.

        Raises:
            CodecError: as `Codec.encode`; the residual is as it was.
            ValueError: another shape than before.
        """
        data_type_of(tensor, name)
        return filled(self.most_bytes(tensor), lambda buffer: self.encode_into(tensor, buffer, name=name))

    @torch.no_grad()
    def encode_into(
        self, tensor: torch.Tensor | Source, out: bytearray | memoryview, *, name: str = "tensor"
    ) -> int:
        """As `encode`, into the beginning of a writable buffer of `most_bytes(tensor)`; returns the length written."""
        self.rollback()
        if self.codec.lossless:
            assert isinstance(tensor, torch.Tensor), "nothing is fed back: a tensor is encoded as it is"
            return self.codec.encode_into(tensor, out, name=name)
        if self._committed is not None and self._committed.shape != tensor.shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} follows {tuple(self._committed.shape)}; "
                "the error of one tensor cannot be fed back to another"
            )
        if isinstance(tensor, torch.Tensor):
            check_floating(data_type_of(tensor, name), name, self.codec.spec)
        corrected = self._spare
        if corrected is None or corrected.shape != tensor.shape or corrected.device != tensor.device:
            corrected = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        self._spare = corrected
        length = self.codec.encode_with_error(
            tensor, out, corrected, self._state, residual=self._committed, decay=self.decay, name=name
        )
        self._pending, self._spare = corrected, None
        return length

    def most_bytes(self, tensor: torch.Tensor | Source) -> int:
        """What the Packed of such a tensor may take at most."""
        item_bytes = 4
        if self.codec.lossless and isinstance(tensor, torch.Tensor):
            item_bytes = tensor.element_size()
        return size_estimate(self.codec.spec, tensor.shape, item_bytes=item_bytes).most_bytes

    def commit(self) -> None:
        """The bytes of the last `encode` count: keep what they dropped."""
        self._state.commit()
        if self._pending is not None:
            self._spare, self._committed, self._pending = self._committed, self._pending, None

    def rollback(self) -> None:
        """The bytes of the last `encode` do not count: forget what they dropped."""
        self._state.rollback()
        if self._pending is not None:
            self._spare, self._pending = self._pending, None

    def reset(self) -> None:
        """Forget everything, as at the start: after a change of shape, or when other state replaced ours."""
        self._state.reset()
        self._committed = self._pending = self._spare = None
