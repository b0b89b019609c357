"""`starlings status`, `stop`, `invite`: the owner's commands, by the owner certificate in the job's directory."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.live import Live
from rich.table import Table

from starlings.commands.options import JobOption, JsonOption
from starlings.directories import choose_job
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import Throttle, as_dict, console, emit, say
from starlings.owner_client import OwnerClient
from starlings.views.figures import duration
from starlings.views.status import History, status_line, status_panel
from starlings_protos import control_pb2

T = TypeVar("T")
_ENDED = ("done", "failed")

invite_app = typer.Typer(no_args_is_help=True, help="Create, list and revoke invites.")


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(stop)
    app.add_typer(invite_app, name="invite")


def ask(job: Any, question: Callable[[OwnerClient], Awaitable[T]]) -> T:
    """One request to the job's coordinator."""

    async def run() -> T:
        async with OwnerClient(choose_job(job)) as client:
            return await question(client)

    return asyncio.run(run())


@guarded
def status(
    job: JobOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Stay and show changes as they happen.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """What the job is doing: progress, loss, who holds which stage, what happened.

    Examples:

        starlings status

        starlings status --watch

        starlings status --json | jq .loss
    """
    if watch:
        asyncio.run(_watch(job, json_output))
        return
    reply = ask(job, lambda client: client.status())
    if json_output:
        emit(as_dict(reply))
        return
    history = History()
    history.add(reply)
    console().print(status_panel(reply, history.losses, history.events, event_limit=12))


async def _watch(job: Any, json_output: bool) -> None:
    history, throttle = History(), Throttle()
    async with OwnerClient(choose_job(job)) as client:
        screen = console()
        live = Live(console=screen, refresh_per_second=4) if screen.is_terminal and not json_output else None
        if live:
            live.start()
        try:
            async for reply in client.watch(interval_s=0.5):
                fresh = history.add(reply)
                if live:
                    live.update(status_panel(reply, history.losses, history.events))
                elif json_output:
                    emit(as_dict(reply))
                else:
                    for event in fresh:
                        say(f"{duration(event.at_s)} {event.kind}: {event.text}")
                    if throttle.ready(reply.phase):
                        say(status_line(reply))
                if reply.phase in _ENDED:
                    return
        finally:
            if live:
                live.stop()


@guarded
def stop(
    job: JobOption = None,
    reason: Annotated[str, typer.Option(help="Shown to volunteers.")] = "the owner stopped the job",
    json_output: JsonOption = False,
) -> None:
    """End the job in order: average, evaluation, checkpoint; then workers and coordinator leave.

    Example:  starlings stop
    """
    reply = ask(job, lambda client: client.stop(reason))
    if json_output:
        emit(as_dict(reply))
    else:
        say(f"The job is ending (phase: {reply.phase}). `starlings status --watch` shows how far it is.")


@invite_app.command("create")
@guarded
def create(
    job: JobOption = None,
    lifetime: Annotated[str, typer.Option(help="How long it may be used: 90s, 30m, 24h, 7d.")] = "24h",
    uses: Annotated[int, typer.Option(min=0, help="How many machines may join with it; 0 = any number.")] = 0,
    role: Annotated[str, typer.Option(help="worker, or observer (may look, not train).")] = "worker",
    json_output: JsonOption = False,
) -> None:
    """Print a new invite. Whoever has it may join until it expires: send it as you would a password.

    Example:  starlings invite create --lifetime 7d --uses 10
    """
    if role not in ("worker", "observer"):
        raise CommandError(f"There is no role '{role}': use worker or observer.", ExitCode.USAGE)
    lifetime_s = parse_lifetime(lifetime)
    made = ask(job, lambda client: client.create_invite(lifetime_s, uses, role))
    if json_output:
        emit(as_dict(made))
    else:
        say(made.invite)


@invite_app.command("list")
@guarded
def list_invites(job: JobOption = None, json_output: JsonOption = False) -> None:
    """The invites of the job: id, role, uses, expiry. The secrets are stored nowhere, so they cannot be shown again.

    Example:  starlings invite list
    """
    found = ask(job, lambda client: client.list_invites())
    if json_output:
        emit({"invites": [as_dict(i) for i in found.invites]})
        return
    table = Table("id", "role", "used", "expires", "state", box=None, pad_edge=False)
    now = time.time()
    for item in found.invites:
        table.add_row(item.token_id, item.role, _uses(item), _expiry(item, now), _state(item, now))
    console().print(table)


@invite_app.command("revoke")
@guarded
def revoke(
    token_id: Annotated[str, typer.Argument(help="The id, from `starlings invite list`.", metavar="ID")],
    job: JobOption = None,
    workers: Annotated[
        bool, typer.Option("--workers", help="Also shut out the workers that joined with it.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Make an invite worthless; with --workers also shut out who came with it.

    Example:  starlings invite revoke 4f1c --workers
    """
    reply = ask(job, lambda client: client.revoke_invite(token_id, workers))
    if json_output:
        emit(as_dict(reply))
    else:
        who = f"; shut out: {', '.join(reply.worker_ids)}" if reply.worker_ids else ""
        say(f"Revoked invite {token_id}{who}.")


def parse_lifetime(text: str) -> float:
    """Seconds of "90s", "30m", "24h" or "7d".

    Raises:
        CommandError: none of these.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([smhd])", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise CommandError(f"'{text}' is no lifetime: write it like 90s, 30m, 24h or 7d.", ExitCode.USAGE)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _uses(item: control_pb2.Invite) -> str:
    return f"{item.used} of {item.uses}" if item.uses else f"{item.used}"


def _expiry(item: control_pb2.Invite, now: float) -> str:
    left = item.expires_s - now
    return f"in {duration(left)}" if left > 0 else f"{duration(-left)} ago"


def _state(item: control_pb2.Invite, now: float) -> str:
    if item.revoked:
        return "revoked"
    if item.expires_s <= now:
        return "expired"
    if item.uses and item.used >= item.uses:
        return "used up"
    return "open"
