"""The control stream: opened, kept, opened again with growing, jittered pauses; messages in and out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable

import grpc.aio

from starlings_protos import channels, control_pb2, control_pb2_grpc, convert
from starlings_protos.connect import diagnose
from starlings_protos.errors import RefusedError, clean_text, refused_error
from starlings_protos.identity import Identity
from starlings_protos.invite import Address
from starlings_protos.messages import Hello, Refused, ToCoordinator

# The first pause before a new attempt, and the longest; in between they double. Each is shortened at random by up to
# half, so that a swarm does not come back in one moment.
PAUSE_FIRST_S = 0.5
PAUSE_MOST_S = 30.0
# A hint that the coordinator is there again ends a pause within this time: not all of a swarm at once.
HURRY_WITHIN_S = 3.0
# From the opening of a stream to the coordinator's first message.
WELCOME_WITHIN_S = 20.0
# What waits to be sent at most; the engine's core repeats what matters after a reconnection.
_WAITING_AT_MOST = 4096


def pause_s(failures: int, rng: random.Random) -> float:
    """How long to wait before attempt number `failures` + 1; `failures` >= 1."""
    longest = min(PAUSE_MOST_S, PAUSE_FIRST_S * 2.0 ** min(failures - 1, 16))
    return longest * (1.0 - rng.random() / 2)


class ControlStream:
    """One worker's stream to the coordinator, over all its reconnections."""

    def __init__(
        self,
        addresses: tuple[Address, ...],
        identity: Callable[[], Identity],
        hello: Callable[[], Hello],
        on_message: Callable[[control_pb2.ToWorker], Awaitable[None]],
        on_down: Callable[[str], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        """
        Args:
            identity: the present one; a renewed certificate counts from the next connection on.
            on_message: every message; the first of each stream is the coordinator's answer to `hello`.
            on_down: a stream that had been up ended, and why.
        """
        self._addresses = addresses
        self._identity = identity
        self._hello = hello
        self._on_message = on_message
        self._on_down = on_down
        self._rng = rng
        self._waiting: deque[control_pb2.ToCoordinator] = deque(maxlen=_WAITING_AT_MOST)
        self._changed = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._hurried = asyncio.Event()
        self.up = False

    def hurry(self) -> None:
        """Somebody says that the coordinator may be there: a pause under way becomes a short one."""
        self._hurried.set()

    def send(self, message: control_pb2.ToCoordinator) -> bool:
        """Queues a message. False when the stream is down: the message is dropped."""
        if not self.up:
            return False
        self._waiting.append(message)
        self._written.clear()
        self._changed.set()
        return True

    def say(self, record: ToCoordinator) -> bool:
        """As `send`, for a record."""
        message = control_pb2.ToCoordinator()
        convert.body_to_proto(record, message)
        return self.send(message)

    async def flush(self, within_s: float) -> None:
        """Waits until what is queued was written, but not longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._written.wait()

    async def run(self, on_trouble: Callable[[str], None]) -> None:
        """Keeps a stream up until cancelled.

        Args:
            on_trouble: told why there is no stream, and that it is tried again.

        Raises:
            RefusedError: the coordinator said no, and trying again would not help.
        """
        failures = 0
        while True:
            address = self._addresses[failures % len(self._addresses)]
            reason = await self._one_stream(address)
            if self.up:
                self.up = False
                self._waiting.clear()
                self._written.set()
                failures = 0
                await self._on_down(reason)
            failures += 1
            wait_s = pause_s(failures, self._rng)
            on_trouble(f"{reason} Trying again in {wait_s:.1f} s.")
            await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        until_s = time.monotonic() + wait_s
        # What was said before this pause is answered by the attempt that has just failed.
        self._hurried.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._hurried.wait()
        left_s = max(0.0, until_s - time.monotonic())
        await asyncio.sleep(self._rng.random() * min(left_s, HURRY_WITHIN_S))

    async def _one_stream(self, address: Address) -> str:
        """Opens a stream and serves it until it ends; returns why it ended, as a sentence.

        Raises:
            RefusedError: the coordinator said no for good.
        """
        identity = self._identity()
        channel = channels.control_channel(str(address), identity)
        try:
            call = control_pb2_grpc.ControlStub(channel).Session()
            try:
                await self._serve(call)
            finally:
                call.cancel()
        except TimeoutError:
            return f"The coordinator at {address} did not answer within {WELCOME_WITHIN_S:.0f} s."
        except (RefusedError, grpc.aio.AioRpcError) as error:
            refused = refused_error(error)
            if refused is not None:
                if not refused.restart_may_cure:
                    raise refused from None
                return str(refused)
            if not self.up:
                return str(await diagnose(address, identity))
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            return f"The connection to {address} was lost ({clean_text(details or 'no reason given', 200)})."
        except asyncio.InvalidStateError:
            pass
        finally:
            await channel.close()
        return f"The coordinator at {address} ended the stream."

    async def _serve(
        self, call: grpc.aio.StreamStreamCall[control_pb2.ToCoordinator, control_pb2.ToWorker]
    ) -> None:
        first = control_pb2.ToCoordinator()
        convert.body_to_proto(self._hello(), first)
        async with asyncio.timeout(WELCOME_WITHIN_S):
            await call.write(first)
            message: object = await call.read()
        if not isinstance(message, control_pb2.ToWorker):
            return
        self.up = True
        writing = asyncio.create_task(self._write(call))
        try:
            while isinstance(message, control_pb2.ToWorker):
                if message.WhichOneof("body") == "refused":
                    record = convert.from_proto(message.refused, Refused)
                    raise RefusedError(record.refusal, record.message)
                await self._on_message(message)
                message = await call.read()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[control_pb2.ToCoordinator, control_pb2.ToWorker]
    ) -> None:
        while True:
            while self._waiting:
                await call.write(self._waiting.popleft())
            self._changed.clear()
            self._written.set()
            await self._changed.wait()
