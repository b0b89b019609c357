"""Codecs that turn tensors into bytes for the wire: small, exact where it matters, safe on any input.

`spec`, `sizes`, `layout` and `errors` need only the standard library. `codec` and `feedback` import torch.
This package imports nothing else of Starlings.
"""
