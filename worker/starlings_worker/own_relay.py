"""A worker that agreed to relay for others: a relay as a child process, as that worker and with its own cap."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from starlings_protos import pipes, process_pb2
from starlings_protos.identity import Identity
from starlings_worker.child_process import start_child
from starlings_worker.options import WorkerOptions

RELAY_MODULE = "starlings_protos.relay"
# Between the end of a relay and the next one.
PAUSE_S = 5.0


def relay_wish(options: WorkerOptions, directory: Path, number: int) -> tuple[float, Path] | None:
    """Bytes/s and log of the relay that the worker of the host's device `number` runs; None: it runs none."""
    if not options.relay_bytes_per_s or number:
        return None
    return options.relay_bytes_per_s, directory / "relay.log"


class OwnRelay:
    """Runs one relay at a time until cancelled."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        listen_host: str,
        bytes_per_s: float,
        log_path: Path,
        on_port: Callable[[int], None],
    ) -> None:
        """
        Args:
            bytes_per_s: what it passes on at most.
            on_port: told where it listens each time it has started, and 0 when it has ended.
        """
        self._identity = identity
        self._listen_host = listen_host
        self._bytes_per_s = bytes_per_s
        self._log_path = log_path
        self._on_port = on_port
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        while True:
            try:
                await self._one_relay()
            except (OSError, pipes.PipeError) as error:
                with self._log_path.open("a") as log:
                    log.write(f"the relay could not be run: {error}\n")
            self._on_port(0)
            await asyncio.sleep(PAUSE_S)

    async def renewed(self) -> None:
        """The worker has a new certificate."""
        renewed = process_pb2.RenewedCertificate(certificate_pem=self._identity().certificate_pem)
        await self._send(process_pb2.ToRelay(certificate=renewed))

    async def _send(self, message: process_pb2.ToRelay) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(pipes.pack(message))
                await self._process.stdin.drain()

    async def _one_relay(self) -> None:
        identity = self._identity()
        with self._log_path.open("ab") as log:
            self._process = await start_child(RELAY_MODULE, log)
        try:
            start = process_pb2.StartRelay(
                key_pem=identity.key_pem,
                certificate_pem=identity.certificate_pem,
                ca_pem=identity.ca_pem,
                listen_host=self._listen_host,
                listen_port=self._port,
                bytes_per_s=self._bytes_per_s,
            )
            await self._send(process_pb2.ToRelay(start=start))
            assert self._process.stdout is not None
            while (message := await pipes.read(self._process.stdout, process_pb2.FromRelay)) is not None:
                if message.WhichOneof("body") == "started":
                    self._port = message.started.port
                    self._on_port(self._port)
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
