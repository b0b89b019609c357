"""Reads what is in deploy/: Dockerfiles, units, command lines in a page; as far as these files go and no further."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from starlings.main import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@dataclass(frozen=True)
class Instruction:
    """`RUN --mount=type=cache,target=/x pip install y`: name RUN, flags (--mount=...), rest "pip install y"."""

    name: str
    flags: tuple[str, ...]
    rest: str

    @property
    def words(self) -> list[str]:
        """Of the exec form, ["a", "b"]; of another, the words."""
        return list(map(str, json.loads(self.rest))) if self.rest.startswith("[") else self.rest.split()


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows, unnamed "" perhaps; `base` is another stage's name or an image."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


def dockerfile(path: Path) -> list[Stage]:
    stages: list[Stage] = []
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
    for text in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not text.strip():
            continue
        name, _, rest = text.strip().partition(" ")
        flags = []
        while (rest := rest.strip()).startswith("--"):
            flag, _, rest = rest.partition(" ")
            flags.append(flag)
        if name == "FROM":
            base, _, label = rest.partition(" AS ")
            stages.append(Stage(label, base, ()))
        else:
            last = stages.pop()
            stages.append(
                Stage(last.name, last.base, (*last.instructions, Instruction(name, tuple(flags), rest)))
            )
    return stages


def target(path: Path, name: str | None = None) -> list[Instruction]:
    """All instructions of a target in order, those of the stages that it builds on first; the last when unnamed."""
    stages = {stage.name: stage for stage in dockerfile(path)}
    stage = stages[name] if name is not None else list(stages.values())[-1]
    before = target(path, stage.base) if stage.base in stages else []
    return [*before, *stage.instructions]


def health_command(instructions: Sequence[Instruction]) -> str:
    """What HEALTHCHECK runs in a shell."""
    (found,) = (i for i in instructions if i.name == "HEALTHCHECK")
    word, _, command = found.rest.partition(" ")
    assert word == "CMD"
    return command.strip()


def unit(path: Path) -> dict[str, list[str]]:
    """Every assignment of a unit by key, in order; an empty one takes the former away, as systemd does."""
    found: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def page_commands(path: Path) -> Iterator[str]:
    """Indented lines of a Markdown page, and what stands between backquotes, if it is a command line."""
    text = path.read_text("utf-8")
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    yield from (line.strip() for line in lines if line.startswith("    "))
    yield from (
        code for line in lines if not line.startswith("    ") for code in re.findall(r"`([^`]+)`", line)
    )


_PROGRAM = re.compile(r"(/opt/starlings/bin/)?starlings")
_IMAGE = re.compile(r"starlings-coordinator|starlings-worker:(cpu|cuda)")
# The service of compose.yaml that is run with other commands.
_SERVICE = "prepare"


def own_commands(line: str) -> Iterator[list[str]]:
    """The arguments of each `starlings` within a command line: as such, by its path, or as an image's entry point."""
    for part in re.split(r"&&|\|\||[;|]", line.partition("<<<")[0]):
        words = shlex.split(re.sub(r">\s*\S+", "", part))
        for at, word in enumerate(words[:-1]):
            program = _PROGRAM.fullmatch(word) or _IMAGE.fullmatch(word)
            service = word == _SERVICE and "run" in words[:at] and "compose" in words[:at]
            # Otherwise it is a package, a user, or a name.
            if (program or service) and re.fullmatch(r"[a-z]+", words[at + 1]):
                yield words[at + 1 :]
                break


def check(arguments: Sequence[str]) -> None:
    """Parses the arguments as `starlings` would, without running anything.

    Raises:
        AssertionError: no such command or option, or a value that it does not take.
    """
    command: Any = get_command(app)
    rest = list(arguments)
    path = []
    while hasattr(command, "commands"):
        assert rest[:1], f"{arguments}: no command"
        path.append(rest.pop(0))
        assert path[-1] in command.commands, f"there is no `starlings {' '.join(path)}`"
        command = command.commands[path[-1]]
    try:
        command.make_context(path[-1], rest)
    except Exception as error:
        raise AssertionError(f"starlings {' '.join(arguments)}: {error!r}") from None
