"""`starlings simulate`: hours of a job on a swarm that need not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from starlings.commands.options import JsonOption
from starlings.commands.plan import FleetOption, JobArgument, SeedOption, ask
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import console, emit, say
from starlings.views import simulated as view
from starlings.views.simulated_picture import draw

_WORDS = ("none", "lifetimes")


def register(app: typer.Typer) -> None:
    app.command()(simulate)


@guarded
def simulate(
    job: JobArgument = Path("job.toml"),
    fleet: FleetOption = Path("fleet.toml"),
    hours: Annotated[float, typer.Option(min=0.01, max=24 * 366, help="Of virtual time.")] = 1.0,
    churn: Annotated[
        str,
        typer.Option(
            help="Who is there when: a trace file (JSON, [[second, +1 or -1, node], ...] or [[second, live], ...]), "
            "'lifetimes' of the fleet file, or 'none' for all the time.",
            metavar="TRACE|lifetimes|none",
        ),
    ] = "lifetimes",
    notice: Annotated[
        float, typer.Option(min=0.0, help="Seconds between a trace's notice of an end and the end.")
    ] = 0.0,
    svg: Annotated[
        Path | None,
        typer.Option(help="Save a timeline of throughput, workers and plans there.", metavar="FILE"),
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--flow",
            help="Play every microbatch, or flows between events; by default events up to 256 workers.",
        ),
    ] = None,
    seed: SeedOption = None,
    json_output: JsonOption = False,
) -> None:
    """How far a job would come in some hours, with workers that come and go, and where the time would be lost.

    The coordinator's and the workers' own logic and the planner of live jobs run on a virtual clock, with modelled
    compute and links; nothing is trained. Up to 256 workers every microbatch is played, an hour of a dozen in minutes.
    Of more, a few are played and the rest flows by what is learnt from them: an hour of thousands takes minutes.

    Examples:

        starlings simulate job.toml --fleet docs/fleet.toml --hours 2

        starlings simulate job.toml --fleet fleet.toml --hours 24 --churn trace.json --svg day.svg

        starlings simulate job.toml --fleet fleet.toml --hours 24 --flow
    """
    if churn not in _WORDS and not Path(churn).is_file():
        raise CommandError(
            f"--churn {churn}: no such file; give a trace, or one of {', '.join(_WORDS)}.", ExitCode.USAGE
        )
    where = churn if churn in _WORDS else str(Path(churn).absolute())
    mode = "" if exact is None else "exact" if exact else "flow"
    more = {"hours": hours, "churn": where, "notice_s": notice, "mode": mode}
    answer = ask("simulate", job, fleet, None, seed, None, more, json_output=json_output)
    if svg is not None:
        svg.write_text(draw(answer), "utf-8")
    if json_output:
        emit({"event": "simulated", **answer})
        return
    console().print(view.render(answer))
    if svg is not None:
        say(f"Picture: {svg}")
