"""Connections to peers and donors: the only way in which anything of this worker opens a channel to another.

One channel per peer, by whichever way answers (`relay/paths.py`); the certificate decides, so a changed address or a
relay changes nothing for callers. A relayed link is moved to a direct way when one answers: new calls take it, and
those under way end on the old one. A failed push says whether the receiver certainly did not take it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from starlings_protos import convert, data_pb2, data_pb2_grpc, frames
from starlings_protos.assignments import assignment_metadata
from starlings_protos.errors import refused_error
from starlings_protos.identity import Identity
from starlings_protos.messages import Peer, Receipt, Refusal, SignedAssignment, WorkerId
from starlings_protos.pair_messages import PairWord
from starlings_protos.reach_messages import Route
from starlings_protos.relay.paths import UPGRADE_EVERY_S, NoPath, Path, Paths
from starlings_worker.meters import Meters
from starlings_worker.uplink import Uplink, give_way

T = TypeVar("T")
# A transfer in which nothing moves for this long is broken off: the peer is frozen, or the way to it is.
STALL_S = 10.0
# A word is answered at once, or not at all.
WORD_S = 3.0
# Pieces of what is sent in the background are small, so that little is before whatever becomes urgent.
BACKGROUND_CHUNK_BYTES = 64 << 10
# In the receiver's initial metadata: it has admitted the transfer and reads the body.
ADMITTED_METADATA_KEY = "starlings-admitted"
# When a call ends while it is written to, the library may forget why (seen in a few of a hundred refusals). Asking
# again is harmless, because receivers know by its key what they have; then the body waits for the admission.
ANSWER_LOST_TRIES = 4
_LIBRARY_ERROR = "Internal error from Core"
# Statuses with which a server says no before it looked at a body.
_NEVER_TAKEN = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)


class PushError(Exception):
    """A push failed. `certain`: the receiver surely did not take it; then `refusal` says how it refused, if
    it did.
    """

    def __init__(self, reason: str, *, certain: bool, refusal: Refusal = Refusal.UNSPECIFIED) -> None:
        super().__init__(reason)
        self.certain = certain
        self.refusal = refusal


class AnswerLost(Exception):
    """The other side ended the call, but the library put its own error in the place of what it said."""


class Link:
    """An open connection to one peer."""

    def __init__(self, path: Path) -> None:
        self.channel = path.channel
        self.address = path.address
        # "" when it is direct.
        self.relay_id = path.relay_id
        self.stub = data_pb2_grpc.DataStub(path.channel)
        # Calls under way, and whether it closes with the last of them.
        self.calls = 0
        self.retired = False

    @property
    def usable(self) -> bool:
        return self.channel.get_state() is grpc.ChannelConnectivity.READY


class Links:
    """Channels by worker id, opened when first needed."""

    def __init__(
        self,
        identity: Identity,
        meters: Meters,
        stall_s: float = STALL_S,
        uplink: Uplink | None = None,
        upgrade_every_s: float = UPGRADE_EVERY_S,
    ) -> None:
        self._identity = identity
        self._paths = Paths(lambda: self._identity)
        self._upgrade_every_s = upgrade_every_s
        self._upgrading: asyncio.Task[None] | None = None
        self._uplink = uplink or Uplink()
        self._meters = meters
        self._stall_s = stall_s
        self._peers: dict[WorkerId, Peer] = {}
        self._links: dict[WorkerId, Link] = {}
        self._locks: dict[WorkerId, asyncio.Lock] = {}
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        self._closing: set[asyncio.Task[None]] = set()
        # Transfers out that others wait for, and those of them whose bytes are leaving.
        self.pushes = 0
        self._writing = 0

    # ---------------------------------------------------------------- who and where

    def update(self, peers: Iterable[Peer]) -> None:
        """The peers and donors of a new plan; links to all others are closed."""
        self._peers = {peer.worker_id: peer for peer in peers}
        self._paths.plan(self._peers.values())
        for worker_id, link in list(self._links.items()):
            gone = worker_id not in self._peers
            if gone or (not link.relay_id and link.address not in self._paths.addresses(worker_id)):
                self._drop(worker_id)
        self._locks = {w: lock for w, lock in self._locks.items() if w in self._peers or lock.locked()}

    def reroute(self, routes: Iterable[Route]) -> None:
        """Where some workers can be reached beside what plans say."""
        self._paths.reroute(routes)

    @property
    def relayed(self) -> dict[WorkerId, str]:
        """Peers that are reached through a relay now, and through which."""
        return {w: link.relay_id for w, link in self._links.items() if link.relay_id and link.usable}

    def incarnation_of(self, worker_id: WorkerId) -> int:
        """The life of that worker that the plan knows; 0 when it is not in the plan."""
        peer = self._peers.get(worker_id)
        return peer.incarnation if peer is not None else 0

    def set_assignment(self, signed: SignedAssignment) -> None:
        """What every call shows from now on."""
        self._metadata = assignment_metadata(signed)

    def set_identity(self, identity: Identity) -> None:
        """A renewed certificate: for connections opened from now on."""
        self._identity = identity

    async def close(self) -> None:
        if self._upgrading is not None:
            self._upgrading.cancel()
        for worker_id in list(self._links):
            self._drop(worker_id)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._paths.close()

    def _drop(self, worker_id: WorkerId) -> None:
        link = self._links.pop(worker_id, None)
        if link is not None:
            self._close(link)

    def _close(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.channel.close(grace=0.5))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # ---------------------------------------------------------------- connecting

    async def connect(self, worker_id: WorkerId) -> Link:
        """The open connection to a worker, or to "keeper".

        Raises:
            PushError: certain; no address is known, or none answers.
        """
        link = self._links.get(worker_id)
        if link is not None and link.usable:
            return link
        async with self._locks.setdefault(worker_id, asyncio.Lock()):
            link = self._links.get(worker_id)
            if link is not None and link.usable:
                return link
            self._drop(worker_id)
            try:
                path = await self._paths.open(worker_id)
            except NoPath as error:
                raise PushError(f"no connection to {worker_id}: {error}", certain=True) from None
            self._links[worker_id] = link = Link(path)
            if link.relay_id and self._upgrading is None:
                self._upgrading = asyncio.create_task(self._upgrade())
            return link

    @contextlib.asynccontextmanager
    async def _using(self, worker_id: WorkerId) -> AsyncIterator[Link]:
        """The link for one call: it is not closed by an upgrade until the call has ended. Raises PushError."""
        link = await self.connect(worker_id)
        link.calls += 1
        try:
            yield link
        finally:
            link.calls -= 1
            if link.retired and not link.calls:
                self._close(link)

    async def _upgrade(self) -> None:
        """Now and then the direct ways of all relayed links, until there is none."""
        while True:
            await asyncio.sleep(self._upgrade_every_s)
            await asyncio.gather(*(self._try_direct(worker_id) for worker_id in self.relayed))

    async def _try_direct(self, worker_id: WorkerId) -> None:
        try:
            path = await self._paths.open_direct(worker_id)
        except NoPath:
            return
        before = self._links.get(worker_id)
        if before is None or not before.relay_id:
            await path.channel.close()
            return
        self._links[worker_id] = Link(path)
        before.retired = True
        if not before.calls:
            self._close(before)

    # ---------------------------------------------------------------- pushes

    async def push(
        self,
        to: WorkerId,
        method: str,
        header: data_pb2.Header,
        buffers: Sequence[frames.Buffer],
        *,
        kind: str,
        background: Callable[[], None] | None = None,
    ) -> Receipt:
        """One transfer to a peer: `method` is "Forward", "Backward", "Contribute", "Aggregate", "Pair" or "Group".

        Args:
            kind: under which the bytes are counted.
            background: nobody waits for it, so it gives way to the others; called whenever some of its bytes have left.

        Raises:
            PushError: it failed.
        """
        tries = 0
        waited_for = background is None
        self.pushes += waited_for
        try:
            while True:
                tries += 1
                try:
                    return await self._push_once(
                        to, method, header, buffers, kind, background, asks=tries > 1
                    )
                except AnswerLost as error:
                    if tries == ANSWER_LOST_TRIES:
                        raise PushError(str(error), certain=False) from None
                except PushError as error:
                    # Only a receiver's own word says more of an earlier try than that its answer was lost.
                    if tries > 1 and error.certain and error.refusal is Refusal.UNSPECIFIED:
                        raise PushError(str(error), certain=False) from None
                    raise
        finally:
            self.pushes -= waited_for

    async def _push_once(
        self,
        to: WorkerId,
        method: str,
        header: data_pb2.Header,
        buffers: Sequence[frames.Buffer],
        kind: str,
        background: Callable[[], None] | None,
        *,
        asks: bool,
    ) -> Receipt:
        async with self._using(to) as link:
            return await self._pushed(link, to, method, header, buffers, kind, background, asks=asks)

    async def _pushed(
        self,
        link: Link,
        to: WorkerId,
        method: str,
        header: data_pb2.Header,
        buffers: Sequence[frames.Buffer],
        kind: str,
        background: Callable[[], None] | None,
        *,
        asks: bool,
    ) -> Receipt:
        call: grpc.aio.StreamUnaryCall[data_pb2.Frame, object] = getattr(link.stub, method)(
            metadata=self._metadata
        )
        try:
            with self._meters.timing("send"):
                await self._uplink.travels()
                sent_bytes = await self._write(call, header, buffers, background, asks=asks)
                self._meters.sent(kind, sent_bytes)
                async with asyncio.timeout(self._stall_s):
                    receipt = _receipt(await call)
                await self._uplink.travels()
                return receipt
        except TimeoutError:
            raise PushError(
                f"{to} did not take or answer a transfer for {self._stall_s:.0f} s", certain=False
            ) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LIBRARY_ERROR:
                raise AnswerLost(f"{to} ended the call while it was written to") from None
            raise _explained(error, to) from None
        finally:
            call.cancel()

    async def _write(
        self,
        call: grpc.aio.StreamUnaryCall[data_pb2.Frame, object],
        header: data_pb2.Header,
        buffers: Sequence[frames.Buffer],
        background: Callable[[], None] | None,
        *,
        asks: bool,
    ) -> int:
        """Writes the frames, until the other side has ended the call: it refused, or it has the transfer already.

        With `asks` all but the first wait for its admission: a round trip more, and no ended call is written to.

        A write that fails for that reason raises something of the library's own; the call's real status comes with
        its answer, which the caller awaits anyway.
        """
        sent_bytes = 0
        waited_for = background is None
        chunk_bytes = frames.CHUNK_BYTES if waited_for else BACKGROUND_CHUNK_BYTES
        self._writing += waited_for
        try:
            for frame in frames.write_transfer(header, buffers, chunk_bytes=chunk_bytes):
                if background is not None:
                    await give_way(lambda: self._writing > 0)
                await self._uplink.leaves(frame.ByteSize())
                async with asyncio.timeout(self._stall_s):
                    await call.write(frame)
                sent_bytes += frame.ByteSize()
                if background is not None:
                    background()
                if asks and not await self._admitted(call):
                    return sent_bytes
                asks = False
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass
        finally:
            self._writing -= waited_for
        return sent_bytes

    async def _admitted(self, call: grpc.aio.StreamUnaryCall[data_pb2.Frame, object]) -> bool:
        """False when the call has ended instead."""
        async with asyncio.timeout(self._stall_s):
            metadata = await call.initial_metadata()
        return ADMITTED_METADATA_KEY in (metadata or ())

    async def tell(self, to: WorkerId, word: PairWord) -> None:
        """A word to the partner of a swap.

        Raises:
            PushError: it was refused, or not answered.
        """
        message = data_pb2.PairWord()
        convert.to_proto(word, message)
        async with self._using(to) as link:
            await self._told(link, to, message)

    async def _told(self, link: Link, to: WorkerId, message: data_pb2.PairWord) -> None:
        await self._uplink.leaves(message.ByteSize())
        await self._uplink.travels()
        self._meters.sent("exchange", message.ByteSize())
        try:
            async with asyncio.timeout(WORD_S):
                await link.stub.TellPair(message, metadata=self._metadata)
        except TimeoutError:
            raise PushError(f"{to} did not answer for {WORD_S:.0f} s", certain=False) from None
        except grpc.aio.AioRpcError as error:
            raise _explained(error, to) from None
        await self._uplink.travels()

    # ---------------------------------------------------------------- state

    async def fetch_state(
        self, donor: WorkerId, request: data_pb2.StateRequest
    ) -> AsyncIterator[data_pb2.Frame]:
        """The frames of a donor's answer.

        Raises:
            PushError: the connection or the transfer failed, or the donor refused.
        """
        async with self._using(donor) as link:
            call = link.stub.FetchState(request, metadata=self._metadata)
            try:
                while True:
                    async with asyncio.timeout(self._stall_s):
                        frame = await call.read()
                    if not isinstance(frame, data_pb2.Frame):
                        return
                    yield frame
            except TimeoutError:
                raise PushError(f"{donor} sent nothing for {self._stall_s:.0f} s", certain=True) from None
            except grpc.aio.AioRpcError as error:
                raise _explained(error, donor) from None
            finally:
                call.cancel()


def _receipt(message: object) -> Receipt:
    assert isinstance(message, data_pb2.Receipt)
    return convert.from_proto(message, Receipt)


def _explained(error: grpc.aio.AioRpcError, to: WorkerId) -> PushError:
    refused = refused_error(error)
    if refused is not None:
        return PushError(f"{to} refused: {refused}", certain=True, refusal=refused.refusal)
    reason = f"{to}: {error.code().name.lower()}: {error.details() or 'no details'}"
    return PushError(reason, certain=error.code() in _NEVER_TAKEN)
