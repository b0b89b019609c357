"""`starlings bus config`: a ready configuration of Mosquitto for a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from starlings.commands.options import JobOption, JsonOption
from starlings.directories import choose_job
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import emit, say
from starlings_job.prepared import JOB_FILE
from starlings_job.spec import JobSpec, load_job
from starlings_protos.bus.address import is_loopback, parse_bus_url

bus_app = typer.Typer(no_args_is_help=True, help="The MQTT bus beside the swarm.")


def register(app: typer.Typer) -> None:
    app.add_typer(bus_app, name="bus")


@bus_app.callback()
def bus() -> None:
    """The MQTT bus beside the swarm: presence, telemetry, plan notices. Training never depends on it."""


@bus_app.command("config")
@guarded
def config(
    directory: Annotated[Path, typer.Argument(help="The broker's directory; made if absent.", metavar="DIR")],
    job: JobOption = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address of the broker, beside that of `[bus] url`; may be given again.",
            metavar="HOST",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Instead of the port of `[bus] url`; 8883 when that has none.")
    ] = None,
    account: Annotated[
        str | None,
        typer.Option(help="Who runs the broker: the files become theirs. As root `mosquitto`, else you."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="Where DIR will lie on the broker's machine, if elsewhere.", metavar="PATH"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier call wrote.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Write a ready Mosquitto configuration for a job, and say what to run.

    TLS with the job's authority, client certificates, an access list by certificate name, limits. Run it again with
    --force once a year (the server certificate), and after observers joined or somebody was shut out (the access list).

    Examples:

        starlings bus config /etc/starlings/broker --host swarm.example.org

        mosquitto -c /etc/starlings/broker/mosquitto.conf
    """
    # Imported late, so that no other command loads them.
    from starlings_coordinator.broker.configuration import MQTTS_PORT, BrokerSettings
    from starlings_coordinator.broker.files import default_account, read_access, write_broker_files
    from starlings_protos.authority import CertificateAuthority

    where = choose_job(job)
    spec = load_job(where / JOB_FILE)
    known_host, known_port = bus_address(spec)
    hosts = list(dict.fromkeys([*(host or ()), *([known_host] if known_host else [])]))
    if not hosts:
        raise CommandError(
            "Under which name do workers reach the broker? Say --host NAME, or put [bus] url into the job file.",
            ExitCode.USAGE,
        )
    chosen = port or known_port or MQTTS_PORT
    local = all(is_loopback(name) for name in hosts)
    if account is None:
        account = default_account() if at is None else ""
    try:
        settings = BrokerSettings(
            job=spec.job.name,
            port=chosen,
            directory=at or str(directory.absolute()),
            account=account,
            listen="localhost" if local else "",
        )
        authority = CertificateAuthority.load_or_create(where / "ca", spec.job.name, time.time())
        expires_s = write_broker_files(
            directory,
            settings,
            authority,
            # Its own machine can always talk to it.
            list(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])),
            read_access(where),
            now_s=time.time(),
            replace=force,
        )
    except ValueError as error:
        raise CommandError(f"{error}.", ExitCode.USAGE) from None
    url = f"mqtts://{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:{chosen}"
    command = f"mosquitto -c {settings.directory}/mosquitto.conf"
    if json_output:
        emit(
            {
                "directory": str(directory),
                "hosts": hosts,
                "port": chosen,
                "url": url,
                "account": account,
                "expires_s": expires_s,
                "run": command,
            }
        )
        return
    until = time.strftime("%Y-%m-%d", time.localtime(expires_s))
    say(
        f"Wrote {directory}: mosquitto.conf, access list, and a certificate for {', '.join(hosts)} until {until}."
    )
    say(f"Run:       {command}")
    if account:
        say(
            f"           as {account}, or as root: Mosquitto then changes to {account}, whose files these are."
        )
    else:
        say("           as an account that may read these files, which are open to their owner alone.")
    if spec.bus.url != url:
        say(f'job.toml:  [bus]\n           url = "{url}"')


def bus_address(spec: JobSpec) -> tuple[str, int | None]:
    """Host and port of `[bus] url`; "" and None where there is none, or one that is not for TLS."""
    if spec.bus.url is None:
        return "", None
    address = parse_bus_url(spec.bus.url)
    return address.host, address.port if address.tls else None
