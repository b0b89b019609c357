"""The outcome of Load: a span's blocks fetched from donors at one version, checked, on the device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starlings_job.profile import Profile
from starlings_protos import data_pb2
from starlings_protos.messages import KEEPER, Assignment, WorkerId
from starlings_protos.state_transfer import OpenTransfer, StateTransferError, fetch_block
from starlings_worker.computer import Computer
from starlings_worker.core.effects import Load
from starlings_worker.core.events import LoadFailed, SpanLoaded
from starlings_worker.errors import EngineFault
from starlings_worker.stage import HeldSpan

T = TypeVar("T")
# Names, shapes and hashes travel beside the tensors' bytes that the profile counts.
_HEADER_ALLOWANCE_BYTES = 1 << 20


class StateSource(Protocol):
    """What of `links.Links` is needed here."""

    def fetch_state(
        self, donor: WorkerId, request: data_pb2.StateRequest
    ) -> AsyncIterator[data_pb2.Frame]: ...


class OnDevice(Protocol):
    """Runs a function on the compute thread."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Loader:
    """Fetches one block after another, so that never more than one is held twice.

    The keeper is asked first, then the other donors in the assignment's order; a broken transfer goes on at
    the byte where it ended, with another donor if need be.
    """

    computer: Computer
    source: StateSource
    profile: Profile
    on_device: OnDevice
    log: Callable[[str, str], None]

    async def load(self, effect: Load) -> SpanLoaded | LoadFailed:
        assignment = effect.assignment
        try:
            held = await self.on_device(lambda: self.computer.prepare(effect))
            donors = self._donors(assignment)
            for block in held.blocks:
                await self._load_block(held, block, assignment.version, donors)
            digests = await self.on_device(lambda: self.computer.install(held, effect))
        except (StateTransferError, EngineFault, MemoryError, RuntimeError) as error:
            # torch.OutOfMemoryError is a RuntimeError; so is an allocation that fails on a CPU.
            await self.on_device(self.computer.drop)
            lines = str(error).splitlines()
            return LoadFailed(assignment.plan_version, lines[0] if lines else type(error).__name__)
        return SpanLoaded(assignment.plan_version, assignment.version, digests)

    async def _load_block(
        self, held: HeldSpan, block: str, version: int, donors: dict[str, OpenTransfer]
    ) -> None:
        tensors = await fetch_block(
            donors,
            version=version,
            block=block,
            optimizer=version > 0,
            limit_bytes=self.profile.block_limit_bytes() + _HEADER_ALLOWANCE_BYTES,
            on_failure=lambda donor, error: self.log("warning", f"fetching {block} from {donor}: {error}"),
        )
        await self.on_device(lambda: held.load_block(block, tensors, version))

    def _donors(self, assignment: Assignment) -> dict[str, OpenTransfer]:
        """How to call each donor, the keeper first."""
        ids = sorted((peer.worker_id for peer in assignment.donors), key=lambda i: i != KEEPER)
        return {worker_id: self._opener(worker_id) for worker_id in ids}

    def _opener(self, donor: WorkerId) -> OpenTransfer:
        return lambda request: self.source.fetch_state(donor, request)
