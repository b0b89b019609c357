"""`starlings demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from starlings.failures import guarded

DEFAULT_STEPS = 330


def register(app: typer.Typer) -> None:
    app.command()(demo)


@guarded
def demo(
    workers: Annotated[int, typer.Option(min=1, max=16, help="How many workers.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps; 2,048 tokens each.")] = DEFAULT_STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Same seed: same weights, same order of samples.")] = 0,
    directory: Annotated[Path, typer.Option("--dir", help="Where all files go.", metavar="DIR")] = Path(
        "demo-run"
    ),
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the outcome there as JSON ('-' = all output as JSON lines).", metavar="FILE"
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Save a picture of the run (SVG).", metavar="FILE")
    ] = None,
    kill_one_at: Annotated[
        int | None,
        typer.Option(
            min=1, help="SIGKILL a worker that shares its stages, in the middle of this step.", metavar="STEP"
        ),
    ] = None,
) -> None:
    """A whole mixed swarm on this machine: one coordinator, four unlike workers, real text, a real model.

    Everything is a real process over real mTLS; only the devices are emulated (by sleeping). Nothing is
    downloaded: the text is the source code of Python's standard library. Takes about five minutes on two
    cores.

    Examples:

        starlings demo

        starlings demo --steps 30 --json outcome.json

        starlings demo --kill-one-at 100
    """
    # Imported late: `--help` of any command must not load everything.
    from starlings.demo.run import DemoOptions, run_demo

    as_lines = json_file is not None and str(json_file) == "-"
    file = None if as_lines else json_file
    run_demo(DemoOptions(workers, steps, seed, directory, file, as_lines, picture, kill_one_at))
