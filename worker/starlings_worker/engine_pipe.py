"""The engine's end of the pipe to its supervisor: a thread reads, another writes, the event loop never
blocks on it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import BinaryIO

from starlings_protos import control_pb2, convert, pipes, process_pb2
from starlings_protos.messages import ToCoordinator


class EnginePipe:
    """`FromEngine` out, `ToEngine` in. Threads, because not every system has pipes that an event loop can
    wait for.
    """

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._outbox: queue.SimpleQueue[process_pb2.FromEngine | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="pipe-writer", daemon=True)

    def start(
        self, on_message: Callable[[process_pb2.ToEngine], None], on_end: Callable[[str], None]
    ) -> None:
        """Callbacks come on the running event loop; `on_end` with the reason, once."""
        loop = asyncio.get_running_loop()
        self._writer.start()

        def read() -> None:
            reason = "the supervisor ended"
            try:
                while (message := pipes.read_blocking(self._incoming, process_pb2.ToEngine)) is not None:
                    loop.call_soon_threadsafe(on_message, message)
            except (pipes.PipeError, OSError) as error:
                reason = f"the supervisor's pipe broke: {error}"
            # The loop may be gone already.
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_end, reason)

        threading.Thread(target=read, name="pipe-reader", daemon=True).start()

    def send(self, message: process_pb2.FromEngine) -> None:
        self._outbox.put(message)

    def send_control(self, message: ToCoordinator) -> int:
        """A message for the control stream; returns its bytes."""
        envelope = process_pb2.FromEngine()
        convert.body_to_proto(message, envelope.control)
        self._outbox.put(envelope)
        return envelope.control.ByteSize()

    def log(self, level: str, text: str) -> None:
        """A line of the log. Levels: "debug", "info", "warning", "error"."""
        self.send(process_pb2.FromEngine(log=process_pb2.LogLine(level=level, text=text)))

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what waits, then ends the writer."""
        self._outbox.put(None)
        if self._writer.is_alive():
            self._writer.join(timeout_s)

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                pipes.write(self._outgoing, message)
                if self._outbox.empty():
                    self._outgoing.flush()
            self._outgoing.flush()
        except OSError:
            # The supervisor is gone; the reader says so.
            return


def control_of(message: process_pb2.ToEngine) -> control_pb2.ToWorker:
    return message.control
