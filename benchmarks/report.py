"""What every benchmark shares: the environment it ran in, its table, and the JSON file with rows and claims."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure that is promised somewhere, and whether it holds here."""

    name: str
    value: float
    bound: float
    holds: bool


def environment() -> dict[str, Any]:
    """The machine, as far as figures depend on it."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else ""
    return {
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "platform": platform.platform(),
        "cpu": model,
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def show(
    title: str, rows: list[dict[str, Any]], claims: list[Claim], hidden: Collection[str] = frozenset()
) -> None:
    """Prints the rows, those with the same columns in one table, then each claim with its verdict.

    Args:
        hidden: columns for the JSON file only.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        # A figure that only some rows of a kind have makes no other kind: the first column says what they are.
        kinds.setdefault(next(iter(row)), []).append(row)
    for number, alike in enumerate(kinds.values()):
        columns = [key for key in dict.fromkeys(k for row in alike for k in row) if key not in hidden]
        table = Table(*columns, title=title if number == 0 else None)
        for row in alike:
            table.add_row(*(_text(row.get(name, "")) for name in columns))
        console.print(table)
    for claim in claims:
        verdict = "holds" if claim.holds else "FAILS"
        console.print(f"{verdict}: {claim.name}: {claim.value:.3f} (bound {claim.bound:.3f})")


def _text(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else (
            f"{value:,.0f}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        )
    )


def write_json(
    file: Path | None,
    benchmark: str,
    environ: dict[str, Any],
    rows: list[dict[str, Any]],
    claims: list[Claim],
) -> None:
    """The file that other programs read; nothing without a path."""
    if file is None:
        return
    record = {
        "benchmark": benchmark,
        "environment": environ,
        "rows": rows,
        "claims": [asdict(claim) for claim in claims],
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
