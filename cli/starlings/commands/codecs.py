"""`starlings codecs`: what each codec costs and does on this machine."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from starlings import children
from starlings.commands.options import JsonOption
from starlings.failures import guarded
from starlings.output import console, emit, say


def register(app: typer.Typer) -> None:
    app.command()(codecs)


@guarded
def codecs(json_output: JsonOption = False) -> None:
    """Measure every codec here: bits per value, relative errors, encoding and decoding speed on one core.

    Errors are those of one encoding, without error feedback: on normal values, on heavy-tailed ones (Student's t,
    3 degrees of freedom), and on a real gradient that is made here (a small byte model on Python code). Needs torch.

    Example:  starlings codecs
    """
    found = children.run_heavy("codecs", {}, log=2, progress=lambda news: None)["rows"]
    if json_output:
        for row in found:
            emit(row)
        return
    table = Table(
        "codec", "bits/value", "error: normal", "heavy tails", "gradient", "encode GB/s", "decode GB/s"
    )
    for row in found:
        if "missing" not in row:
            table.add_row(*_cells(row))
    console().print(table)
    for row in found:
        if "missing" in row:
            say(f"{row['codec']}: {row['missing']}")
    say("GB/s of float32 values, one core. What suits where: docs/reference.md, Codecs.")


def _cells(row: dict[str, Any]) -> list[str]:
    errors = (row["error_normal"], row["error_heavy"], row["error_gradient"])
    return [
        row["codec"],
        f"{row['bits_per_value']:.3g}",
        *(f"{error:.2g}" for error in errors),
        f"{row['encode_gb_per_s']:.2g}",
        f"{row['decode_gb_per_s']:.2g}",
    ]
