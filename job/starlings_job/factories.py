"""Sequential factories that ship with the package: their arguments and how many blocks they make. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlings_job.config_checks import Check, whole
from starlings_job.errors import JobFileError

# Name -> arguments and their checks.
FACTORY_ARGUMENTS: dict[str, Mapping[str, Check]] = {
    "shapes_classifier": {"width": whole(4, 1024), "layers": whole(1, 64)},
}


def factory_block_count(factory: str, arguments: Mapping[str, Any]) -> int:
    """Children of the Sequential that a factory makes: a stem, the residual layers, a classifying head."""
    if factory == "shapes_classifier":
        return int(arguments["layers"]) + 2
    raise JobFileError(f"no factory {factory!r}; allowed: {', '.join(FACTORY_ARGUMENTS)}")


def checked_factory(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A factory's name and arguments as they may be used.

    Raises:
        JobFileError: an unknown factory, or arguments that are missing, unknown or out of range.
    """
    factory = config.get("factory")
    checks = FACTORY_ARGUMENTS.get(factory) if isinstance(factory, str) else None
    if checks is None:
        raise JobFileError(
            f"{where}: no factory {str(factory)[:60]!r}; allowed: {', '.join(FACTORY_ARGUMENTS)}"
        )
    for key, value in config.items():
        if key != "factory" and (key not in checks or checks[key](value)):
            raise JobFileError(
                f"{where}: {factory} {key} = {str(value)[:60]} is not allowed; has {', '.join(checks)}"
            )
    missing = [key for key in checks if key not in config]
    if missing:
        raise JobFileError(f"{where}: {factory} needs {', '.join(missing)}")
    return dict(config)
