"""Writing one checkpoint: block by block from workers to storage, one in memory at a time, the manifest last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from starlings_coordinator.keeper.library import NotHeld, StateLibrary
from starlings_coordinator.keeper.pull import Puller, PullError
from starlings_job.checkpoint import CheckpointWriter
from starlings_job.checkpoint_owner import Owner
from starlings_job.errors import JobError
from starlings_job.profile import Profile
from starlings_protos.messages import Peer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockSource:
    block: str
    donors: tuple[Peer, ...]
    # "" when not known.
    digest: str


@dataclass(frozen=True, slots=True)
class SaveOrder:
    version: int
    tokens: int
    blocks: tuple[BlockSource, ...]
    owner: Owner
    job_digest: str


@dataclass(frozen=True, slots=True)
class Written:
    path: str
    byte_count: int


class SaveFailed(Exception):
    """The version was not written; the one before it is untouched. `exit_code` is of the sheet."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def save(
    order: SaveOrder,
    *,
    puller: Puller,
    library: StateLibrary,
    profile: Profile,
    directory: Path,
    url: str,
    keep: int,
) -> Written:
    """Raises SaveFailed."""
    _check_complete(order.blocks, profile)
    try:
        # Also here: two jobs may have begun with an empty place.
        await asyncio.to_thread(order.owner.refuse_others, url, directory)
        writer = await _in_thread(CheckpointWriter, url, order.version, keep=keep)
    except (JobError, OSError) as error:
        raise _failed(error) from error
    try:
        for source in order.blocks:
            reference = await asyncio.to_thread(library.tensors, 0, source.block, optimizer=False)
            fetched = await puller.block(
                order.version,
                source.block,
                source.donors,
                reference=reference,
                digest=source.digest,
                limit_bytes=profile.block_limit_bytes(),
            )
            await _in_thread(writer.add_block, source.block, fetched.tensors, fetched.optimizer_steps)
            # Before the next one is fetched: one block at a time.
            del fetched, reference
        facts = {"tokens": order.tokens, **order.owner.facts, "job_digest": order.job_digest}
        library.changed()
        manifest = await _in_thread(writer.finish, facts)
    except PullError as error:
        raise SaveFailed(f"block {source.block}: {error}") from None
    except (JobError, NotHeld, OSError) as error:
        raise _failed(error) from error
    finally:
        # Harmless when it was finished; also when this task is cancelled.
        with contextlib.suppress(OSError):
            writer.abort()
        library.changed()
    return Written(f"{url.rstrip('/')}/{order.version:08d}", manifest.byte_count)


async def _in_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """As `asyncio.to_thread`, but a cancelled caller waits for the call: two saves never write at the same time."""
    call_under_way = asyncio.create_task(asyncio.to_thread(call, *arguments, **options))
    cancelled = False
    while not call_under_way.done():
        try:
            await asyncio.wait({call_under_way})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        call_under_way.exception()  # seen, so that nobody complains about it
        raise asyncio.CancelledError
    return call_under_way.result()


def _check_complete(blocks: Sequence[BlockSource], profile: Profile) -> None:
    named = [source.block for source in blocks]
    if sorted(named) != sorted(profile.block_names):
        missing = sorted(set(profile.block_names) - set(named))
        raise SaveFailed(
            f"the order does not name every block once (missing: {', '.join(missing) or 'none'})"
        )


def _failed(error: Exception) -> SaveFailed:
    return SaveFailed(str(error) or type(error).__name__, int(getattr(error, "exit_code", 1)))
