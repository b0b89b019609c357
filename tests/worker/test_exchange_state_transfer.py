"""State transfers: resumed at the byte where they broke, refused where header or hash lie."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from starlings_protos import data_pb2
from starlings_protos.state_transfer import (
    BlockInbox,
    ServedBlock,
    StateTensor,
    StateTransferError,
    fetch_block,
    state_frames,
)

_LIMIT = 64 << 20


def _tensor(name: str, count: int, seed: int = 1) -> StateTensor:
    data = bytes((seed * 31 + i * 7) % 251 for i in range(count * 4))
    return StateTensor(name, "F32", (count,), memoryview(data))


def _block(seed: int = 1) -> ServedBlock:
    return ServedBlock(
        3,
        "layers.0",
        [_tensor("param:a", 300_000, seed), _tensor("param:b", 0), _tensor("param:c", 70_000)],
        40 + seed,
    )


def _donor(block: ServedBlock, *, frames: int | None = None, flip: int | None = None, calls: list[int]):
    """A donor that breaks after `frames` frames, or flips a byte of frame number `flip`."""

    async def open_transfer(request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
        calls.append(request.offset)
        for number, frame in enumerate(state_frames([block], request.offset)):
            if frames is not None and number >= frames:
                raise ConnectionError("the donor died")
            if number == flip and request.offset == 0:
                frame.chunk = bytes([frame.chunk[0] ^ 1]) + frame.chunk[1:]
            yield frame

    return open_transfer


async def _fetch(donors):
    return await fetch_block(donors, version=3, block="layers.0", optimizer=True, limit_bytes=_LIMIT)


def _same(got, block: ServedBlock) -> bool:
    same = {n: bytes(t.data) for n, t in got.tensors.items()} == {
        t.name: bytes(t.data) for t in block.tensors
    }
    return same and got.optimizer_steps == block.optimizer_steps


async def test_a_donor_that_dies_is_replaced_at_the_byte_reached():
    block = _block()
    first: list[int] = []
    second: list[int] = []
    got = await _fetch({"a": _donor(block, frames=2, calls=first), "b": _donor(block, calls=second)})
    assert _same(got, block)
    assert first == [0, 1 << 20]
    assert second == [1_200_000]


async def test_a_flipped_byte_costs_that_tensor_only():
    block = _block()
    calls: list[int] = []
    got = await _fetch({"a": _donor(block, flip=3, calls=calls)})
    assert _same(got, block)
    assert calls == [0, 300_000 * 4]


async def test_bytes_of_two_donors_that_differ_are_never_mixed():
    calls: list[int] = []
    other = _block(seed=2)
    got = await _fetch({"a": _donor(_block(), frames=2, calls=calls), "b": _donor(other, calls=calls)})
    assert _same(got, other)


async def test_a_short_stream_is_never_complete():
    calls: list[int] = []
    with pytest.raises(StateTransferError, match="the donor died"):
        await _fetch({"a": _donor(_block(), frames=1, calls=calls)})


def _lies() -> list[data_pb2.Header]:
    headers = []
    for change in range(6):
        header = data_pb2.Header.FromString(_block().header().SerializeToString())
        match change:
            case 0:
                header.tensors[0].shape[0] = 1 << 50
            case 1:
                header.total_bytes += 1
            case 2:
                header.total_bytes = header.tensors[0].byte_count = 1 << 40
            case 3:
                header.tensors[0].name = "param:c"
            case 4:
                header.state.version = 4
            case 5:
                header.state.optimizer_steps = 1 << 60
        headers.append(header)
    return headers


@pytest.mark.parametrize("header", _lies())
def test_a_lying_header_is_refused(header):
    inbox = BlockInbox(3, "layers.0", _LIMIT)
    with pytest.raises(StateTransferError):
        inbox.feed(data_pb2.Frame(header=header))


def test_an_offset_skips_whole_blocks():
    blocks = [_block(), _block(2)]
    size = blocks[0].header().total_bytes
    frames = list(state_frames(blocks, size + 10))
    assert [f.WhichOneof("body") for f in frames].count("header") == 1
    assert sum(len(f.chunk) for f in frames) == size - 10
