"""Options that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout, for machines.")]
JobOption = Annotated[
    Path | None,
    typer.Option(
        "--job", help="The job's directory or name; not needed when there is only one here.", metavar="JOB"
    ),
]
DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help="Keep everything there instead of the user data directory.", metavar="DIR"),
]
