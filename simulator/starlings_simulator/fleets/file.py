"""Fleet files: a swarm that need not exist, as TOML. `load_fleet` reads one; `Swarm.of` numbers its workers."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from starlings_job.errors import JobError
from starlings_job.spec_errors import explain_syntax_error, explain_validation_error
from starlings_simulator.fleets.sections import FleetSpec

FILE_LIMIT_BYTES = 4 << 20


class FleetFileError(JobError):
    """A fleet file that cannot be read, or that says what cannot be. The text names line, key and what is allowed."""


def load_fleet(path: str | Path) -> FleetSpec:
    """The fleet that a `fleet.toml` describes.

    Raises:
        FleetFileError
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise FleetFileError(
            f"{path}: cannot read the fleet file ({error.strerror}); docs/fleet.toml is one to start from"
        ) from None
    if len(data) > FILE_LIMIT_BYTES:
        raise FleetFileError(
            f"{path}: a fleet file of more than {FILE_LIMIT_BYTES} bytes; use count for alike workers"
        )
    try:
        return parse_fleet(data.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise FleetFileError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def parse_fleet(text: str, where: str = "fleet.toml") -> FleetSpec:
    """As `load_fleet`, from the file's text; `where` names it in errors."""
    try:
        record = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FleetFileError(explain_syntax_error(error, where)) from None
    try:
        return FleetSpec.model_validate(record)
    except ValidationError as error:
        raise FleetFileError(explain_validation_error(error, FleetSpec, where, text)) from None
