"""The `starlings` command. Imports neither torch nor transformers: heavy steps run in a child process."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed version, or "0+unknown" when run from a bare source tree."""
    try:
        return importlib.metadata.version("starlings")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
