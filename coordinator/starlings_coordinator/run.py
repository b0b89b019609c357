"""The coordinator's process from start to end: `run_coordinator(options)` returns the exit code.

    lock -> job, log, core -> CA, ports, children -> the loop -> an orderly end

What can be wrong before anybody could connect raises an error with `exit_code` and one sentence that names the fix.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from starlings_coordinator.assembly import SERVER_GRACE_S, Coordinator, Job, open_store, restore_core
from starlings_coordinator.clock import SystemClock
from starlings_coordinator.core.events import Booted
from starlings_coordinator.descriptors import raise_descriptor_limit
from starlings_coordinator.enrolment import EnrolmentAuthority
from starlings_coordinator.journal import Journal
from starlings_coordinator.last_used import forget_use, note_use, refuse_copy
from starlings_coordinator.logs import log_to
from starlings_coordinator.options import (
    CoordinatorOptions,
    Observer,
    silent,
)
from starlings_coordinator.preparing import ensure_prepared
from starlings_coordinator.signing import AssignmentSigner
from starlings_job.checkpoint_owner import Owner
from starlings_job.prepared import checkpoint_url
from starlings_protos.locks import DirectoryLock
from starlings_protos.notify import Notifier

logger = logging.getLogger(__name__)

INTERRUPTED = 130
_TICK_S = 1.0


def run_coordinator(options: CoordinatorOptions, observer: Observer = silent) -> int:
    """Serves the job until it has ended, or until SIGINT or SIGTERM. Returns the exit code.

    Raises:
        Exception: with an `exit_code` of the sheet and one sentence for people, when it cannot serve.
    """
    raise_descriptor_limit()
    notifier = Notifier.from_environment()
    notifier.status("prepares the job")
    ensure_prepared(options.directory, options.job_file)
    # What is loaded stays: the collector need not look at it again and again while a thousand workers talk.
    gc.freeze()
    with DirectoryLock(options.directory), log_to(options.directory / "logs" / "coordinator.log"):
        return asyncio.run(serve(options, observer, notifier))


async def serve(options: CoordinatorOptions, observer: Observer, notifier: Notifier | None = None) -> int:
    """As `run_coordinator` within a running event loop, for a directory that is prepared and locked by the caller."""
    clock, notifier = SystemClock(), notifier or Notifier()
    notifier.status("reads the log")
    observer = _also(notifier, observer)
    async with AsyncExitStack() as stack:
        job = Job.load(options)
        stack.callback(job.records.close)
        if assumed := await refuse_copy(options.directory, job.spec.job.name):
            logger.warning("%s", assumed)
            observer("announce", {"kind": "moved", "text": assumed})
        journal = Journal(open_store(options, job.spec), clock)
        stack.push_async_callback(journal.close)
        loop = asyncio.get_running_loop()

        def observe(kind: str, text: str) -> None:
            # From threads of the enrolment service. A worker joins, for people, when its stream opens.
            kind = "enrolled" if kind == "join" else kind
            logger.info("%s: %s", kind, text)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(observer, "announce", {"kind": kind, "text": text})

        authority = EnrolmentAuthority(options.directory, job.spec.job.name, observe=observe)
        if "://" not in (url := checkpoint_url(options.directory, job.spec)):
            # Other storage is for the keeper, which has what it takes to read it.
            owner = Owner(job.spec.job.name, authority.ca.pin)
            await asyncio.to_thread(owner.refuse_others, url, options.directory)
        signer_key = AssignmentSigner(authority.assignment_key, job.spec.job.name).key_der
        core = await restore_core(job, journal, signer_key)
        parts = Coordinator(options, observer, job, core, journal, authority, clock)
        endpoints = parts.open_ports()
        note_use(options.directory, endpoints.control)
        stack.callback(forget_use, options.directory)
        interrupted = stack.enter_context(_signals())
        async with _running(parts):
            parts.loop.post_soon(Booted())
            await parts.listen(endpoints)
            if notifier.listening:
                stack.callback(asyncio.create_task(_tick(parts, notifier)).cancel)
            return await _until_over(parts, interrupted, observer)


def _also(notifier: Notifier, observer: Observer) -> Observer:
    """Tells the observer everything, and the service manager what is for it."""

    def observe(kind: str, fields: Mapping[str, Any]) -> None:
        match kind:
            case "status":
                notifier.status(str(fields["line"]))
            case "ending" | "ended":
                notifier.status(str(fields["reason"]))
                notifier.stopping()
            case _:
                pass
        observer(kind, fields)

    return observe


async def _tick(parts: Coordinator, notifier: Notifier) -> None:
    """Ready once the core has handled what its log left open; alive as long as it handles events and stores records."""
    while True:
        await parts.loop.turn()
        notifier.ready()
        notifier.tick()
        await asyncio.sleep(_TICK_S)


async def _until_over(parts: Coordinator, interrupted: asyncio.Event, observer: Observer) -> int:
    """Waits for the job's end or a signal, then for the workers to leave."""
    signalled = asyncio.create_task(interrupted.wait())
    try:
        either: list[asyncio.Future[Any]] = [signalled, parts.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not parts.ended.done():
            observer("ending", {"reason": "interrupted"})
            return 0
        ended = parts.ended.result()
        parts.loop.ended.set()
        observer("ended", {"exit_code": ended.exit_code, "reason": ended.reason})
        gone = asyncio.create_task(parts.sessions.wait_empty(parts.options.linger_s))
        await asyncio.wait({signalled, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        return ended.exit_code
    finally:
        signalled.cancel()


@asynccontextmanager
async def _running(parts: Coordinator) -> AsyncIterator[None]:
    """The loop, the children and the timers; what fails in one of them ends the whole."""
    body = asyncio.current_task()
    assert body is not None
    failed: list[BaseException] = []
    leaving = False

    async def guard(work: Any) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failed.append(error)
            if not leaving:
                body.cancel()

    background = [asyncio.create_task(guard(child.run())) for child in parts.children]
    background += [asyncio.create_task(guard(parts.renew())), asyncio.create_task(guard(parts.report()))]
    background.append(asyncio.create_task(guard(parts.reach.run())))
    if parts.bulletin is not None:
        background.append(asyncio.create_task(guard(parts.bulletin.run())))
    main = asyncio.create_task(guard(parts.loop.run()))
    try:
        try:
            yield
        except asyncio.CancelledError:
            if not failed:
                raise
            body.uncancel()  # it was us: the reason is raised below
    finally:
        leaving = True
        await parts.leave("the coordinator is leaving")
        parts.loop.stop()
        await asyncio.wait({main}, timeout=SERVER_GRACE_S)
        for task in (*background, main):
            task.cancel()
        await asyncio.gather(*background, main, return_exceptions=True)
        if failed:
            # Also what failed while we were leaving.
            raise failed[0]
        await parts.loop.flush()


@contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """The event that SIGINT or SIGTERM set; the second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def received() -> None:
        if interrupted.is_set():
            os._exit(INTERRUPTED)
        interrupted.set()

    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not in the main thread: whoever embeds us handles signals
            previous[number] = signal.signal(number, lambda *_: loop.call_soon_threadsafe(received))
    try:
        yield interrupted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
