"""What people see of a job without a barrier: steps, the age of gradients, meetings of pairs, samples that count twice
or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.text import Text

from starlings.views.figures import count
from starlings_protos import control_pb2


class Aged(Protocol):
    """What a WorkerStatus and a TelemetrySample have in common."""

    @property
    def inner_steps(self) -> int: ...
    @property
    def staleness(self) -> float: ...
    @property
    def staleness_most(self) -> int: ...
    @property
    def gradients_stale(self) -> int: ...


def streams(reply: control_pb2.StatusReply) -> bool:
    """Whether the job has shown to be one without a barrier."""
    return bool(reply.exchanges) or any(worker.inner_steps for worker in reply.workers)


def steps_text(aged: Aged) -> str:
    """Steps of the inner optimizer, of all stages together; "" before the first."""
    return count(aged.inner_steps) if aged.inner_steps else ""


def age_text(aged: Aged) -> Text:
    """Steps between a microbatch's forward and its backward pass, in the mean and at most, and how many gradients were
    too old to be added.
    """
    text = Text()
    if aged.inner_steps:
        text.append(f"{aged.staleness:.1f}, most {aged.staleness_most}")
    if aged.gradients_stale:
        text.append(f", {count(aged.gradients_stale)} skipped", style="yellow")
    return text


def met_text(worker_id: str, exchanges: Sequence[control_pb2.StageExchanges]) -> Text:
    """Of how many swaps a worker averaged how many, in all its stages; "" before the first."""
    own = [r for stage in exchanges for r in stage.replicas if r.worker_id == worker_id]
    averaged, alone = sum(r.averaged for r in own), sum(r.alone for r in own)
    if not averaged + alone:
        return Text()
    style = "yellow" if alone > averaged else ""
    return Text(f"{count(averaged)} of {count(averaged + alone)}", style=style)


def samples_line(reply: control_pb2.StatusReply) -> Text:
    """How many samples count, and what an uneven way of training does to them."""
    text = Text.assemble(("samples ", "dim"), f"{count(reply.samples_trained)} trained")
    for number, what in (
        (reply.samples_repeated, "more than once, at most"),
        (reply.samples_unmerged, "gone with lost replicas"),
    ):
        text.append(f"; {count(number)} {what}", style="yellow" if number else "dim")
    return text


def evaluation_line(reply: control_pb2.StatusReply) -> Text | None:
    """The newest evaluation on the way; None before the first, and when the job's last one is there."""
    if not reply.evaluations or reply.has_validation_loss:
        return None
    newest = reply.evaluations[-1]
    text = Text.assemble(
        ("held-out ", "dim"),
        (f"{newest.loss:.3f}", "bold"),
        (f" with one replica's weights at step {newest.step}", "dim"),
    )
    if newest.has_average:
        text.append(f", {newest.average_loss:.3f}", style="bold")
        text.append(" with those of the last average", style="dim")
    return text


def age_words(reply: control_pb2.StatusReply) -> str:
    """For one line of a log: the mean age of gradients over the workers that have one, and what was skipped."""
    ages = [worker.staleness for worker in reply.workers if worker.inner_steps]
    if not ages:
        return ""
    skipped = sum(worker.gradients_stale for worker in reply.workers)
    return f" staleness {sum(ages) / len(ages):.1f}" + (f" ({count(skipped)} skipped)" if skipped else "")
