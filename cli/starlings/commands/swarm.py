"""`starlings coordinator` and `starlings join`: the two that stay."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starlings.commands.job import prepare_job
from starlings.commands.options import DirOption, JsonOption
from starlings.directories import choose_job, is_prepared, job_directory, workers_root
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import Throttle, emit, say
from starlings_job.spec import load_job
from starlings_job.units import parse_bytes
from starlings_protos.invite import ENVIRONMENT_VARIABLE, LENGTH_LIMIT_CHARACTERS

if TYPE_CHECKING:
    from starlings_worker.uplink import LinkClass

# What a volunteer sees at most every few seconds; everything else is told at once.
_FREQUENT = frozenset({"step"})


def register(app: typer.Typer) -> None:
    app.command()(coordinator)
    app.command()(join)


@guarded
def coordinator(
    job: Annotated[
        Path, typer.Argument(help="The job file, a prepared directory, or a job's name.", metavar="JOB")
    ] = Path("job.toml"),
    directory: DirOption = None,
    listen: Annotated[
        str, typer.Option(help="Address of this machine to listen on; all when left out.")
    ] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address under which volunteers reach this machine; may be given again."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Control port instead of the job file's; 0 = any.")] = None,
    enrolment_port: Annotated[
        int | None, typer.Option(help="Enrolment port instead of the job file's; 0 = any.")
    ] = None,
    keeper_port: Annotated[
        int | None, typer.Option(help="Port from which workers fetch weights; the control port + 3.")
    ] = None,
    relay_port: Annotated[
        int | None,
        typer.Option(help="Port through which workers behind routers are reached; the control port + 4."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="postgresql://... instead of a file.", metavar="URL")
    ] = None,
    invite: Annotated[
        bool,
        typer.Option("--invite/--no-invite", help="Print a first invite (24 hours, any number of uses)."),
    ] = True,
    json_output: JsonOption = False,
) -> None:
    """Serve one job and print an invite. Prepares the job first when that was not done.

    Runs until the job has ended (`starlings stop`, or all tokens trained) or Ctrl-C; start it again to go on.
    Volunteers must reach three ports: control (7700), enrolment (7701), weights (control + 3).

    Examples:

        starlings coordinator job.toml

        starlings coordinator job.toml --host swarm.example.org
    """
    where, job_file = _find_job(job, directory, json_output)
    # Imported late, so that `starlings join` on a small machine loads no database.
    from starlings_coordinator.options import CoordinatorOptions
    from starlings_coordinator.run import run_coordinator

    options = CoordinatorOptions(
        directory=where,
        job_file=job_file,
        listen_host=listen,
        control_port=port,
        enrolment_port=enrolment_port,
        keeper_port=keeper_port,
        relay_port=relay_port,
        advertise=tuple(host or ()),
        store_url=store,
        first_invite=invite,
    )
    code = run_coordinator(options, _tell_machine if json_output else CoordinatorVoice())
    raise typer.Exit(code)


def _find_job(job: Path, directory: Path | None, json_output: bool) -> tuple[Path, Path | None]:
    """The prepared directory and, when one was given, the job file; prepares what is not prepared."""
    if job.is_dir() or (directory is None and job.suffix != ".toml" and not job.exists()):
        return choose_job(job), None
    where = directory or job_directory(load_job(job).job.name)
    if not is_prepared(where):
        prepare_job(job, where, json_output=json_output)
    return where, job


def _tell_machine(kind: str, fields: Mapping[str, Any]) -> None:
    emit({"event": kind, **fields})


class CoordinatorVoice:
    """What the owner reads in the coordinator's terminal: one line per thing that happened, state now and then."""

    def __init__(self) -> None:
        self._throttle = Throttle(10.0)

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        match kind:
            case "listening":
                say(
                    f"Job {fields['job']}: control {fields['control'][0]}, enrolment {fields['enrolment'][0]}"
                )
                if "invite" in fields:
                    say(
                        "Give this to volunteers (valid for a day; `starlings invite create` makes others):\n"
                    )
                    say(f"  starlings join {fields['invite']}\n")
                say("`starlings status --watch` shows the job, `starlings stop` ends it in order.")
            case "announce" | "event":
                say(f"{fields['kind']}: {fields['text']}")
            case "status":
                if self._throttle.ready(fields.get("phase")):
                    say(str(fields["line"]))
            case "ending":
                say(f"Leaving ({fields['reason']}); start again to go on. Workers wait and reconnect.")
            case "ended":
                say(f"The job has ended: {fields['reason']}.")
            case _:
                pass


