"""What rounds of groups ask of the network, carried out; and what can be told of a payload by its header alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import prod
from typing import Any, assert_never

from starlings_protos import data_pb2, frames
from starlings_protos.errors import RefusedError
from starlings_protos.frames import FrameError
from starlings_protos.group_messages import GroupHeader, GroupLeg
from starlings_protos.messages import Refusal
from starlings_worker.core.groups.work import (
    ForgetGroup,
    GroupKey,
    GroupNetworkEffect,
    GroupNetworkEvent,
    GroupNotSent,
    GroupSent,
    SendGroup,
)
from starlings_worker.group_device import PART, GroupDevice
from starlings_worker.links import Links, PushError


class GroupTransfers:
    """Of one life of an engine. All methods are called on the event loop."""

    def __init__(
        self,
        links: Links,
        device: Callable[[], GroupDevice | None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        deliver: Callable[[GroupNetworkEvent], None],
    ) -> None:
        """`device`: of the span that is held at present."""
        self._links = links
        self._device = device
        self._spawn = spawn
        self._deliver = deliver
        self._sending: dict[GroupKey, set[asyncio.Task[None]]] = {}

    def carry_out(self, effect: GroupNetworkEffect) -> None:
        match effect:
            case SendGroup():
                key = GroupKey.of(effect.header)
                task = self._spawn(self._send(effect))
                self._sending.setdefault(key, set()).add(task)
                task.add_done_callback(lambda finished: self._ended(key, finished))
            case ForgetGroup(key):
                device = self._device()
                if device is not None:
                    device.forget(key)
                for task in self._sending.pop(key, set()):
                    task.cancel()
            case _:
                assert_never(effect)

    def _ended(self, key: GroupKey, task: asyncio.Task[None]) -> None:
        tasks = self._sending.get(key)
        if tasks is not None:
            tasks.discard(task)
            if not tasks:
                del self._sending[key]

    async def _send(self, effect: SendGroup) -> None:
        header, to, device = effect.header, effect.to, self._device()
        payload = device.outgoing(header) if device is not None else ()
        if not payload:
            self._deliver(GroupNotSent(header, to, reason="it was forgotten meanwhile"))
            return
        tensors = [
            frames.tensor_header(
                part.name, data_pb2.DATA_TYPE_FLOAT32, (part.elements,), len(part.data), codec=part.codec
            )
            for part in payload
        ]
        buffers = [part.data for part in payload]
        try:
            await self._links.push(
                to, "Group", frames.make_header(header, tensors), buffers, kind="exchange", background=_moved
            )
        except PushError as error:
            self._deliver(GroupNotSent(header, to, error.refusal, str(error)))
        else:
            self._deliver(GroupSent(header, to))


def _moved() -> None:
    """Rounds go by deadlines alone."""


def check_group_payload(header: data_pb2.Header, subject: GroupHeader, device: GroupDevice) -> None:
    """By the header alone, before anything is allocated.

    Raises:
        RefusedError: NOT_HELD, no such stage is held here. FrameError: no round of the job has such a payload.
    """
    if not device.holds(subject.stage):
        raise RefusedError(Refusal.NOT_HELD, f"stage {subject.stage} is not held here")
    elements = device.elements(subject.stage, subject.fragment)
    if not elements:
        raise FrameError(f"stage {subject.stage} has no fragment {subject.fragment}")
    if subject.leg is GroupLeg.UNSPECIFIED:
        raise FrameError("a payload of no leg")
    anchor = subject.leg is GroupLeg.ANCHOR
    names = [tensor.name for tensor in header.tensors]
    wanted = device.anchor_tensors() if anchor else [PART]
    if names != wanted:
        raise FrameError(f"such a payload must carry {wanted}")
    for tensor in header.tensors:
        if tensor.data_type != data_pb2.DATA_TYPE_FLOAT32 or not device.takes(subject.leg, tensor.codec):
            raise FrameError(f"tensor {tensor.name!r} has the wrong type, or a codec of another leg")
        size = prod(tensor.shape)
        if len(tensor.shape) != 1 or size > elements or (anchor and size != elements):
            raise FrameError(
                f"tensor {tensor.name!r} does not fit fragment {subject.fragment}, which has {elements} elements",
                Refusal.LIMIT if size > elements else Refusal.MALFORMED,
            )
