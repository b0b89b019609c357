"""What `starlings simulate` found, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from starlings.views.figures import count, duration, size, sparkline

# Of workers, those that did most first.
ROWS = 24
# What each cause means; the first is what devices are for.
CAUSES = {
    "compute": "forward and backward passes",
    "optimizer": "the optimizer's steps",
    "exchange": "encoding, judging and averaging exchanges",
    "state": "copying weights, checkpoints",
    "start": "starting, connecting",
    "no place": "no place in the plan, or none yet",
    "no lease": "no samples to begin",
    "pipeline": "waiting for other stages, or for links to them",
    "barrier": "waiting for the others at the end of a step",
}


def render(answer: Mapping[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_headline(answer)]
    rates = throughput(answer)
    curve = sparkline([rate for _, rate in rates], 60)
    if curve:
        parts.append(
            Text.assemble(("tokens/s ", "dim"), (curve, "cyan"), f" {count(rates[-1][1])} at the end")
        )
    if answer["waiting_for"] and answer["phase"] != "done":
        parts.append(Text(str(answer["waiting_for"]), style="yellow"))
    parts += [_time_table(answer), _bytes_table(answer), _worker_table(answer)]
    return Group(*parts)


def throughput(answer: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Tokens per second between each two points of the timeline, with the later one's time."""
    points = answer["timeline"]
    return [
        (later["at_s"], (later["tokens"] - sooner["tokens"]) / (later["at_s"] - sooner["at_s"]))
        for sooner, later in pairwise(points)
        if later["at_s"] > sooner["at_s"]
    ]


def _headline(answer: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (f"{answer['job']} on {answer['fleet'] or 'the fleet'}: ", "bold"),
        f"{duration(answer['virtual_s'])} of virtual time, {count(answer['tokens'])} tokens "
        f"({count(answer['tokens_per_s_training'])}/s once it trained), {answer['workers_on_average']:.1f} workers on "
        f"average, {answer['utilisation']:.0%} of their time computing, {answer['plans']} plans, "
        f"{answer['samples_repeated']} samples repeated, {answer['samples_unmerged']} unmerged"
        f"{', as flows' if answer['mode'] == 'flow' else ''}; ",
        (str(answer["phase"]), "bold"),
    )


def _time_table(answer: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("workers' time")
    table.add_column("share", justify="right")
    table.add_column("hours", justify="right")
    table.add_column("")
    whole_s = sum(answer["seconds"].values()) or 1.0
    for cause, seconds in sorted(answer["seconds"].items(), key=lambda item: -item[1]):
        if seconds >= 0.0005 * whole_s:
            row = (cause, f"{seconds / whole_s:.1%}", f"{seconds / 3600:,.1f}")
            table.add_row(*row, Text(CAUSES.get(cause, ""), style="dim"))
    return table


def _bytes_table(answer: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("sent")
    table.add_column("bytes", justify="right")
    table.add_column("per token", justify="right")
    tokens = max(1, answer["tokens"])
    for kind, byte_count in sorted(answer["sent_bytes"].items(), key=lambda item: -item[1]):
        table.add_row(kind, size(byte_count), size(byte_count / tokens))
    return table


def _worker_table(answer: Mapping[str, Any]) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("worker", "stages", "there", "computing", "tokens", "otherwise mostly"):
        table.add_column(name, justify="left" if name in ("worker", "otherwise mostly") else "right")
    ranked = sorted(answer["workers"], key=lambda worker: (-worker["tokens"], worker["worker"]))
    for worker in ranked[:ROWS]:
        spent = worker["seconds"]
        there_s = worker["present_s"]
        rest = {cause: seconds for cause, seconds in spent.items() if cause != "compute"}
        most = max(rest, key=lambda cause: rest[cause]) if any(rest.values()) else ""
        table.add_row(
            worker["worker"],
            worker["stages"] or "-",
            duration(there_s),
            f"{spent['compute'] / there_s:.0%}" if there_s > 0 else "-",
            count(worker["tokens"]),
            most,
        )
    left_out = len(ranked) - ROWS
    return Group(table, Text(f"and {left_out} more workers", style="dim")) if left_out > 0 else table
