"""Draws a swarm as the MQTT bus tells it (`bus_picture.py`), for a live view, one look, or a log. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from starlings.views.bus_picture import TEXT_LIMIT, BusPicture, Member, presence_word
from starlings.views.figures import count, duration, size, sparkline
from starlings.views.status import PHASE_STYLE, STATE_STYLE, event_lines, short
from starlings.views.streaming import age_text, steps_text
from starlings_protos import bus_pb2, control_pb2
from starlings_protos.errors import clean_text

# Rows of the table; those in trouble come first.
ROWS = 40
# Trouble first.
_ORDER = {
    bus_pb2.PRESENCE_LOST: 0,
    bus_pb2.PRESENCE_ONLINE: 1,
    bus_pb2.PRESENCE_OFFLINE: 2,
    bus_pb2.PRESENCE_UNSPECIFIED: 3,
}


def picture_panel(
    picture: BusPicture, now_s: float, note: str = "", *, rows: int = ROWS, event_limit: int = 6
) -> Panel:
    """The whole picture. `note` is said above everything else: that nothing comes, and why."""
    parts: list[RenderableType] = [Text(note, style="yellow")] if note else []
    parts += _header(picture, now_s)
    if picture.members:
        parts.append(worker_table(picture, now_s, rows))
    if picture.events:
        parts.append(event_lines(list(picture.events), event_limit))
    phase = Text(picture.phase or "unknown", style=PHASE_STYLE.get(picture.phase, ""))
    return Panel(
        Group(*parts),
        title=Text.assemble("starlings bus · ", (picture.job, "bold"), " · ", phase),
        title_align="left",
    )


def _header(picture: BusPicture, now_s: float) -> Iterator[RenderableType]:
    progress, plan = picture.progress, picture.plan
    step, total = (
        (progress or plan or bus_pb2.PlanNotice()).step,
        (progress or plan or bus_pb2.PlanNotice()).steps_total,
    )
    grid = Table.grid(padding=(0, 3))
    seen = picture.coordinator_seen_at_s
    grid.add_row(
        Text.assemble(("step ", "dim"), f"{step}/{total}" if total else "-"),
        Text.assemble(
            ("tokens ", "dim"),
            f"{count(progress.tokens)}/{count(progress.tokens_total)}" if progress else "-",
        ),
        Text.assemble(("tokens/s ", "dim"), f"{progress.tokens_per_second:,.0f}" if progress else "-"),
        Text.assemble(
            ("loss ", "dim"), (f"{picture.losses[-1].loss:.3f}" if picture.losses else "-", "bold")
        ),
        Text.assemble(("plan ", "dim"), str(plan.plan_version) if plan else "-"),
        Text.assemble(("coordinator ", "dim"), f"{duration(now_s - seen)} ago" if seen is not None else "-"),
    )
    yield grid
    if total:
        yield ProgressBar(total=total, completed=step)
    curve = sparkline([point.loss for point in picture.losses], 48)
    if curve:
        values = [point.loss for point in picture.losses]
        yield Text.assemble(("loss ", "dim"), f"{max(values):.2f} ", (curve, "cyan"), f" {values[-1]:.2f}")
    if plan is not None and plan.waiting_for:
        yield Text(clean_text(plan.waiting_for, TEXT_LIMIT), style="yellow")
    if picture.malformed:
        yield Text(f"{picture.malformed} messages could not be read and were dropped", style="red")


def worker_table(picture: BusPicture, now_s: float, rows: int = ROWS) -> RenderableType:
    """One row per worker, `rows` at most: the lost ones first, then by id."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("worker", no_wrap=True)
    table.add_column("stages", justify="center", no_wrap=True)
    aged = any(member.samples and member.samples[-1].inner_steps for member in picture.members.values())
    for name in ("compute", "wait", "sent/s", *(("steps", "stale") if aged else ()), "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="ellipsis", no_wrap=True)
    ordered = sorted(picture.members.items(), key=lambda item: (_ORDER.get(item[1].presence, 9), item[0]))
    spans = picture.spans()
    for worker_id, member in ordered[:rows]:
        rates, seen = member.rates, member.seen_at_s
        table.add_row(
            _name(worker_id, member),
            spans.get(worker_id, "-"),
            f"{rates.compute:.0%}" if rates else "",
            f"{rates.wait:.0%}" if rates else "",
            size(rates.sent_bytes_per_s) if rates else "",
            *(_age_cells(member) if aged else ()),
            duration(now_s - seen) if seen is not None else "-",
            _state(member),
        )
    left_out = len(ordered) - rows
    if left_out <= 0:
        return table
    told = ", ".join(f"{number} {word}" for word, number in picture.counts().items())
    return Group(table, Text(f"and {left_out} more; in all {told}", style="dim"))


def _age_cells(member: Member) -> tuple[str | Text, ...]:
    """Of a job without a barrier."""
    newest = member.samples[-1] if member.samples else control_pb2.TelemetrySample()
    return steps_text(newest), age_text(newest)


def _name(worker_id: str, member: Member) -> str:
    said = member.present.status if member.present is not None else bus_pb2.BusStatus()
    return f"{short(worker_id)} {clean_text(said.device_class or said.device, 40) or '?'}"


def _state(member: Member) -> Text:
    said = member.present.status if member.present is not None else bus_pb2.BusStatus()
    if member.presence != bus_pb2.PRESENCE_ONLINE:
        word = presence_word(member.presence)
        return Text(word, style=STATE_STYLE.get(word, "dim"))
    text = Text(clean_text(said.state, 40) or "online", style=STATE_STYLE.get(said.state, ""))
    if said.reason:
        text.append(f": {clean_text(said.reason, TEXT_LIMIT)}", style="dim")
    return text


def picture_line(picture: BusPicture) -> str:
    """One plain line, for logs and pipes."""
    counts = picture.counts()
    members = ", ".join(f"{number} {word}" for word, number in counts.items()) or "no workers"
    progress = picture.progress
    if progress is None:
        return f"{picture.phase or 'nothing heard of the coordinator'} ({members})"
    loss = f" loss {picture.losses[-1].loss:.3f}" if picture.losses else ""
    return (
        f"{picture.phase} step {progress.step}/{progress.steps_total} tokens {count(progress.tokens)}/"
        f"{count(progress.tokens_total)} at {progress.tokens_per_second:,.0f}/s{loss} ({members})"
    )
