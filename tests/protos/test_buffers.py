"""Large buffers: used again, never while anybody refers to them, and taken only as bytes come."""

from __future__ import annotations

import gc
import resource
import sys

import pytest
import torch

from starlings_protos import buffers
from starlings_protos.buffers import KEPT_BYTES, Arriving, fresh

LENGTH = (1 << 20) + 5
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only there are buffers mapped")


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    gc.collect()
    buffers._kept.clear()


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


@on_linux
def test_a_buffer_is_used_again_only_when_nobody_refers_to_it():
    first = fresh(LENGTH)
    where, tail = _address(first), first[-5:]
    tensor = torch.frombuffer(first, dtype=torch.uint8)[7:]
    del first
    assert _address(fresh(LENGTH)) != where
    del tensor
    buffers._kept.clear()
    assert _address(fresh(LENGTH)) != where
    buffers._kept.clear()
    del tail
    again = fresh(LENGTH)
    assert _address(again) == where
    assert len(again) == LENGTH
    again[-1] = 3


@on_linux
def test_only_a_few_megabytes_are_kept():
    held = [fresh(LENGTH) for _ in range(40)]
    assert len({_address(view) for view in held}) == 40
    del held
    assert 0 < sum(map(len, buffers._kept)) <= KEPT_BYTES
    del_large = fresh(KEPT_BYTES + 1)
    assert len(del_large) == KEPT_BYTES + 1
    del del_large
    assert all(len(kept) < KEPT_BYTES for kept in buffers._kept)


@pytest.mark.parametrize("length", [0, 1, 1000, LENGTH])
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_bytes_that_arrive_are_all_there(length: int, platform: str, monkeypatch: pytest.MonkeyPatch):
    if platform != sys.platform:
        monkeypatch.setattr(sys, "platform", platform)
    data = bytes(i * 7 % 256 for i in range(length))
    arriving = Arriving(length)
    for start in range(0, length + 300_000, 300_000):
        piece = memoryview(data + b"next")[start : start + 300_000]
        taken = arriving.add(piece)
        assert taken == max(0, min(300_000, length - start))
    assert not arriving.missing_bytes
    assert bytes(arriving.view()) == data


@on_linux
def test_a_promise_costs_nothing_until_bytes_come():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = [Arriving(1 << 30) for _ in range(8)]
    for arriving in held:
        arriving.add(memoryview(bytes(4096)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
