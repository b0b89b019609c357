"""`starlings watch`: follows a swarm over the MQTT bus alone. The coordinator is not asked."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from starlings.commands.options import JsonOption
from starlings.commands.swarm import read_invite
from starlings.failures import guarded
from starlings.lookout import Lookout, broker_trouble, find_lookout
from starlings.output import Throttle, console, emit, say
from starlings.views.bus import picture_line, picture_panel
from starlings.views.bus_json import change_record, picture_record
from starlings.views.bus_picture import BusPicture, Change
from starlings.views.figures import duration
from starlings_protos.bus.client import BusClient
from starlings_protos.bus.topics import all_of

# The first connection: longer, and the broker cannot be reached.
CONNECT_WITHIN_S = 15.0
# `--once`: what is retained comes at once; when no new worker has come for this long, the picture is whole.
QUIET_S = 0.4
# ... and an empty bus is believed after this long.
EMPTY_S = 2.0
# How far training is comes in notices, which are not retained: one a second, as long as it moves.
PROGRESS_S = 2.5
ONCE_WITHIN_S = 10.0
# Silence on a bus that works is worth a word after this long.
SILENCE_S = 5.0
_LOOK_AGAIN_S = 0.25
CLOSE_WITHIN_S = 1.0
# What every member of a large swarm says at once, several times over.
WAITING_LIMIT = 100_000


def register(app: typer.Typer) -> None:
    app.command()(watch)


@guarded
def watch(
    target: Annotated[
        str | None,
        typer.Argument(
            help="An observer's invite ('-': from standard input), or the name or directory of a job.",
            metavar="[INVITE|JOB]",
        ),
    ] = None,
    invite_file: Annotated[
        Path | None, typer.Option(help="Read the invite from a file.", metavar="FILE")
    ] = None,
    url: Annotated[
        str,
        typer.Option(help="The broker, mqtts://host:port, instead of the job's [bus] url.", metavar="URL"),
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Show what the bus has now, and end.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Follow a swarm over its MQTT bus: workers, their states and rates, progress, loss, events.

    Works wherever the broker can be reached, with an observer's invite (starlings invite create --role observer), which
    is needed once, or with the owner's certificate in a job's directory. It shows what the members say of themselves;
    `starlings status` asks the coordinator, whose word counts.

    Examples:

        starlings watch starlings://...

        starlings watch my-job --once --json
    """
    is_invite = target is not None and (target == "-" or target.strip().startswith("starlings:"))
    job = "" if is_invite or target is None else target
    invite = "" if job else read_invite(target if is_invite else None, invite_file)
    lookout = asyncio.run(find_lookout(job, invite, url))
    with Ears(lookout) as ears:
        ears.wait_connected()
        if once:
            _once(ears, json_output)
        else:
            _follow(ears, json_output)


class Ears:
    """A connection to the bus, and the picture of what was heard on it."""

    def __init__(self, lookout: Lookout) -> None:
        self.lookout = lookout
        self.picture = BusPicture(lookout.job)
        self.last_heard_s: float | None = None
        self._begun_s = time.monotonic()
        self._told = threading.Event()
        # Bounded: who prints to a slow terminal misses telemetry rather than fill the memory.
        self._waiting: queue.Queue[tuple[str, bytes]] = queue.Queue(WAITING_LIMIT)
        self.client = BusClient(
            lookout.address,
            # A second terminal must not end the first one's connection.
            f"{lookout.job}-{lookout.identity.id}-{secrets.token_hex(4)}",
            lambda: lookout.identity,
            subscriptions=((all_of(lookout.job), 1),),
            on_message=self._heard,
            announce=lambda line: self._told.set(),
        )

    def _heard(self, topic: str, payload: bytes, retained: bool) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((topic, payload))

    def __enter__(self) -> Ears:
        self.client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close(within_s=CLOSE_WITHIN_S)

    def wait_connected(self) -> None:
        """Raises Unreachable, which says the phase."""
        deadline = time.monotonic() + CONNECT_WITHIN_S
        while not (health := self.client.health()).connected:
            # The first attempt has failed: for a command that is an answer.
            if self._told.is_set() or time.monotonic() > deadline:
                raise asyncio.run(broker_trouble(self.lookout.address, health.reason))
            time.sleep(0.02)

    def listen(self, within_s: float) -> Iterator[Change]:
        """What is heard within a time and changes the picture."""
        deadline = time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                topic, payload = self._waiting.get(timeout=left_s)
            except queue.Empty:
                return
            self.last_heard_s = time.monotonic()
            change = self.picture.hear(topic, payload, time.time())
            if change is not None:
                yield change

    @property
    def note(self) -> str:
        """Why nothing comes, in words; "" while something does."""
        health = self.client.health()
        if not health.connected:
            return f"The broker is away ({health.reason or 'no reason given'}): trying again. What follows is old."
        silent_s = time.monotonic() - (self.last_heard_s or self._begun_s)
        if self.picture.silent and silent_s > SILENCE_S:
            return (
                f"Nothing has been said on the bus of {self.lookout.job} yet: is the coordinator running, with this "
                "[bus] url in its job file?"
            )
        return f"Nothing heard for {duration(silent_s)}." if silent_s > 60 else ""


def _once(ears: Ears, json_output: bool) -> None:
    picture, begun_s = ears.picture, time.monotonic()
    while (elapsed_s := time.monotonic() - begun_s) < ONCE_WITHIN_S:
        known = (len(picture.members), picture.silent)
        for _ in ears.listen(QUIET_S):
            pass
        if known != (len(picture.members), picture.silent):
            continue
        moves = picture.phase == "training" and picture.progress is None
        if elapsed_s > (EMPTY_S if picture.silent else PROGRESS_S if moves else 0.0):
            break
    if json_output:
        emit(picture_record(picture))
    elif picture.silent:
        say(f"Nothing is retained on the bus of {picture.job}: no worker has connected to it yet.")
    else:
        console().print(picture_panel(picture, time.time()))


def _follow(ears: Ears, json_output: bool) -> None:
    """Until Ctrl-C, or the job has ended."""
    screen, picture = console(), ears.picture
    if json_output:
        _follow_as_json(ears)
    elif screen.is_terminal:
        with Live(console=screen, refresh_per_second=4) as live:
            while not _ended(picture):
                for _ in ears.listen(_LOOK_AGAIN_S):
                    pass
                live.update(picture_panel(picture, time.time(), ears.note))
    else:
        _follow_as_lines(ears)


def _follow_as_json(ears: Ears) -> None:
    told = ""
    while not _ended(ears.picture):
        for change in ears.listen(_LOOK_AGAIN_S):
            emit(change_record(change, ears.picture))
        if (note := ears.note) != told:
            emit({"event": "note", "text": note})
            told = note


def _follow_as_lines(ears: Ears) -> None:
    picture, throttle, told, shown = ears.picture, Throttle(), "", 0
    while not _ended(picture):
        for _ in ears.listen(_LOOK_AGAIN_S):
            pass
        fresh = min(picture.event_count - shown, len(picture.events))
        for event in list(picture.events)[len(picture.events) - fresh :]:
            say(f"{duration(event.at_s)} {event.kind}: {event.text}")
        shown = picture.event_count
        if (note := ears.note) != told:
            told = note
            if note:
                say(note)
        if not picture.silent and throttle.ready(picture.phase):
            say(picture_line(picture))


def _ended(picture: BusPicture) -> bool:
    return picture.phase in ("done", "failed")
