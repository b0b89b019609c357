"""The `starlings` command: puts the commands together and decides how a run ends."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from starlings import version
from starlings.commands import bus, codecs, job, local, operate, owner, plan, show, simulate, swarm, watch
from starlings.failures import report

app = typer.Typer(
    name="starlings",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Train one model on many unlike machines.\n\n"
        "First look:     `starlings demo`\n\n"
        "Own a job:      `starlings init`, edit job.toml, `starlings prepare job.toml`, "
        "`starlings coordinator job.toml`, hand out the invite it prints\n\n"
        "Volunteer:      `starlings join 'starlings://...'`\n\n"
        "Every failure is one sentence with the fix and a documented exit code (docs/reference.md)."
    ),
)


def _print_version(value: bool) -> None:
    if value:
        print(f"starlings {version()}")
        raise typer.Exit()


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (as STARLINGS_DEBUG=1 does).")
    ] = False,
) -> None:
    if debug:
        os.environ["STARLINGS_DEBUG"] = "1"


for module in (show, job, swarm, local, owner, operate, watch, bus, codecs, plan, simulate):
    module.register(app)


def main() -> None:
    """Entry point of the console script. `--debug` may stand anywhere before a `--`."""
    arguments = sys.argv[1:]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--debug" in own:
        arguments.remove("--debug")
        arguments.insert(0, "--debug")
    try:
        try:
            app(args=arguments, prog_name="starlings")
        finally:
            # Here a reader that has gone is noticed; at the interpreter's exit it would be a complaint.
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report(error, as_json="--json" in arguments))
