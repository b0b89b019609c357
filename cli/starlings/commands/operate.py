"""`starlings workers`, `why`, `pause`, `resume`, `drain`, `evict`, `rebalance`: the owner's hand on a job that runs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from starlings.commands.options import JobOption, JsonOption
from starlings.commands.owner import ask, parse_lifetime
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import as_dict, console, emit, say
from starlings.views.workers import advice_view, why_view, worker_records, workers_view
from starlings_protos import control_pb2

WorkerArgument = Annotated[
    str, typer.Argument(help="Its id, or enough of its beginning (`starlings workers`).", metavar="WORKER")
]


def register(app: typer.Typer) -> None:
    app.command()(workers)
    app.command()(why)
    app.command()(pause)
    app.command()(resume)
    app.command()(drain)
    app.command()(evict)
    app.command()(rebalance)


@guarded
def workers(job: JobOption = None, json_output: JsonOption = False) -> None:
    """Everybody who takes part: what they hold, how fast they are against the plan, how they are reached.

    The column `planned` is what the plan counts on at most, by what was measured when the worker joined; `stale` is how
    old gradients are when they are added, in steps; `heard` is how long ago the worker said something.

    Examples:

        starlings workers

        starlings workers --json | jq '.workers[] | select(.suspect)'
    """
    reply = ask(job, lambda client: client.status())
    if json_output:
        pause = as_dict(reply.pause) if reply.HasField("pause") else None
        emit({"workers": worker_records(reply), "phase": reply.phase, "pause": pause})
    else:
        console().print(workers_view(reply, time.time()))


@guarded
def why(worker: WorkerArgument, job: JobOption = None, json_output: JsonOption = False) -> None:
    """Why a worker does what it does, in words: why it is idle, slow or away, what it waits for, what would help.

    Examples:

        starlings why w3fa

        starlings why w3fa --json | jq '.because[].text'
    """
    reply = ask(job, lambda client: client.why(worker))
    if json_output:
        emit(as_dict(reply))
        return
    status = ask(job, lambda client: client.status())
    shown = next((w for w in status.workers if w.worker_id == reply.worker_id), None)
    console().print(why_view(shown, reply))


@guarded
def pause(
    job: JobOption = None,
    reason: Annotated[str, typer.Option(help="Shown to volunteers.")] = "the owner paused the job",
    json_output: JsonOption = False,
) -> None:
    """Nobody begins anything more until `starlings resume`; workers finish what is under way, and keep their state.

    It lasts through restarts of the coordinator. Workers stay connected, and who joins is measured and waits.

    Example:  starlings pause --reason "back at eight"
    """
    _done(ask(job, lambda client: client.pause(reason)), json_output)


@guarded
def resume(job: JobOption = None, json_output: JsonOption = False) -> None:
    """Lets a paused job go on where it was.

    Example:  starlings resume
    """
    _done(ask(job, lambda client: client.resume()), json_output)


@guarded
def drain(
    worker: WorkerArgument,
    job: JobOption = None,
    reason: Annotated[str, typer.Option(help="Told to whoever runs the worker.")] = "it is not needed now",
    json_output: JsonOption = False,
) -> None:
    """Ask a worker to leave in order: it finishes what it has begun, and hands over what nobody else has.

    Its process ends with exit code 0, as after `starlings leave` on its own machine, and it may come back at any time.

    Example:  starlings drain w3fa --reason "this machine is moved"
    """
    _done(ask(job, lambda client: client.drain(worker, reason)), json_output)


@guarded
def evict(
    worker: WorkerArgument,
    job: JobOption = None,
    lasting: Annotated[
        str, typer.Option("--for", help="Not let in again for so long: 90s, 30m, 1h, 7d; or 'good'.")
    ] = "1h",
    reason: Annotated[str, typer.Option(help="Told to whoever runs the worker.")] = "the owner sent it away",
    force: Annotated[
        bool,
        typer.Option("--force", help="Also the last holder of a stage: back to the newest saved version."),
    ] = False,
    readmit: Annotated[bool, typer.Option("--readmit", help="Let it back now instead.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Send a worker away: what it leased is leased again at once, and nothing that it still says counts.

    Its process ends with exit code 16 and says why, and until when it need not try again. To shut somebody out for
    ever, revoke the invite: `starlings invite revoke ID --workers`.

    Examples:

        starlings evict w3fa --for 2h --reason "its results do not agree with the others'"

        starlings evict w3fa --readmit
    """
    if readmit:
        _done(ask(job, lambda client: client.readmit(worker)), json_output)
        return
    for_s = 0.0 if lasting.strip().lower() == "good" else parse_lifetime(lasting)
    if not worker.strip():
        raise CommandError("Which worker? `starlings workers` lists them.", ExitCode.USAGE)
    _done(ask(job, lambda client: client.evict(worker, for_s, reason, force=force)), json_output)


@guarded
def rebalance(
    job: JobOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what the planner would amend; the only way so far.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """What the planner would amend now: who would move where, what that gains and costs, and why (not).

    Each question is priced by the dual prices of the plan that stands: the plan as it is, holders that are slower than
    they were measured or want to leave, workers that stand by. Moves are worth it when they gain more than 1.5 times
    what moving costs in the time that is left, and holders move for 5 % or more only.

    Example:  starlings rebalance --dry-run
    """
    if not dry_run:
        raise CommandError(
            "The coordinator moves workers by itself. `starlings rebalance --dry-run` says what it would amend.",
            ExitCode.USAGE,
        )
    reply = ask(job, lambda client: client.advise())
    if json_output:
        emit(as_dict(reply))
    else:
        console().print(advice_view(reply))


def _done(reply: control_pb2.CommandReply, json_output: bool) -> None:
    if json_output:
        emit(as_dict(reply))
    else:
        say(reply.text)
