"""A running job: header, plan matrix, workers, events. Everything comes from one StatusReply and what was
seen before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from starlings.views.figures import count, duration, size, sparkline
from starlings.views.streaming import (
    age_text,
    age_words,
    evaluation_line,
    met_text,
    samples_line,
    steps_text,
    streams,
)
from starlings_protos import control_pb2
from starlings_protos.errors import clean_text

PHASE_STYLE = {
    "gathering": "yellow",
    "planning": "cyan",
    "loading": "cyan",
    "training": "green",
    "finishing": "magenta",
    "done": "bold green",
    "failed": "bold red",
}
STATE_STYLE = {"training": "green", "lost": "red", "evicted": "red", "leaving": "yellow", "standby": "yellow"}
PACE_STYLE = {"yellow": "yellow", "red": "red"}
_EVENT_STYLE = {
    "join": "green",
    "leave": "yellow",
    "lost": "red",
    "step_restarted": "yellow",
    "refused": "red",
    "evicted": "red",
    "paused": "yellow",
    "suspect": "red",
    "plan": "cyan",
}
# Of jobs without a barrier: steps of the inner optimizer, gradients' age in them, swaps that were averaged.
STREAMING_COLUMNS = ("steps", "stale", "pairs")
_WORKER_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


@dataclass
class History:
    """Folds Watch replies: each carries only events and loss points newer than the last one asked for."""

    points: list[control_pb2.LossPoint] = field(default_factory=list)
    events: list[control_pb2.Event] = field(default_factory=list)
    last: control_pb2.StatusReply | None = None
    # The last reply from the middle of training: what a picture of the run shows.
    training: control_pb2.StatusReply | None = None
    # Of the coordinator's present life, by sequence number.
    _said: dict[int, control_pb2.Event] = field(default_factory=dict)

    def add(self, reply: control_pb2.StatusReply) -> list[control_pb2.Event]:
        """Remembers the reply; returns the events that were not seen before."""
        newest = max((event.sequence for event in reply.events), default=max(self._said, default=0))
        if newest < max(self._said, default=0) or any(
            event != self._said.get(event.sequence, event) for event in reply.events
        ):
            # A coordinator that was started again counts from the beginning, and may have said as much since.
            self._said.clear()
        fresh = [event for event in reply.events if event.sequence not in self._said]
        self._said.update((event.sequence, event) for event in fresh)
        self.events.extend(fresh)
        if reply.loss_curve:
            # A job that went back to a checkpoint repeats steps: the newer points count.
            first = reply.loss_curve[0].step
            self.points = [p for p in self.points if p.step < first] + list(reply.loss_curve)
        self.last = reply
        if reply.phase == "training" and reply.step < reply.steps_total:
            self.training = reply
        return fresh

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(p.step, p.loss) for p in self.points]


def short(worker_id: str) -> str:
    """The first characters of an id: enough to tell workers of one swarm apart."""
    return worker_id if worker_id == "keeper" else worker_id[:7]


def worker_name(worker: control_pb2.WorkerStatus) -> str:
    return f"{short(worker.worker_id)} {worker.device_class or worker.device or '?'}"


def holds(worker: control_pb2.WorkerStatus, stage: int) -> bool:
    return worker.HasField("span") and worker.span.first_stage <= stage <= worker.span.last_stage


def span_text(worker: control_pb2.WorkerStatus) -> str:
    """ "0-2", "3", or "-" for a worker that holds nothing."""
    if not worker.HasField("span"):
        return "-"
    first, last = worker.span.first_stage, worker.span.last_stage
    return str(first) if first == last else f"{first}-{last}"


def plan_matrix(reply: control_pb2.StatusReply) -> Table:
    """Stage x worker: one row per worker, one column per stage of the cut, a block where the worker holds the
    stage.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("worker", no_wrap=True)
    for index, stage in enumerate(reply.stages):
        blocks = str(stage.first_block)
        if stage.last_block != stage.first_block:
            blocks += f"-{stage.last_block}"
        table.add_column(f"stage {index}\n[dim]blocks {blocks}[/dim]", justify="center", no_wrap=True)
    without_barrier = streams(reply)
    for name in ("tokens/s", "compute", "wait", "sent", *(STREAMING_COLUMNS if without_barrier else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="ellipsis", no_wrap=True)
    for row, worker in enumerate(reply.workers):
        colour = _WORKER_COLOURS[row % len(_WORKER_COLOURS)]
        cells = [Text("█████" if holds(worker, s) else "·", style=colour) for s in range(len(reply.stages))]
        busy, waiting = _shares(worker)
        state = state_text(worker)
        if worker.reason:
            state.append(f": {worker.reason}", style="dim")
        table.add_row(
            Text(worker_name(worker), style=colour),
            *cells,
            f"{worker.tokens_per_second:,.0f}" if worker.HasField("span") else "",
            busy,
            waiting,
            size(sum(worker.bytes_sent.values())),
            *(_streaming_cells(worker, reply) if without_barrier else ()),
            state,
        )
    return table


def state_text(worker: control_pb2.WorkerStatus) -> Text:
    """Its state, or that it is suspect, in the colour of its pace."""
    if worker.suspect:
        return Text("suspect", style="red")
    style = PACE_STYLE.get(worker.pace, "") if worker.state == "training" else ""
    return Text(worker.state, style=style or STATE_STYLE.get(worker.state, ""))


def _streaming_cells(
    worker: control_pb2.WorkerStatus, reply: control_pb2.StatusReply
) -> tuple[str | Text, ...]:
    return steps_text(worker), age_text(worker), met_text(worker.worker_id, reply.exchanges)


def _shares(worker: control_pb2.WorkerStatus) -> tuple[str, str]:
    total = sum(worker.seconds.values())
    if total <= 0:
        return "", ""
    return f"{worker.seconds['compute'] / total:.0%}", f"{worker.seconds['wait'] / total:.0%}"


def header(
    reply: control_pb2.StatusReply, losses: Sequence[tuple[int, float]], curve_width: int = 48
) -> RenderableType:
    """Progress, rate, loss and its curve."""
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        Text.assemble(("step ", "dim"), f"{reply.step}/{reply.steps_total}"),
        Text.assemble(("tokens ", "dim"), f"{count(reply.tokens)}/{count(reply.tokens_total)}"),
        Text.assemble(("tokens/s ", "dim"), f"{reply.tokens_per_second:,.0f}"),
        Text.assemble(("loss ", "dim"), (f"{reply.loss:.3f}" if losses else "-", "bold")),
        Text.assemble(("elapsed ", "dim"), duration(reply.elapsed_s)),
        Text.assemble(("plan ", "dim"), str(reply.plan_version)),
    )
    bar = ProgressBar(total=max(1, reply.steps_total), completed=reply.step)
    lines: list[RenderableType] = [grid, bar]
    curve = sparkline([loss for _, loss in losses], curve_width)
    if curve:
        values = [loss for _, loss in losses]
        lines.append(
            Text.assemble(("loss ", "dim"), f"{max(values):.2f} ", (curve, "cyan"), f" {values[-1]:.2f}")
        )
    if streams(reply):
        lines.append(samples_line(reply))
    if (evaluated := evaluation_line(reply)) is not None:
        lines.append(evaluated)
    if reply.waiting_for:
        lines.append(Text(reply.waiting_for, style="yellow"))
    if reply.quarantined:
        lines.append(quarantine_line(reply.quarantined))
    if reply.checkpoint_trouble:
        lines.append(Text(f"no checkpoints: {reply.checkpoint_trouble}", style="yellow"))
    lines.append(bus_line(reply.bus if reply.HasField("bus") else None))
    if reply.failure:
        lines.append(Text(reply.failure, style="bold red"))
    return Group(*lines)


