"""`starlings leave` and `health`: for the workers that run on this machine, by files in their directories."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import typer

from starlings.commands.options import JsonOption
from starlings.directories import workers_root
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import emit, say
from starlings_protos.locks import Holder, holder_of
from starlings_worker.local_files import (
    Phase,
    Request,
    Running,
    ask_to_leave,
    ask_to_report,
    read_running,
)

_LOOK_AGAIN_S = 0.2
# A worker looks for requests about once a second.
ANSWER_WITHIN_S = 10.0
# Beyond the time that leaving in order may take: ending the engine, writing the last files.
END_WITHIN_S = 30.0

NameArgument = Annotated[
    str | None,
    typer.Argument(help="The swarm's job; not needed when one worker runs here.", metavar="[JOB]"),
]
WorkerDirOption = Annotated[
    Path | None, typer.Option("--dir", help="The directory that `starlings join` was given.", metavar="DIR")
]


def register(app: typer.Typer) -> None:
    app.command()(leave)
    app.command()(health)


@guarded
def leave(
    job: NameArgument = None,
    directory: WorkerDirOption = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every worker of this user's.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="At once, as a second Ctrl-C: nothing is finished or handed over.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Ask a worker on this machine to leave in order, and wait until it is gone.

    It takes no new work, finishes what is under way, hands over what only it holds, and ends with exit code
    0. `starlings join` comes back as the same worker.

    Examples:

        starlings leave

        starlings leave --dir /srv/starlings/worker --now
    """
    seats = _occupied(job, directory, everyone)
    for seat in seats:
        seat.ask(partial(ask_to_leave, seat.directory, now=now))
        _show(seat, "asked", "asked to end at once" if now else "asked to leave in order", json_output)
    for seat in seats:
        _see_off(seat, now, json_output)
    _await_processes(seats)


@guarded
def health(
    job: NameArgument = None, directory: WorkerDirOption = None, json_output: JsonOption = False
) -> None:
    """Can the worker on this machine do its work? Exit code 0: it lives, has an engine, and is welcome.

    Otherwise exit code 3 and the reason: for health checks. (`starlings status` is that of a coordinator.)

    Example:  starlings health --dir /srv/starlings/worker
    """
    for seat in _occupied(job, directory, False):
        running = seat.ask(partial(ask_to_report, seat.directory))
        if running.phase is not Phase.READY:
            raise CommandError(
                f"The worker in {seat.directory} cannot work now ({running.phase}): {running.text}",
                ExitCode.UNREACHABLE,
            )
        _show(seat, "ready", running.text, json_output)


# ------------------------------------------------------------------ which worker


@dataclass(eq=False)
class Seat:
    """A directory in which a worker runs: one device's."""

    directory: Path
    holder: Holder
    running: Running | None = None

    def ask(self, send: Callable[[Running], Request]) -> Running:
        """Sends a request and waits until the worker has seen it (or is gone); returns what it said then.

        Raises:
            CommandError: it does not answer. OSError: no permission.
        """
        deadline = time.monotonic() + ANSWER_WITHIN_S
        sent: Request | None = None
        while (holder := holder_of(self.directory)) is not None:
            running = read_running(self.directory)
            # A file of an earlier life lies there for a moment while the next one starts.
            if running is not None and running.process_id == holder.process_id:
                self.holder, self.running = holder, running
                if sent is None or sent.life != running.life:
                    sent = send(running)
                elif running.answered == sent.id:
                    return running
            if time.monotonic() > deadline:
                raise CommandError(
                    f"{holder} works in {self.directory}, but does not answer: see what it does (its terminal, its "
                    "log), and end it with Ctrl-C there if need be.",
                    ExitCode.UNREACHABLE,
                )
            time.sleep(_LOOK_AGAIN_S)
        last = read_running(self.directory)
        if sent is None or last is None or last.life != sent.life:
            raise CommandError(f"No worker runs in {self.directory} any more.", ExitCode.UNREACHABLE)
        self.running = last
        return last

    @property
    def name(self) -> str:
        return self.running.worker_id[:7] if self.running is not None else ""


