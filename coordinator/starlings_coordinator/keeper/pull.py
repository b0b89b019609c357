"""Pulling committed blocks from workers, through the rpc that a late joiner uses; nothing is believed unchecked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

import grpc

from starlings_job.optimizers import kept_tensor
from starlings_job.state import PARAMETER, RawTensor, block_digest
from starlings_protos import data_pb2, data_pb2_grpc
from starlings_protos.assignments import assignment_metadata
from starlings_protos.errors import clean_text
from starlings_protos.identity import Identity
from starlings_protos.messages import Peer, SignedAssignment
from starlings_protos.reach_messages import Route
from starlings_protos.relay.paths import NoPath, Paths
from starlings_protos.state_transfer import (
    FetchedBlock,
    OpenTransfer,
    StateTensor,
    StateTransferError,
    fetch_block,
)

logger = logging.getLogger(__name__)

# A donor that sends nothing for this long is given up for another; the transfer goes on where it stopped.
STALLED_AFTER_S = 30.0
# Names, shapes and hashes travel beside the tensors' bytes that the profile counts.
HEADER_ALLOWANCE_BYTES = 1 << 20


class PullError(Exception):
    """No donor delivered what it should; the message names each and why."""


class Puller:
    """Channels to donors during one save; use as an async context manager."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        assignment: Callable[[], SignedAssignment],
        *,
        stalled_after_s: float = STALLED_AFTER_S,
        routes: Callable[[], Iterable[Route]] = tuple,
    ) -> None:
        """`routes`: how workers are reached, beside what their addresses say; asked before each connection."""
        self._assignment = assignment
        self._stalled_after_s = stalled_after_s
        self._routes = routes
        self._paths = Paths(identity)
        self._peers: dict[str, Peer] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._paths.close)

    async def __aenter__(self) -> Puller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def block(
        self,
        version: int,
        block: str,
        donors: Sequence[Peer],
        *,
        reference: Mapping[str, RawTensor],
        digest: str,
        limit_bytes: int,
    ) -> FetchedBlock:
        """One block with its optimizer's tensors, from the first donor that delivers what it should.

        Args:
            reference: the block at version 0: names, types and shapes of the parameters.
            digest: what the block's digest must be; "" when it is not known.
            limit_bytes: no block is larger.

        Raises:
            PullError: none did.
        """
        delivered: list[str] = []
        left: dict[str, OpenTransfer] = {p.worker_id: self._opener(p, delivered) for p in donors}
        failures: list[str] = []
        while left:
            try:
                fetched = await fetch_block(
                    dict(left),
                    version=version,
                    block=block,
                    optimizer=True,
                    limit_bytes=limit_bytes + HEADER_ALLOWANCE_BYTES,
                    on_failure=lambda donor, error: failures.append(f"{donor}: {_words(error)}"),
                )
            except StateTransferError as error:
                raise PullError("; ".join(failures) or str(error)) from None
            flaw = await asyncio.to_thread(_flaw, fetched.tensors, reference, digest)
            if not flaw:
                return fetched
            culprit = delivered[-1]
            failures.append(f"{culprit}: {flaw}")
            logger.warning("block %s at version %d from %s: %s", block, version, culprit, flaw)
            del left[culprit]
        raise PullError("; ".join(failures) or f"nobody holds block {block}")

    def _opener(self, peer: Peer, delivered: list[str]) -> OpenTransfer:
        async def transfer(request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
            delivered.append(peer.worker_id)
            async for frame in self._frames(peer, request):
                yield frame

        return transfer

    async def _frames(self, peer: Peer, request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
        try:
            channel = await self._channel(peer)
        except NoPath as error:
            raise StateTransferError(f"it cannot be reached: {error}") from None
        call = data_pb2_grpc.DataStub(channel).FetchState(
            request, metadata=assignment_metadata(self._assignment())
        )
        try:
            while True:
                try:
                    frame = await asyncio.wait_for(call.read(), self._stalled_after_s)
                except TimeoutError:
                    raise TimeoutError(f"nothing came for {self._stalled_after_s:.0f} s") from None
                if not isinstance(frame, data_pb2.Frame):
                    return
                yield frame
        finally:
            call.cancel()

    async def _channel(self, peer: Peer) -> grpc.aio.Channel:
        """The open channel to a donor. Raises NoPath."""
        channel = self._channels.get(peer.worker_id)
        if channel is None or channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._peers[peer.worker_id] = peer
            self._paths.plan(self._peers.values())
            self._paths.reroute(self._routes())
            channel = (await self._paths.open(peer.worker_id)).channel
            self._channels[peer.worker_id] = channel
            self._stack.push_async_callback(channel.close)
        return channel


def _words(error: Exception) -> str:
    """The other side's words are text from outside."""
    if isinstance(error, grpc.aio.AioRpcError):
        return clean_text(f"{error.code().name.lower()}: {error.details()}", 200)
    return clean_text(str(error), 200) or type(error).__name__


def _flaw(tensors: Mapping[str, StateTensor], reference: Mapping[str, RawTensor], digest: str) -> str:
    """What is wrong with a delivered block; "" when nothing is."""
    expected = {name: t for name, t in reference.items() if name.startswith(PARAMETER)}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        return f"{missing[0]} is missing"
    for name, tensor in tensors.items():
        kind, _, inner = name.partition(":")
        parameter = expected.get(PARAMETER + inner)
        due = parameter if name in expected or parameter is None else kept_tensor(kind, parameter.shape)
        if due is None:
            return f"there is no parameter for {name[:80]!r}"
        if tensor.shape != due.shape:
            return f"{name} has shape {tensor.shape}, not {due.shape}"
        if tensor.data_type != due.data_type:
            return f"{name} has type {tensor.data_type}"
    if digest and (found := block_digest(tensors)) != digest:
        return f"the digest is {found[:12]}, it should be {digest[:12]}"
    return ""
