"""Codes of 1, 2, 4, 12 bits in bytes, the first code in the lowest bits. Vectorised by work on wider words.

Little-endian words, as all of this library: torch runs on nothing else.
"""

from __future__ import annotations

import torch

from starlings_compression.errors import CodecError

# Words in which one byte holds one code: 8 / bits codes per word.
_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
# The product with it gathers the lowest bits of eight bytes in the highest byte; no two terms meet.
_GATHER_BITS = sum(1 << (56 - 7 * i) for i in range(8))
_ONE_BIT_EACH = sum(1 << (9 * i) for i in range(8)) - (1 << 64)
_SEVEN_ONES_EACH = 0x7F7F7F7F7F7F7F7F
_LOWEST_EACH = 0x0101010101010101


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Packs uint8 codes below 2**bits (a multiple of 8 of them) into the uint8 tensor `out`.

    `codes` is overwritten.
    """
    if bits == 8:
        out.copy_(codes)
        return
    words = codes.view(_WORDS[bits])
    if bits == 1:
        packed = words.mul_(_GATHER_BITS).bitwise_right_shift_(56)
    elif bits == 2:
        words.bitwise_or_(words >> 6)
        packed = words.bitwise_or_(words >> 12)
    else:
        packed = words.bitwise_or_(words >> 4)
    # A conversion keeps the lowest byte.
    out.copy_(packed.bitwise_and_(0xFF))


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The uint8 codes in `packed` (uint8), as many as it has room for."""
    if bits == 8:
        return packed
    words = packed.to(_WORDS[bits])
    if bits == 1:
        words.mul_(_LOWEST_EACH).bitwise_and_(_ONE_BIT_EACH).add_(_SEVEN_ONES_EACH)
        words.bitwise_right_shift_(7).bitwise_and_(_LOWEST_EACH)
    elif bits == 2:
        words.bitwise_or_(words << 12)
        words.bitwise_or_(words << 6).bitwise_and_(0x03030303)
    else:
        words.bitwise_or_(words << 4).bitwise_and_(0x0F0F)
    return words.view(torch.uint8)


def clear_rest(packed: torch.Tensor, count: int, bits: int) -> None:
    """Zeroes the bits behind the last of `count` codes, so that equal tensors give equal bytes."""
    used = count * bits % 8
    if used:
        packed[-1].bitwise_and_((1 << used) - 1)


def check_rest(packed: torch.Tensor, count: int, bits: int) -> None:
    """Raises CodecError when bits behind the last code are set."""
    used = count * bits % 8
    if used and int(packed[-1]) >> used:
        raise CodecError("bits behind the last code are set")


# ---------------------------------------------------------------------- indices

# Unpacked at once, an even number: numbers of 32 bits for the bytes of all of them would take more memory than the
# tensor.
PIECE_INDICES = 1 << 18


def pack_indices(indices: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Packs int32 indices below 2**bits (8, 12 or 16) into the uint8 tensor `out`."""
    if bits == 8:
        out.copy_(indices)
        return
    if bits == 16:
        out[0::2].copy_(indices & 0xFF)
        out[1::2].copy_(indices >> 8)
        return
    even, odd = indices[0::2], indices[1::2]
    out[0::3].copy_(even & 0xFF)
    high = even >> 8
    high[: odd.numel()].bitwise_or_((odd & 0xF) << 4)
    out[1::3].copy_(high)
    out[2::3].copy_(odd >> 4)


def unpack_indices(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`count` int32 indices. Raises CodecError when bits behind the last one are set."""
    if bits == 12 and count % 2 and int(packed[-1]) >> 4:
        raise CodecError("bits behind the last index are set")
    indices = torch.empty(count, dtype=torch.int32, device=packed.device)
    for start in range(0, count, PIECE_INDICES):
        stop = min(start + PIECE_INDICES, count)
        _unpack_piece(packed[start * bits // 8 : -(-stop * bits // 8)], bits, indices[start:stop])
    return indices


def _unpack_piece(packed: torch.Tensor, bits: int, into: torch.Tensor) -> None:
    if bits == 8:
        into.copy_(packed)
        return
    words = packed.to(torch.int32)
    if bits == 16:
        torch.bitwise_or(words[0::2], words[1::2] << 8, out=into)
        return
    middle = words[1::3]
    into[0::2] = words[0::3] | ((middle & 0xF) << 8)
    into[1::2] = (middle[: into.numel() // 2] >> 4) | (words[2::3] << 4)