def _occupied(job: str | None, directory: Path | None, everyone: bool) -> list[Seat]:
    """The seats of the worker that is meant; of one process, unless `everyone` or a directory was said.

    Raises:
        CommandError: none runs there, or several do.
    """
    if sum((job is not None, directory is not None, everyone)) > 1:
        raise CommandError("Say which worker once: JOB, --dir DIR, or --all.", ExitCode.USAGE)
    if directory is not None:
        roots: Iterable[Path] = [directory]
    elif job is not None:
        roots = [workers_root() / job]
    else:
        roots = sorted(workers_root().glob("*"))
    seats = [
        Seat(place, holder)
        for root in roots
        for place in (root, *sorted(root.glob("devices/*")))
        if (holder := _holder(place)) is not None
    ]
    if not seats:
        raise _nobody(job, directory)
    if job is None and directory is None and not everyone and len({s.holder.process_id for s in seats}) > 1:
        names = ", ".join(str(path) for path in dict.fromkeys(_root_of(s.directory) for s in seats))
        raise CommandError(
            f"Several workers run here: say which with --dir ({names}), or --all.", ExitCode.USAGE
        )
    return seats


def _holder(place: Path) -> Holder | None:
    try:
        return holder_of(place)
    except PermissionError:
        raise CommandError(
            f"{place} belongs to another user: ask as that one, or as an administrator.", ExitCode.USAGE
        ) from None


def _root_of(place: Path) -> Path:
    return place.parents[1] if place.parent.name == "devices" else place


def _nobody(job: str | None, directory: Path | None) -> CommandError:
    where = directory or (workers_root() / job if job is not None else workers_root())
    last = read_running(where)
    if last is not None:
        ended = f"the last one ended with exit code {last.exit_code}: {last.text}"
        how = ended if last.phase is Phase.ENDED else f"the last one was killed while it said: {last.text}"
        return CommandError(f"No worker runs in {where}; {how}", ExitCode.UNREACHABLE)
    hint = "" if directory is not None else " One that was started with --dir DIR is found by --dir DIR."
    return CommandError(
        f"No worker runs in {where}: `starlings join` starts one.{hint}", ExitCode.UNREACHABLE
    )


# ------------------------------------------------------------------ until it is gone


def _see_off(seat: Seat, now: bool, as_json: bool) -> None:
    """Follows what the worker says until its directory is free.

    Raises:
        CommandError: it takes longer than it may.
    """
    assert seat.running is not None
    allowed_s = END_WITHIN_S + (0.0 if now else seat.running.leave_within_s)
    deadline = time.monotonic() + allowed_s
    shown = ""
    while not _gone(seat):
        if seat.running.text != shown:
            shown = seat.running.text
            _show(seat, "leaving", shown, as_json)
        if time.monotonic() > deadline:
            raise CommandError(
                f"The worker in {seat.directory} is still there after {allowed_s:.0f} s: end it with `starlings leave "
                f"--dir {seat.directory} --now`.",
                ExitCode.UNREACHABLE,
            )
        time.sleep(_LOOK_AGAIN_S)
    orderly = seat.running.phase is Phase.ENDED
    _show(seat, "left", seat.running.text if orderly else "gone without a last word: it was killed", as_json)


def _gone(seat: Seat) -> bool:
    """Whether this life is over; `seat.running` is what it said last."""
    free = holder_of(seat.directory) is None
    running = read_running(seat.directory)
    if running is None or seat.running is None or running.life != seat.running.life:
        return True  # the next one has moved in
    seat.running = running
    return free


def _await_processes(seats: list[Seat]) -> None:
    """A directory is free a moment before its process is gone; one that serves other devices stays."""
    asked = {seat.holder.process_id for seat in seats if seat.holder.host == socket.gethostname()}
    for seat in seats:
        places = (_root_of(seat.directory), *_root_of(seat.directory).glob("devices/*"))
        asked -= {holder.process_id for place in places if (holder := _holder(place)) is not None}
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and any(_lives(process_id) for process_id in asked):
        time.sleep(_LOOK_AGAIN_S)


def _lives(process_id: int) -> bool:
    try:
        return process_id > 0 and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _show(seat: Seat, kind: str, text: str, as_json: bool) -> None:
    if as_json:
        worker_id = seat.running.worker_id if seat.running is not None else ""
        code = seat.running.exit_code if seat.running is not None else None
        record = {"event": kind, "worker_id": worker_id, "directory": str(seat.directory), "text": text}
        emit(record | ({"exit_code": code} if kind == "left" else {}))
    else:
        say(f"{seat.name} {text}".strip())
