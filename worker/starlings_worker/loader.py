"""The outcome of Load: a span's blocks fetched from donors at one version, checked, on the device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from starlings_job.profile import Profile
from starlings_protos import data_pb2
from starlings_protos.messages import KEEPER, Assignment, WorkerId
from starlings_protos.state_transfer import OpenTransfer, StateTransferError, fetch_block
from starlings_worker.computer import Computer
from starlings_worker.core.effects import Load
from starlings_worker.core.events import LoadFailed, SpanLoaded
from starlings_worker.errors import EngineFault

T = TypeVar("T")


class StateSource(Protocol):
    """What of `links.Links` is needed here."""

    def fetch_state(
        self, donor: WorkerId, request: data_pb2.StateRequest
    ) -> AsyncIterator[data_pb2.Frame]: ...


# Runs a function on the compute thread.
OnDevice = Callable[[Callable[[], T]], Awaitable[T]]


async def load_span(
    load: Load,
    computer: Computer,
    source: StateSource,
    profile: Profile,
    on_device: Callable[[Callable[[], object]], Awaitable[object]],
    log: Callable[[str, str], None],
) -> SpanLoaded | LoadFailed:
    """Fetches one block after another, so that never more than one is held twice.

    The keeper is asked first, then the other donors in the assignment's order; a broken transfer goes on at
    the byte where it ended, with another donor if need be.
    """
    assignment = load.assignment
    try:
        digests = await _load(assignment, load, computer, source, profile, on_device, log)
    except (StateTransferError, EngineFault, MemoryError) as error:
        await on_device(computer.drop)
        return LoadFailed(assignment.plan_version, str(error) or "out of memory")
    except RuntimeError as error:
        # torch.OutOfMemoryError is a RuntimeError; so is an allocation that fails on a CPU.
        await on_device(computer.drop)
        return LoadFailed(assignment.plan_version, str(error).splitlines()[0])
    return SpanLoaded(assignment.plan_version, assignment.version, digests)


async def _load(
    assignment: Assignment,
    load: Load,
    computer: Computer,
    source: StateSource,
    profile: Profile,
    on_device: Callable[[Callable[[], object]], Awaitable[object]],
    log: Callable[[str, str], None],
) -> dict[str, str]:
    from starlings_worker.stage import HeldSpan

    held = await on_device(lambda: computer.prepare(load))
    assert isinstance(held, HeldSpan)
    donors = donors_of(assignment, source)
    for block in held.blocks:
        tensors = await fetch_block(
            donors,
            version=assignment.version,
            block=block,
            optimizer=assignment.version > 0,
            limit_bytes=profile.block_limit_bytes() + (1 << 20),
            on_failure=lambda donor, error: log("warning", f"fetching {block} from {donor}: {error}"),
        )
        await on_device(lambda: held.load_block(block, tensors, assignment.version))
        del tensors
    digests = await on_device(lambda: computer.install(held, load))
    assert isinstance(digests, dict)
    return digests


def donors_of(assignment: Assignment, source: StateSource) -> dict[str, OpenTransfer]:
    """How to call each donor, the keeper first."""
    ids = [peer.worker_id for peer in assignment.donors]
    ids.sort(key=lambda worker_id: worker_id != KEEPER)
    return {worker_id: _opener(source, worker_id) for worker_id in ids}


def _opener(source: StateSource, donor: WorkerId) -> OpenTransfer:
    return lambda request: source.fetch_state(donor, request)