def quarantine_line(quarantined: Sequence[control_pb2.Quarantined]) -> Text:
    """How many samples are out of training, and the newest of them with the reason."""
    count_of_all, last = sum(len(q.samples) for q in quarantined), quarantined[-1]
    ids = ", ".join(map(str, last.samples[:8])) + (" ..." if len(last.samples) > 8 else "")
    return Text(
        f"{count_of_all} samples are quarantined, {ids} the last: {clean_text(last.reason, 120)}",
        style="yellow",
    )


def bus_line(bus: control_pb2.BusHealth | None) -> Text:
    """Whether the coordinator is on the job's MQTT bus, since when, and why not; None for a job without one."""
    if bus is None:
        return Text("bus off ([bus] url in the job file turns it on)", style="dim")
    where = clean_text(bus.url, 80)
    dropped = f", {bus.dropped} messages dropped" if bus.dropped else ""
    if bus.connected:
        return Text(f"bus {where}: connected for {duration(bus.for_s)}{dropped}", style="dim")
    reason = f" ({clean_text(bus.reason, 120)})" if bus.reason else ""
    return Text(
        f"bus {where}: away for {duration(bus.for_s)}{reason}; training goes on{dropped}", style="yellow"
    )


def exchange_lines(exchanges: Sequence[control_pb2.StageExchanges], limit: int = 8) -> Text:
    """Of each stage its slot, what came of rounds, and who went alone last, and why."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for stage in exchanges[:limit]:
        if text:
            text.append("\n")
        kind = "group" if any(replica.last.members for replica in stage.replicas) else "pairs"
        text.append(f"{kind} of stage {stage.stage} ", style="dim")
        if not stage.slot_length_s:
            text.append("no clock yet: waiting for every replica's first step")
            continue
        text.append(f"slot {stage.slot}, {stage.slot_length_s:.1f} s each")
        text.append(" (warm-up)" if stage.warmup else "")
        text.append(f"; {stage.rounds_averaged} averaged, {stage.rounds_one_sided} one-sided")
        alone = [replica for replica in stage.replicas if replica.alone_in_a_row]
        for replica in sorted(alone, key=lambda r: -r.alone_in_a_row)[:2]:
            text.append(f"; {short(replica.worker_id)} alone {replica.alone_in_a_row}x", style="yellow")
            if why := alone_words(replica.last):
                text.append(f" ({why})", style="yellow")
        text.append(partial_words(stage), style="yellow")
        for replica in stage.replicas:
            if replica.suspect:
                text.append(f"; {short(replica.worker_id)} is suspect", style="red")
    if len(exchanges) > limit:
        text.append(f"\n... and {len(exchanges) - limit} more stages", style="dim")
    return text


def partial_words(stage: control_pb2.StageExchanges) -> str:
    """How much of the vector the stage's newest round averaged, and without whom; "" when it was all with all."""
    last = [r.last for r in stage.replicas if r.last.result == control_pb2.SWAP_RESULT_COMMITTED]
    if not last:
        return ""
    newest = max(last, key=lambda outcome: outcome.slot)
    least = min(outcome.fraction for outcome in last if outcome.slot == newest.slot)
    without = ", ".join(
        f"{clean_text(short(d.worker_id), 12)} ({clean_text(d.reason, 60)})" for d in newest.dropped[:2]
    )
    words = f"; slot {newest.slot} averaged {math.floor(1000 * least) / 10:g} %" if least < 1 else ""
    return words + (f"; slot {newest.slot} went without {without}" if without else "")


