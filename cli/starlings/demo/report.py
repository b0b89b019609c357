"""What the demo found, for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from starlings.views.figures import count, duration, size
from starlings.views.status import History, span_text, worker_name
from starlings_protos import control_pb2


def machine_report(
    history: History, entropies: Mapping[str, float], export_path: Path | None, *, seed: int, elapsed_s: float
) -> dict[str, Any]:
    """The demo's outcome as plain data. Losses in nats per token (a byte), bytes by kind over all workers."""
    reply = history.last or control_pb2.StatusReply()
    sent: dict[str, int] = {}
    for worker in reply.workers:
        for kind, amount in worker.bytes_sent.items():
            sent[kind] = sent.get(kind, 0) + amount
    return {
        "job": reply.job,
        "phase": reply.phase,
        "seed": seed,
        "steps": reply.step,
        "tokens": reply.tokens,
        "tokens_per_second": _training_rate(history, reply),
        "elapsed_s": round(elapsed_s, 3),
        "validation_loss": reply.validation_loss if reply.has_validation_loss else None,
        "unigram_entropy": entropies["unigram"],
        "bigram_entropy": entropies["bigram"],
        "loss_curve": [
            {"step": p.step, "tokens": p.tokens, "loss": p.loss, "at_s": p.at_s} for p in history.points
        ],
        "workers": [_worker(worker) for worker in reply.workers],
        "plan": {
            "version": reply.plan_version,
            "stages": [{"first_block": s.first_block, "last_block": s.last_block} for s in reply.stages],
            "spans": {w.worker_id: _span(w) for w in reply.workers},
        },
        "bytes_sent": sent,
        "events": [
            {"sequence": e.sequence, "at_s": e.at_s, "kind": e.kind, "text": e.text} for e in history.events
        ],
        "samples_leased": reply.samples_leased,
        "samples_trained": reply.samples_trained,
        "samples_lost": reply.samples_lost,
        "sample_text": reply.sample_text,
        "checkpoint": reply.checkpoint,
        "export_path": str(export_path) if export_path else None,
    }


def _training_rate(history: History, reply: control_pb2.StatusReply) -> float:
    """Tokens per second from the first to the last committed step; the reply's own figure when there is only one."""
    points: Sequence[control_pb2.LossPoint] = history.points
    if len(points) >= 2 and points[-1].at_s > points[0].at_s:
        return (points[-1].tokens - points[0].tokens) / (points[-1].at_s - points[0].at_s)
    return reply.tokens_per_second


def _span(worker: control_pb2.WorkerStatus) -> list[int] | None:
    return [worker.span.first_stage, worker.span.last_stage] if worker.HasField("span") else None


def _worker(worker: control_pb2.WorkerStatus) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "class": worker.device_class,
        "device": worker.device,
        "state": worker.state,
        "span": _span(worker),
        "gossip_peers": [
            {"worker_id": p.worker_id, "group": p.group, "weight": p.weight} for p in worker.gossip_peers
        ],
        "tokens": worker.tokens,
        "tokens_per_second": worker.tokens_per_second,
        "bytes_sent": dict(worker.bytes_sent),
        "seconds": dict(worker.seconds),
        "memory_bytes": worker.memory_bytes,
        "planned_memory_bytes": worker.planned_memory_bytes,
    }


def final_panel(report: Mapping[str, Any], history: History, loading: str) -> RenderableType:
    """Validation loss beside the entropies, who did what, a continuation, and how to load the model."""
    loss, bigram = report["validation_loss"], report["bigram_entropy"]
    results = Table.grid(padding=(0, 2))
    verdict = ""
    if loss is not None:
        verdict = (
            "below the bigram entropy: it learned more than letter pairs"
            if loss < bigram
            else "not yet below the bigram entropy: train longer (--steps)"
        )
        results.add_row("validation loss", f"[bold green]{loss:.3f}[/] nats per byte", f"[dim]{verdict}[/]")
    results.add_row("bigram entropy", f"{bigram:.3f}", "[dim]best guess from the byte before[/]")
    results.add_row(
        "unigram entropy", f"{report['unigram_entropy']:.3f}", "[dim]best guess from frequencies alone[/]"
    )
    results.add_row(
        "trained",
        f"{count(report['tokens'])} tokens",
        f"[dim]{report['tokens_per_second']:,.0f} tokens/s, {duration(report['elapsed_s'])} in all, "
        f"{report['samples_lost']} samples lost[/]",
    )
    if (killed := report.get("killed")) is not None:
        noticed = killed["noticed_after_s"]
        how = (
            f"given up after {noticed:.1f} s" if noticed is not None else "the others did not need to notice"
        )
        results.add_row(
            "killed", f"{killed['name']} in step {killed['step']}", f"[dim]{how}; the others went on[/]"
        )
    parts: list[RenderableType] = [results]
    if history.last is not None:
        workers = Table.grid(padding=(0, 2))
        for worker in history.last.workers:
            workers.add_row(
                worker_name(worker),
                f"stages {span_text(worker)}",
                f"{count(worker.tokens)} tokens",
                f"{size(sum(worker.bytes_sent.values()))} sent",
            )
        parts += [Text(), workers]
    if report["sample_text"]:
        parts += [
            Text("\nA prompt from held-out text, continued by the swarm:", style="dim"),
            Text(report["sample_text"]),
        ]
    if report["export_path"]:
        parts += [
            Text(f"\nThe model is in {report['export_path']}. In Python:", style="dim"),
            Text(escape(loading), style="cyan"),
        ]
    return Panel(Group(*parts), title="The swarm has landed", title_align="left")
