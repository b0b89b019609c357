"""`starlings init`, `prepare`, `export`: a job's files."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from starlings import children, template
from starlings.commands.options import DirOption, JobOption, JsonOption
from starlings.directories import choose_job, job_directory
from starlings.failures import CommandError, ExitCode, guarded
from starlings.output import Throttle, console, emit, say
from starlings_job.spec import load_job


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(prepare)
    app.command()(export)


class Links(enum.StrEnum):
    INTERNET = "internet"
    LAN = "lan"


@guarded
def init(
    path: Annotated[Path, typer.Argument(help="Where to write.", metavar="[FILE]")] = Path("job.toml"),
    name: Annotated[str, typer.Option(help="The job's name.")] = "first-flight",
    links: Annotated[
        Links,
        typer.Option(
            help="What lies between the machines. internet: nobody waits, replicas meet in pairs now and then (async). "
            "lan: they exchange at every step, which is then exactly that of one big machine (sync).",
        ),
    ] = Links.INTERNET,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Write a commented job.toml to start from.

    Example:  starlings init && $EDITOR job.toml
    """
    if path.is_dir():
        path = path / "job.toml"
    start = template.CHOSEN if links is Links.INTERNET else template.CHOSEN_FOR_LAN
    chosen = {section: dict(keys) for section, keys in start.items()}
    chosen["job"]["name"] = name
    text = template.render(chosen, file=path.name)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CommandError(
            f"{path} exists already: choose another name, or replace it with --force.", ExitCode.USAGE
        ) from None
    if json_output:
        emit({"path": str(path), "job": name})
    else:
        say(f"Wrote {path}. Edit it, then: starlings prepare {path}")


@guarded
def prepare(
    job_file: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.TOML")] = Path("job.toml"),
    directory: DirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Tokenise the text, draw the first weights, profile the model: once, before the coordinator starts.

    Needs torch and transformers (starlings[worker]); the coordinator afterwards does not, so you may
    prepare on one machine and copy the directory to another.

    Example:  starlings prepare job.toml
    """
    where, facts = prepare_job(job_file, directory, json_output=json_output)
    if json_output:
        emit({"event": "prepared", "directory": str(where), **facts})
    else:
        for note in facts.get("notes", ()):
            say(f"Note: {note}.")
        say(f"Prepared {where}. Next: starlings coordinator {job_file}")


def prepare_job(job_file: Path, directory: Path | None, *, json_output: bool) -> tuple[Path, dict[str, Any]]:
    """Runs the preparation in a child, with progress; returns the directory and what was found."""
    job = load_job(job_file)
    where = directory or job_directory(job.job.name)
    arguments = {"job_file": os.path.abspath(job_file), "directory": os.path.abspath(where)}

    if json_output or not sys.stdout.isatty():
        throttle = Throttle(1.0 if json_output else 2.0)

        def plain(news: Mapping[str, Any]) -> None:
            if not throttle.ready(news.get("phase")):
                return
            if json_output:
                emit({"event": "progress", **news})
            else:
                say(f"{news['phase']}: {news['fraction']:.0%} {news.get('detail', '')}".rstrip())

        return where, children.run_heavy("prepare", arguments, log=2, progress=plain)

    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console()) as bars:
        tasks: dict[str, Any] = {}

        def draw(news: Mapping[str, Any]) -> None:
            phase = str(news["phase"])
            if phase not in tasks:
                for task in tasks.values():
                    bars.update(task, completed=1.0)
                tasks[phase] = bars.add_task(phase, total=1.0, detail="")
            bars.update(tasks[phase], completed=float(news["fraction"]), detail=str(news.get("detail", "")))

        result = children.run_heavy("prepare", arguments, log=2, progress=draw)
        for task in tasks.values():
            bars.update(task, completed=1.0)
    return where, result


@guarded
def export(
    out: Annotated[
        Path, typer.Argument(help="The directory to write; must not exist or be empty.", metavar="DIR")
    ],
    job: JobOption = None,
    checkpoint: Annotated[
        int | None, typer.Option(help="Version (step) to export; the newest when left out.", metavar="STEP")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write the newest checkpoint as a Hugging Face model directory.

    Example:  starlings export ./model

    Then in Python:  AutoModelForCausalLM.from_pretrained("./model")
    """
    arguments = {
        "directory": os.path.abspath(choose_job(job)),
        "out": os.path.abspath(out),
        "version": checkpoint,
    }
    result = children.run_heavy("export", arguments, log=2, progress=lambda news: None)
    if json_output:
        emit({"event": "exported", "path": str(out), **result})
    else:
        say(f"Exported version {result['version']} to {out}.")
        say(loading_lines(out, str(result.get("family", ""))))


def loading_lines(out: Path, family: str = "") -> str:
    """What to type in Python to use an exported model."""
    if family == "sequential":
        return f"Weights by block: {out}/model.safetensors, configuration: {out}/config.json"
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(out)!r})"
    )
