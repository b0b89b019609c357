"""What exchanges in pairs ask of the network, carried out: payloads in the background of training, and words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, assert_never

from starlings_protos import data_pb2, frames
from starlings_worker.core.pairing.work import (
    ForgetPair,
    PairKey,
    PairMoved,
    PairNetworkEffect,
    PairNetworkEvent,
    PairNotSent,
    PairSent,
    SendPair,
    SendWord,
    WordNotSent,
    WordSent,
)
from starlings_worker.links import Links, PushError
from starlings_worker.pair_device import PairDevice

# The core hears this often at most that bytes go by.
MOVED_EVERY_S = 0.5


class PairTransfers:
    """Of one life of an engine. All methods are called on the event loop."""

    def __init__(
        self,
        links: Links,
        device: Callable[[], PairDevice | None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        deliver: Callable[[PairNetworkEvent], None],
    ) -> None:
        """`device`: of the span that is held at present."""
        self._links = links
        self._device = device
        self._spawn = spawn
        self._deliver = deliver
        self._sending: dict[PairKey, asyncio.Task[None]] = {}

    def carry_out(self, effect: PairNetworkEffect) -> None:
        match effect:
            case SendPair():
                task = self._sending[effect.key] = self._spawn(self._send(effect))
                task.add_done_callback(lambda finished: self._ended(effect.key, finished))
            case SendWord():
                self._spawn(self._tell(effect))
            case ForgetPair():
                self._forget(effect.key)
            case _:
                assert_never(effect)

    def _ended(self, key: PairKey, task: asyncio.Task[None]) -> None:
        if self._sending.get(key) is task:
            del self._sending[key]

    def _forget(self, key: PairKey) -> None:
        device = self._device()
        if device is not None:
            device.forget(key)
        task = self._sending.pop(key, None)
        if task is not None:
            task.cancel()

    async def _send(self, effect: SendPair) -> None:
        key, device = effect.key, self._device()
        payload = device.outgoing(key) if device is not None else ()
        if not payload:
            self._deliver(PairNotSent(key, reason="it was forgotten meanwhile"))
            return
        tensors = [
            frames.tensor_header(
                part.name, data_pb2.DATA_TYPE_FLOAT32, (part.elements,), len(part.data), codec=part.codec
            )
            for part in payload
        ]
        header = frames.make_header(key.header(effect.sha256), tensors)
        moved = Moved(lambda: self._deliver(PairMoved(key)))
        try:
            await self._links.push(
                effect.to, "Pair", header, [part.data for part in payload], kind="exchange", background=moved
            )
        except PushError as error:
            self._deliver(PairNotSent(key, error.refusal, str(error)))
        else:
            self._deliver(PairSent(key))

    async def _tell(self, effect: SendWord) -> None:
        try:
            await self._links.tell(effect.to, effect.word)
        except PushError as error:
            self._deliver(WordNotSent(effect.word, error.refusal, str(error)))
        else:
            self._deliver(WordSent(effect.word))


class Moved:
    """Called for every piece of a transfer; tells of it now and then."""

    def __init__(self, tell: Callable[[], None], every_s: float = MOVED_EVERY_S) -> None:
        self._tell = tell
        self._every_s = every_s
        self._told_at_s = asyncio.get_running_loop().time()

    def __call__(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_at_s >= self._every_s:
            self._told_at_s = now_s
            self._tell()