@guarded
def join(
    invite: Annotated[
        str | None,
        typer.Argument(help="The invite, or '-' to read it from standard input.", metavar="INVITE"),
    ] = None,
    invite_file: Annotated[
        Path | None, typer.Option(help="Read the invite from a file.", metavar="FILE")
    ] = None,
    directory: DirOption = None,
    devices: Annotated[
        str,
        typer.Option(help="all, cpu, or a list such as cuda:0,cuda:2. Every GPU, else the CPU, if left out."),
    ] = "",
    listen: Annotated[str, typer.Option(help="Address to listen on for other workers.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="First port for other workers; 0 = any.")] = 7710,
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST or HOST:PORT that others should use to reach this machine; may be given again."
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="At most this much memory per device, such as 6GB.", metavar="SIZE")
    ] = "",
    max_upload: Annotated[
        str,
        typer.Option(
            help="Send at most this much per second, headers included, such as 5MB.", metavar="SIZE"
        ),
    ] = "",
    relay: Annotated[
        str,
        typer.Option(
            help="Also pass on what others send to workers behind routers, encrypted end to end: at most this much "
            "per second, such as 2MB. Only of use where this machine can be reached from outside.",
            metavar="SIZE",
        ),
    ] = "",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads per device; 0 = one per core.")] = 0,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    emulate: Annotated[
        str, typer.Option(help="Pretend to be a slower device, such as rtx3060.", metavar="CLASS")
    ] = "",
    emulate_link: Annotated[
        str,
        typer.Option(
            help="Pretend to be behind an uplink, with a delay one way, such as 20Mbit/s,40ms.",
            metavar="RATE[,DELAY]",
        ),
    ] = "",
    emulate_pass: Annotated[
        float,
        typer.Option(
            min=0, help="Let a microbatch take this long through the whole model and back.", metavar="SECONDS"
        ),
    ] = 0.0,
    site: Annotated[str, typer.Option(help="Machines behind one uplink share a site.")] = "",
    region: Annotated[str, typer.Option(help="Where this machine is, such as eu-west.")] = "",
    json_output: JsonOption = False,
) -> None:
    """Train with this machine. The invite is all it needs.

    Stays until the job has ended (exit code 0) or Ctrl-C, which finishes what is under way and leaves in
    order; a second Ctrl-C leaves at once. After the first time, `starlings join --dir DIR` needs no invite
    any more.

    Examples:

        starlings join starlings://...

        starlings join starlings://... --devices cuda:0,cuda:2 --memory 10GB

        cat invite.txt | starlings join -
    """
    from starlings_worker.options import WorkerOptions
    from starlings_worker.supervisor import run_worker

    if precision not in ("auto", "fp32", "bf16"):
        raise CommandError(f"There is no precision '{precision}': use auto, fp32 or bf16.", ExitCode.USAGE)
    found = read_invite(invite, invite_file)
    options = WorkerOptions(
        invite=found,
        directory=directory if found or directory else joined_before(),
        devices=devices,
        listen_host=listen,
        listen_port=port,
        advertise=tuple(advertise or ()),
        emulate=emulate,
        emulate_link=_link(emulate_link),
        emulate_pass_s=emulate_pass,
        memory_bytes=_size(memory, "--memory"),
        relay_bytes_per_s=_size(relay, "--relay"),
        max_upload_bytes_per_s=_size(max_upload, "--max-upload"),
        threads=threads,
        precision=precision,
        site=site,
        region=region,
        on_event=WorkerVoice(json_output),
    )
    raise typer.Exit(run_worker(options))


class WorkerVoice:
    """What a volunteer reads."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._throttle = Throttle()

    def __call__(self, event: Any) -> None:
        if self._as_json:
            emit({"event": event.kind, "worker_id": event.worker_id, "text": event.text, **event.data})
        elif event.kind not in _FREQUENT or self._throttle.ready():
            say(f"{event.worker_id[:7]} {event.text}".strip())


def read_invite(argument: str | None, file: Path | None) -> str:
    """The invite from the argument, a file, standard input or the environment; "" when there is none.

    Raises:
        CommandError: it was given twice.
    """
    if argument is not None and file is not None:
        raise CommandError("Give the invite once: as argument or with --invite-file.", ExitCode.USAGE)
    if argument == "-":
        return sys.stdin.readline(LENGTH_LIMIT_CHARACTERS + 2).strip()
    if argument is not None:
        return argument.strip()
    if file is not None:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.readline(LENGTH_LIMIT_CHARACTERS + 2).strip()
    return os.environ.get(ENVIRONMENT_VARIABLE, "").strip()


def joined_before() -> Path:
    """The directory of the only swarm that this machine has joined: coming back needs no invite.

    Raises:
        CommandError: it has joined none, or several.
    """
    found = sorted({path.parent for path in workers_root().glob("*/id.pem")})
    found += sorted({path.parents[2] for path in workers_root().glob("*/devices/*/id.pem")} - set(found))
    if not found:
        raise CommandError(
            "Which swarm? Give the invite that the owner sent you: starlings join starlings://... "
            f"(or --invite-file, '-' for standard input, or {ENVIRONMENT_VARIABLE}).",
            ExitCode.USAGE,
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CommandError(
            f"This machine has joined several swarms ({names}): say which with --dir {found[0]}, or give an invite.",
            ExitCode.USAGE,
        )
    return found[0]


def _size(text: str, option: str) -> int:
    if not text:
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"{option} {text}: {error}", ExitCode.USAGE) from None


def _link(text: str) -> LinkClass:
    from starlings_worker.uplink import NO_LINK, parse_link

    if not text:
        return NO_LINK
    try:
        return parse_link(text)
    except ValueError as error:
        raise CommandError(f"--emulate-link {text}: {error}", ExitCode.USAGE) from None
