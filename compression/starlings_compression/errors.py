"""What can go wrong in this library, and whose fault it is."""

from __future__ import annotations


class CompressionError(ValueError):
    """Root of this library's errors."""


class SpecError(CompressionError):
    """The user named a codec that does not exist, or with arguments that it does not take."""


class CodecError(CompressionError):
    """The data is at fault: a tensor that cannot be encoded, or bytes that no encoder of ours wrote."""
