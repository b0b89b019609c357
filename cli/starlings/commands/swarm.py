"""`starlings coordinator` and `starlings join`: the two that stay."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from starlings.commands.job import prepare_job
from starlings.commands.options import DirOption, JsonOption
from starlings.directories import is_prepared, job_directory
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import emit, say
from starlings_job.spec import load_job
from starlings_job.units import parse_bytes


def register(app: typer.Typer) -> None:
    app.command()(coordinator)
    app.command()(join)
