"""What lossy codecs dropped of one leg of a group's exchange, part by part, through every change of the cut.

The cut moves when members come and go. What was dropped belongs to the vector, not to the cut: it is carried over,
element by element, or a member that leaves would cost the others what sparse codecs owe them for many steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from starlings_compression.codec import Codec
from starlings_compression.feedback import ErrorFeedback

Bounds = tuple[int, int]


_Parts = dict[int, tuple[Bounds, ErrorFeedback]]


class Residuals:
    """Error feedback for the parts of one (group, leg). Transactional, as `ErrorFeedback` is, and so are its cuts: an
    attempt with other members that was given up leaves no trace.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        """`name`: equal on all members, so that codecs that draw places draw the same ones for a part."""
        self._name = name
        self._device = device
        self._parts: _Parts = {}
        # As of the last commit.
        self._committed: _Parts = {}

    def cut(self, codec: Codec, parts: Mapping[int, Bounds]) -> None:
        """From now on there are these parts, in that codec. Those that were committed so stay as they are."""
        for known in (self._parts, self._committed):
            if {number: bounds for number, (bounds, _) in known.items()} == parts and all(
                feedback.codec.spec == codec.spec for _, feedback in known.values()
            ):
                self._parts = known
                return
        self._parts = {
            number: (
                bounds,
                ErrorFeedback(
                    codec, seed=zlib.crc32(f"{self._name}/{number}".encode()), residual=self.carried(bounds)
                ),
            )
            for number, bounds in parts.items()
        }

    def carried(self, bounds: Bounds) -> torch.Tensor | None:
        """What has been dropped of these elements so far, as of the last commit; None: nothing. Its own memory."""
        begin, end = bounds
        carried: torch.Tensor | None = None
        for (old_begin, old_end), feedback in self._committed.values():
            first, last = max(begin, old_begin), min(end, old_end)
            if feedback.residual is None or first >= last:
                continue
            if carried is None:
                carried = torch.zeros(end - begin, dtype=torch.float32, device=self._device)
            carried[first - begin : last - begin] = feedback.residual[first - old_begin : last - old_begin]
        return carried

    def of(self, part: int) -> ErrorFeedback:
        return self._parts[part][1]

    def owed(self) -> list[tuple[Bounds, torch.Tensor]]:
        """What has been dropped so far, as of the last commit: where, and how much."""
        return [(b, f.residual) for b, f in self._committed.values() if f.residual is not None]

    def commit(self) -> None:
        for _, feedback in self._parts.values():
            feedback.commit()
        self._committed = self._parts

    def rollback(self) -> None:
        for _, feedback in self._parts.values():
            feedback.rollback()

    def reset(self) -> None:
        self._parts, self._committed = {}, {}
