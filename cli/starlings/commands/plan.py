"""`starlings plan` and `advise`: a job on a swarm that need not exist."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from starlings import children
from starlings.commands.options import JsonOption
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import console, emit, say
from starlings.profiles import job_file, profile_file
from starlings.views import plan as view
from starlings.views.figures import count
from starlings.views.plan_picture import draw
from starlings_job.units import parse_count
from starlings_simulator.fleets.file import load_fleet
from starlings_simulator.fleets.swarm import Swarm

FleetOption = Annotated[
    Path,
    typer.Option(
        "--fleet", help="The workers, as a fleet file (docs/fleet.toml is one).", metavar="FLEET.TOML"
    ),
]
JobArgument = Annotated[
    Path, typer.Argument(help="The job file, or a prepared job's directory or name.", metavar="JOB.TOML")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Equal seeds give equal plans; the job's own when left out.")
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=100_000, help="Linear programmes for the search: more find better plans and take longer."
    ),
]
TokensOption = Annotated[
    str | None, typer.Option(help='How long to train, such as "10B"; the job\'s own when left out.')
]


def register(app: typer.Typer) -> None:
    app.command()(plan)
    app.command()(advise)


@guarded
def plan(
    job: JobArgument = Path("job.toml"),
    fleet: FleetOption = Path("fleet.toml"),
    compare: Annotated[
        bool, typer.Option("--compare", help="Also what other layouts of the same workers would reach.")
    ] = False,
    marginal: Annotated[
        bool,
        typer.Option("--marginal", help="Also what one more worker would add, and who adds nothing."),
    ] = False,
    islands: Annotated[
        bool,
        typer.Option(
            "--islands",
            help="Also who is near enough to form pipelines, and who exchanges only.",
        ),
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Save a picture of stages and workers there.", metavar="FILE")
    ] = None,
    tokens: TokensOption = None,
    seed: SeedOption = None,
    budget: BudgetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Who would hold what, how fast it would go, what it would cost, and what would have to be added to go faster.

    Nothing is started and nobody is asked: workers, links and prices are those of a fleet file. It is the planner of
    linear programmes with links; the job need not be prepared (its model is measured once, which needs torch).

    Examples:

        starlings plan job.toml --fleet docs/fleet.toml

        starlings plan job.toml --fleet fleet.toml --compare --svg plan.svg

        starlings plan job.toml --fleet fleet.toml --marginal

        starlings plan job.toml --fleet fleet.toml --tokens 20B --json
    """
    answer = ask(
        "plan",
        job,
        fleet,
        tokens,
        seed,
        budget,
        {"compare": compare, "marginal": marginal, "islands": islands},
        json_output=json_output,
    )
    if svg is not None:
        svg.write_text(draw(answer), "utf-8")
    if json_output:
        emit({"event": "plan", **answer})
        return
    console().print(view.render(answer))
    if svg is not None:
        say(f"Picture: {svg}")


@guarded
def advise(
    job: JobArgument = Path("job.toml"),
    fleet: FleetOption = Path("fleet.toml"),
    seed: SeedOption = None,
    budget: BudgetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Which exchange preset fits a fleet's uplinks and round trips, and what share of time each would communicate.

    The job is planned for the fleet first, as `starlings plan` does; then each preset's bytes are sent over that plan's
    links. Presets with a barrier lose that time; the others exchange beside training and take a part of the link.

    Example:

        starlings advise job.toml --fleet docs/fleet.toml
    """
    answer = ask("advise", job, fleet, None, seed, budget, {}, json_output=json_output)
    if json_output:
        emit({"event": "advice", **answer})
    else:
        console().print(view.render_advice(answer))


def ask(
    step: str,
    job: Path,
    fleet: Path,
    tokens: str | None,
    seed: int | None,
    budget: int | None,
    more: Mapping[str, Any],
    *,
    json_output: bool,
) -> dict[str, Any]:
    """The answer of the planner's process, with a line about what it is at on a terminal.

    Raises:
        CommandError, JobError: an argument or a file cannot be used; the text says why.
    """
    try:
        tokens_count = None if tokens is None else parse_count(tokens)
    except ValueError as error:
        raise CommandError(f"--tokens {tokens}: {error}.", ExitCode.USAGE) from None
    if not fleet.is_file():
        raise CommandError(
            f"{fleet} is no file: name a fleet file with --fleet; docs/fleet.toml is one to start from.",
            ExitCode.USAGE,
        )
    path = job_file(job)
    # Slips are told before anything takes time.
    Swarm(load_fleet(fleet))
    live = not json_output and sys.stdout.isatty()
    with console().status("reading the model") if live else nullcontext() as status:

        def show(news: Mapping[str, Any]) -> None:
            if status is not None:
                status.update(_words(news))

        _, profile = profile_file(path, show)
        arguments = {
            "job_file": os.path.abspath(path),
            "profile": os.path.abspath(profile),
            "fleet": os.path.abspath(fleet),
            "tokens": tokens_count,
            "seed": seed,
            "budget": budget,
            **more,
        }
        return children.run_heavy(step, arguments, log=2, progress=show)


def _words(news: Mapping[str, Any]) -> str:
    if "tokens_per_s" in news:
        return f"planning: {count(news['tokens_per_s'])} tokens/s, {news['of_bound']:.0%} of the bound"
    if "fraction" in news:
        return f"{news['phase']}: {news['fraction']:.0%}"
    return str(news["phase"])
