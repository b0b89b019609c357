"""`starlings workers`, `why` and `rebalance --dry-run`: everybody in a table, one in words, who should move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from starlings.output import as_dict
from starlings.views.figures import duration, size
from starlings.views.status import span_text, state_text
from starlings_protos import common_pb2, control_pb2
from starlings_protos.errors import clean_text

# Titles of what `why` says.
_TITLES = {
    "state": "state",
    "span": "holds",
    "waiting": "waits",
    "plan": "plan",
    "pace": "pace",
    "suspect": "suspect",
    "failures": "failures",
    "paused": "paused",
    "evicted": "evicted",
    "do": "what helps",
}
_STYLES = {
    "suspect": "red",
    "failures": "red",
    "evicted": "red",
    "pace": "yellow",
    "paused": "yellow",
    "do": "green",
}


def workers_table(reply: control_pb2.StatusReply) -> Table:
    """One row per worker; ids are whole, for other commands to name."""
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "class", "holds", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "planned", "stale", "upload"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reach", no_wrap=True)
    table.add_column("heard", justify="right", no_wrap=True)
    table.add_column("why", overflow="ellipsis", no_wrap=True, ratio=1)
    for worker in reply.workers:
        holds = worker.HasField("span")
        table.add_row(
            worker.worker_id,
            clean_text(worker.device_class or worker.device or "?", 24),
            span_text(worker),
            _state(worker),
            f"{worker.tokens_per_second:,.0f}" if holds else "",
            f"{worker.capacity_tokens_per_second:,.0f}" if worker.capacity_tokens_per_second else "",
            f"{worker.staleness:.1f}" if worker.inner_steps else "",
            f"{size(worker.uplink_bytes_per_s)}/s" if worker.uplink_bytes_per_s else "",
            _reach(worker),
            f"{worker.silent_s:.0f} s" if worker.silent_s >= 0.5 else "",
            Text(clean_text(worker.reason, 200), style="dim"),
        )
    return table


def _state(worker: control_pb2.WorkerStatus) -> Text:
    text = state_text(worker)
    if worker.pace in ("yellow", "red") and not worker.suspect:
        cause = f" {worker.cause}" if worker.cause else ""
        text.append(f" {worker.pace}{cause} {worker.slowdown:.1f}x", style=worker.pace)
    return text


def _reach(worker: control_pb2.WorkerStatus) -> str:
    if worker.reach in ("relayed", "partly") and worker.relays:
        return f"{worker.reach} by {', '.join(clean_text(r, 8) for r in worker.relays[:2])}"
    return worker.reach


def pause_line(pause: control_pb2.Pause, now_s: float) -> Text:
    since = duration(max(0.0, now_s - pause.since_s))
    settling = "; what was under way is being finished" if pause.settling else ""
    return Text(f"paused for {since}: {clean_text(pause.reason, 200)}{settling}", style="yellow")


def workers_view(reply: control_pb2.StatusReply, now_s: float) -> RenderableType:
    parts: list[RenderableType] = []
    if reply.HasField("pause"):
        parts.append(pause_line(reply.pause, now_s))
    parts.append(workers_table(reply) if reply.workers else Text("Nobody has joined yet.", style="dim"))
    return Group(*parts)


def worker_records(reply: control_pb2.StatusReply) -> list[dict[str, Any]]:
    """Everything that is known of each, for machines; a stage list besides the span, because holes are none."""
    found = []
    for worker in reply.workers:
        record: dict[str, Any] = as_dict(worker)
        span = worker.span
        record["stages"] = (
            list(range(span.first_stage, span.last_stage + 1)) if worker.HasField("span") else []
        )
        found.append(record)
    return found


def advice_view(reply: control_pb2.AdviceGiven) -> RenderableType:
    """One paragraph per question that was priced."""
    parts: list[RenderableType] = []
    for advice in reply.advice:
        now, then = (rate * reply.microbatch_tokens for rate in (advice.rate_now, advice.rate_then))
        lines = Text.assemble((clean_text(advice.question, 200), "bold"))
        lines.append(f"\n  about {now:,.0f} tokens/s as things are", style="dim")
        for move in advice.moves:
            lines.append(f"\n  {_move_words(move)}")
        if advice.moves:
            part = f" ({then / now - 1:+.1%})" if now > 0 else ""
            lines.append(f"\n  then about {then:,.0f} tokens/s{part}; ")
            lines.append(f"{size(advice.migration_bytes)} to copy in {advice.migration_s:,.1f} s")
        style = "green" if advice.worthwhile else "yellow"
        lines.append(f"\n  {clean_text(advice.verdict, 300)}", style=style)
        parts.append(lines)
    return Group(*parts) if parts else Text("Nothing to say of a plan that does not stand.", style="dim")


def _move_words(move: common_pb2.AdvisedMove) -> str:
    who = clean_text(move.worker_id, 20)
    before = _stages(move.before) if move.HasField("before") else ""
    after = _stages(move.after) if move.HasField("after") else ""
    if not before:
        return f"{who} takes {after}"
    return f"{who} moves from {before} to {after}" if after else f"{who} gives up {before}"


def _stages(span: common_pb2.Span) -> str:
    one = span.first_stage == span.last_stage
    return f"stage {span.first_stage}" if one else f"stages {span.first_stage}-{span.last_stage}"


def why_view(worker: control_pb2.WorkerStatus | None, reply: control_pb2.WhyReply) -> RenderableType:
    """A headline and one line per reason."""
    device = f" {clean_text(worker.device_class or worker.device, 40)}" if worker is not None else ""
    lines: list[RenderableType] = [
        Text.assemble((reply.worker_id, "bold"), device, f" ({clean_text(reply.state, 20)})")
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for topic, text in _merged(reply.because):
        style = _STYLES.get(topic, "")
        grid.add_row(Text(_TITLES.get(topic, topic), style=style or "dim"), Text(text))
    lines.append(grid)
    return Group(*lines)


def _merged(because: Sequence[control_pb2.Because]) -> list[tuple[str, str]]:
    """What is said of one topic in a row becomes one paragraph."""
    merged: list[tuple[str, str]] = []
    for reason in because:
        text = clean_text(reason.text, 600)
        if merged and merged[-1][0] == reason.topic:
            merged[-1] = (reason.topic, f"{merged[-1][1]} {text}")
        else:
            merged.append((clean_text(reason.topic, 20), text))
    return merged