def alone_words(outcome: control_pb2.RoundOutcome) -> str:
    """Why a replica went without its partner; "" when it did not."""
    if outcome.result != control_pb2.SWAP_RESULT_SOLO:
        return ""
    reason = control_pb2.SoloReason.Name(outcome.solo_reason).removeprefix("SOLO_REASON_")
    words = clean_text(outcome.detail, 60) or reason.lower().replace("_", " ")
    return f"{clean_text(short(outcome.partner), 12)}: {words}" if outcome.partner else words


def event_lines(events: Sequence[control_pb2.Event], limit: int) -> RenderableType:
    text = Text(no_wrap=True, overflow="ellipsis")
    for event in events[-limit:]:
        if text:
            text.append("\n")
        text.append(f"{duration(event.at_s):>7} ", style="dim")
        text.append(f"{event.kind} ", style=_EVENT_STYLE.get(event.kind, ""))
        text.append(event.text)
    return text


def status_panel(
    reply: control_pb2.StatusReply,
    losses: Sequence[tuple[int, float]],
    events: Sequence[control_pb2.Event],
    *,
    event_limit: int = 6,
) -> Panel:
    """The whole picture of a job, for a live view or for one `starlings status`."""
    parts: list[RenderableType] = [header(reply, losses)]
    if reply.workers:
        parts.append(plan_matrix(reply))
    if reply.exchanges:
        parts.append(exchange_lines(reply.exchanges))
    if events:
        parts.append(event_lines(events, event_limit))
    phase = Text(reply.phase, style=PHASE_STYLE.get(reply.phase, ""))
    return Panel(
        Group(*parts),
        title=Text.assemble("starlings · ", (reply.job, "bold"), " · ", phase),
        title_align="left",
    )


def status_line(reply: control_pb2.StatusReply) -> str:
    """One plain line, for logs and pipes."""
    if reply.phase in ("gathering", "planning", "loading"):
        waiting = f": {reply.waiting_for}" if reply.waiting_for else ""
        return f"{duration(reply.elapsed_s)} {reply.phase}{waiting} ({len(reply.workers)} workers)"
    return (
        f"{duration(reply.elapsed_s)} {reply.phase} step {reply.step}/{reply.steps_total} "
        f"tokens {count(reply.tokens)}/{count(reply.tokens_total)} at {reply.tokens_per_second:,.0f}/s "
        f"loss {reply.loss:.3f}{age_words(reply)}"
    )
