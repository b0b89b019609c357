"""The outcome of Load: a span's blocks fetched from donors at one version, checked, on the device."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from starlings_job.profile import Profile
from starlings_protos import data_pb2
from starlings_protos.messages import KEEPER, Assignment, Peer, Refusal, Stage, WorkerId
from starlings_protos.state_fetch import Donor, DonorBusy, DonorLacks, Fetcher, fetch_blocks
from starlings_protos.state_transfer import BlockInbox, Place, StateTransferError, announced
from starlings_worker.computer import Computer
from starlings_worker.core.effects import Load
from starlings_worker.core.events import LoadFailed, SpanLoaded
from starlings_worker.errors import EngineFault
from starlings_worker.links import PushError
from starlings_worker.stage import TIED, HeldSpan

T = TypeVar("T")
# Names, shapes and hashes travel beside the tensors' bytes that the profile counts.
_HEADER_ALLOWANCE_BYTES = 1 << 20
# Blocks under way at once: enough to keep several donors busy.
_AT_ONCE = 4
# Where a block is not written in place it is held twice while it travels; so many bytes of that at most, or one block.
_IN_TRANSIT_BYTES = 256 << 20


class StateSource(Protocol):
    """What of `links.Links` is needed here."""

    def fetch_state(
        self, donor: WorkerId, request: data_pb2.StateRequest
    ) -> AsyncIterator[data_pb2.Frame]: ...


class OnDevice(Protocol):
    """Runs a function on the compute thread."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(slots=True)
class Donors:
    """Who gives state and updates: what the last assignment that names some said, also while a load goes on."""

    source: StateSource
    peers: tuple[Peer, ...] = ()

    def of_block(self, stages: Sequence[Stage], names: Sequence[str]) -> list[Donor]:
        """For `Fetcher`: committed blocks."""
        held = {
            peer.worker_id: {names[b] for s in peer.span.stages if s < len(stages) for b in stages[s].blocks}
            for peer in self.peers
            if peer.span is not None
        }
        return [
            Donor(
                peer.worker_id,
                self._opener(peer.worker_id),
                lambda block, who=peer.worker_id: who not in held or block in held[who],  # type: ignore[misc]
                peer.worker_id == KEEPER,
            )
            for peer in self.peers
        ]

    def of_update(self, group: str, stage_count: int) -> list[Donor]:
        """For `Fetcher`: what a group exchanged. The keeper exchanges nothing."""
        wanted = {0, stage_count - 1} if group == TIED else {int(group.partition(":")[2])}
        return [
            Donor(peer.worker_id, self._opener(peer.worker_id))
            for peer in self.peers
            if peer.worker_id != KEEPER and (peer.span is None or wanted & set(peer.span.stages))
        ]

    def _opener(self, donor: WorkerId) -> Callable[[data_pb2.StateRequest], AsyncIterator[data_pb2.Frame]]:
        async def transfer(request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
            try:
                async for frame in self.source.fetch_state(donor, request):
                    yield frame
            except PushError as error:
                if error.refusal is Refusal.BUSY:
                    raise DonorBusy(str(error)) from None
                if error.refusal is Refusal.NOT_HELD:
                    raise DonorLacks(str(error)) from None
                raise

        return transfer


@dataclass(slots=True)
class Loader:
    """Fetches several blocks at once, from several donors, and writes them where they belong: beside the span itself no
    more than a few chunks, or on a device that is not the host a few blocks, are in memory.
    """

    computer: Computer
    donors: Donors
    profile: Profile
    on_device: OnDevice
    log: Callable[[str, str], None]
    rng: random.Random = field(default_factory=random.Random)

    async def load(self, effect: Load) -> SpanLoaded | LoadFailed:
        assignment = effect.assignment
        try:
            held = await self.on_device(lambda: self.computer.prepare(effect))
            await self._fill(held, assignment)
            digests = await self.on_device(lambda: self.computer.install(held, effect))
        except (StateTransferError, EngineFault, MemoryError, RuntimeError) as error:
            # torch.OutOfMemoryError is a RuntimeError; so is an allocation that fails on a CPU.
            await self.on_device(self.computer.drop)
            lines = str(error).splitlines()
            return LoadFailed(assignment.plan_version, lines[0] if lines else type(error).__name__)
        steps = dict(held.optimizer_steps)
        return SpanLoaded(assignment.plan_version, assignment.version, digests, steps)

    async def _fill(self, held: HeldSpan, assignment: Assignment) -> None:
        version = assignment.version
        limit_bytes = self.profile.block_limit_bytes() + _HEADER_ALLOWANCE_BYTES
        fetcher = Fetcher(
            lambda: self.donors.of_block(assignment.stages, held.description.blocks),
            version,
            version > 0,
            limit_bytes,
            self.rng,
            lambda donor, block, error: self.log("warning", f"fetching {block} from {donor}: {error}"),
        )

        async def done(block: str, inbox: BlockInbox) -> None:
            if held.places(block, version) is None:
                tensors = inbox.tensors()
                await self.on_device(lambda: held.load_block(block, tensors, version))
            if version > 0:
                held.note_optimizer_steps(block, inbox.optimizer_steps or version)

        at_once = (
            _AT_ONCE if held.device.type == "cpu" else max(1, min(_AT_ONCE, _IN_TRANSIT_BYTES // limit_bytes))
        )
        await fetch_blocks(
            fetcher, held.blocks, lambda block: _place(held, block, version), done, at_once=at_once
        )


def _place(held: HeldSpan, block: str, version: int) -> Place | None:
    """Straight into the span's memory, where that is the host's."""
    places = held.places(block, version)
    if places is None:
        return None

    def place(header: data_pb2.Header) -> Sequence[memoryview]:
        expected = {name: (raw.data_type, raw.shape) for name, raw in places.items()}
        found = announced(header)
        if found != expected:
            unlike = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
            raise StateTransferError(
                f"block {block} came with other tensors than the model has: {unlike[:3]}"
            )
        return [places[tensor.name].data for tensor in header.tensors]

    return place
