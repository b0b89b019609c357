"""A plan for people: figures, bounds, who holds what and why, what links carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from starlings.views.figures import count, size

# Rows of a table; --json has all.
ROWS_MOST = 40
SITES_MOST = 8
NAMES_MOST = 4
# A smaller part of the rate is nothing.
_NOTHING = 1e-3
_SECONDS_PER_DAY = 86_400


def render(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `plan_answer` on a terminal."""
    parts: list[RenderableType] = [Text(line) for line in summary(answer)]
    parts.append(_placement(answer))
    parts += [Text(line) for line in reason_lines(answer["placement"])]
    parts.append(_sites(answer["sites"]))
    if "layouts" in answer:
        parts.append(_layouts(answer["layouts"]))
    if "islands" in answer:
        parts += [Text(line) for line in island_lines(answer["islands"])]
    if "marginal" in answer:
        parts += [Text(line) for line in marginal_lines(answer["marginal"])]
    return Group(*parts)


def time_words(seconds: float) -> str:
    """ "3.2 days", "5.0 hours", "40 s"."""
    for size_s, name in ((_SECONDS_PER_DAY, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size_s:
            return f"{seconds / size_s:.3g} {name}"
    return f"{seconds:.2g} s"


def rate_words(bytes_per_s: float) -> str:
    """Links are sold in bits."""
    return f"{bytes_per_s * 8 / 1e6:.3g} Mbit/s"


def summary(answer: Mapping[str, Any]) -> list[str]:
    """The plan in a few lines."""
    lines = [
        f"{answer['job']} ({count(answer['parameters'])} parameters) on {answer['fleet']}: "
        f"{answer['workers']} workers, {answer['holders']} of them hold something, {len(answer['stages'])} stages",
        f"{count(answer['tokens_per_s'])} tokens/s predicted: {count(answer['tokens'])} tokens in "
        f"{time_words(answer['seconds'])}",
        f"{answer['of_bound']:.0%} of the bound; bounds in tokens/s: {_bounds(answer['bounds'])}",
        f"What binds: {answer['binding']}",
    ]
    cost, energy = answer["cost"], answer["energy"]
    if cost["per_hour"] is not None:
        lines.append(
            f"Cost: {cost['per_hour']:.3g} {cost['currency']} per hour, {cost['per_million_tokens']:.3g} per million "
            f"tokens, {cost['total']:.4g} in all{_without(cost['workers_without_price'], 'price')}"
        )
    if energy["watts"] is not None:
        lines.append(
            f"Energy of devices: {energy['watts'] / 1000:.3g} kW, {energy['tokens_per_joule']:.3g} tokens per joule, "
            f"{energy['total_kwh']:.4g} kWh in all{_without(energy['workers_without_watts'], 'watts')}"
        )
    return lines


def _bounds(bounds: Mapping[str, Any]) -> str:
    uplink = "no limit" if bounds["uplink"] is None else count(bounds["uplink"])
    return (
        f"compute {count(bounds['compute'])}, with memory {count(bounds['memory'])}, links alone {uplink}, "
        f"all together {count(bounds['all'])}"
    )


def _without(workers: int, what: str) -> str:
    return f" ({workers} workers without {what})" if workers else ""


def _placement(answer: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("worker", "where", "holds", "memory", "busy"):
        table.add_column(name, no_wrap=True)
    stages = len(answer["stages"])
    groups: list[list[Mapping[str, Any]]] = []
    cells: list[tuple[str, ...]] = []
    # Neighbours in the file that hold and do the same are one row.
    for row in answer["placement"]:
        where = row["site"] if row["site"] != row["worker"] else row["region"]
        cell: tuple[str, ...] = (
            where,
            _holds(row, stages),
            _memory(row),
            f"{row['load']:.0%}",
            row["reason"],
        )
        if cells and cells[-1] == cell:
            groups[-1].append(row)
        else:
            groups.append([row])
            cells.append(cell)
    for group, cell in list(zip(groups, cells, strict=True))[:ROWS_MOST]:
        names = group[0]["worker"] + (f" to {group[-1]['worker']}" if len(group) > 1 else "")
        table.add_row(names, *cell)
    if len(groups) > ROWS_MOST:
        rest = sum(map(len, groups[ROWS_MOST:]))
        table.add_row(f"... and {rest} more", "--json has all", "", "", "")
    return table


def reason_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why workers hold what they hold, each reason once."""
    whom: dict[str, list[str]] = {}
    for row in rows:
        whom.setdefault(row["reason"], []).append(row["worker"])
    lines = []
    for reason, names in list(whom.items())[:ROWS_MOST]:
        more = f" and {len(names) - NAMES_MOST} more" if len(names) > NAMES_MOST else ""
        lines.append(f"{', '.join(names[:NAMES_MOST])}{more}: {reason}")
    return lines


def _holds(row: Mapping[str, Any], stages: int) -> str:
    if "first_stage" not in row:
        return "nothing"
    first, last = row["first_stage"], row["last_stage"]
    if (first, last) == (0, stages - 1):
        return "everything"
    again = ", recomputing" if row["recompute"] else ""
    return (f"stage {first}" if first == last else f"stages {first}-{last}") + again


def _memory(row: Mapping[str, Any]) -> str:
    """What is needed of what is offered, and for how many microbatches at once."""
    if "memory" not in row:
        return ""
    return f"{size(row['memory']['total'])} of {size(row['memory']['offered'])}, x{row['slots']}"


def _sites(sites: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("site", "workers", "up", "of", "down", "of", "full", box=SIMPLE_HEAD)
    used = [row for row in sites if row["up_bytes_per_s"] + row["down_bytes_per_s"] > 0]
    for row in used[:SITES_MOST]:
        limits = [
            "no limit" if row[key] is None else rate_words(row[key])
            for key in ("up_limit_bytes_per_s", "down_limit_bytes_per_s")
        ]
        table.add_row(
            row["site"],
            str(row["workers"]),
            rate_words(row["up_bytes_per_s"]),
            limits[0],
            rate_words(row["down_bytes_per_s"]),
            limits[1],
            f"{row['fullest']:.0%}",
        )
    if len(used) > SITES_MOST:
        table.add_row(f"... and {len(used) - SITES_MOST} more", "", "", "", "", "", "")
    if not used:
        table.add_row("no link binds: nothing that counts crosses one", "", "", "", "", "", "")
    return table


def island_lines(islands: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who passes microbatches to whom when pipelines stay among neighbours, and why each holds what it holds."""
    kept, own = (sum(row[key] for row in islands) for key in ("rate", "own_rate"))
    lines = [
        f"{len(islands)} islands that hold all stages; pipelines that stay inside reach {kept:.0%} of this plan's rate "
        f"with its spans, {own:.0%} with spans of their own"
    ]
    for number, row in enumerate(islands[:ROWS_MOST], 1):
        where = ", ".join(row["regions"])
        lines.append(
            f"Island {number}: {len(row['workers'])} workers in {where}, at most "
            f"{row['widest_rtt_s'] * 1000:.0f} ms apart, {row['rate']:.0%} of the rate"
        )
        members = [{"worker": m["worker"], "reason": m["words"]} for m in row["members"]]
        lines += [f"  {line}" for line in reason_lines(members)]
    return lines


def marginal_lines(marginal: Mapping[str, Any]) -> list[str]:
    """What one more or one less would do, a sentence each."""
    lines = ["One more worker, all others staying where they are:"]
    for row in marginal["add"]:
        if row["gain"] is None:
            lines.append(f"  {row['kind']} promises {row['promised']:.1%} at most (by prices)")
        elif row["gain"] < _NOTHING:
            lines.append(f"  {row['kind']} adds nothing")
        else:
            where = f"{row['first_stage']} to {row['last_stage']}"
            lines.append(f"  {row['kind']} adds {row['gain']:.1%}, holding stages {where}")
    needed = [row for row in marginal["workers"] if row["loss"] >= _NOTHING]
    if needed:
        least = ", ".join(f"{row['worker']} ({row['loss']:.1%})" for row in needed[:4])
        lines.append(f"Least would be lost without {least}")
    park = marginal["park"]
    for worker in park["workers"][:ROWS_MOST]:
        lines.append(f"{worker} adds nothing: park it")
    if park["workers"]:
        lines.append(f"All that is parked would cost {park['loss']:.2%} together")
    return lines


def _layouts(layouts: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("layout", "tokens/s", "of ours", "workers used", "", box=SIMPLE_HEAD)
    for row in layouts:
        table.add_row(
            row["layout"],
            count(row["tokens_per_s"]),
            f"{row['of_ours']:.0%}",
            str(row["holders"]),
            row["about"],
        )
    return table


def render_advice(answer: Mapping[str, Any]) -> RenderableType:
    """The answer of `advise_answer` on a terminal."""
    table = Table(
        "preset",
        "every",
        "codec",
        "sends",
        "takes",
        "of the time",
        "typical",
        "where most",
        "",
        box=SIMPLE_HEAD,
    )
    for row in answer["presets"]:
        notes = [f"fits from every = {row['every_that_fits']} on"] if "every_that_fits" in row else []
        table.add_row(
            ("> " if row["preset"] == answer["recommended"] else "  ") + row["preset"],
            str(row["every"]),
            row["codec"],
            size(row["bytes"]),
            time_words(row["seconds"]),
            f"{row['share']:.1%} of the {'time' if row['barrier'] else 'link'}",
            f"{row['typical_share']:.1%}",
            row["binding_site"] or "",
            "; ".join(notes),
        )
    return Group(
        Text(
            f"{answer['job']} on {answer['fleet']}: {answer['workers']} workers, {answer['stages']} stages, "
            f"{answer['replicas']} replicas that have somebody to exchange with"
        ),
        Text(f"Advice: {answer['recommended']}: {answer['reason']}"),
        table,
    )
