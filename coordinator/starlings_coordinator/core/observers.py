"""What the coordinator knows of workers on their way to a span, and what their donors must keep for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlings_protos.messages import PlannedWorker, Prepared, Ready, Retain, Span, WorkerId

# Steps whose aggregates' digests are remembered, to compare those of observers with.
DIGEST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Placed:
    """Has a span, and starts at the next commit."""

    planned: PlannedWorker
    span: Span
    incarnation: int


@dataclass(slots=True)
class Observer:
    placed: Placed
    # A stream that broke may have lost a commit, and whoever missed one cannot go on.
    session: int | None
    # The version that it loads, and the attempt with which the step after it began.
    base: int
    attempt: int
    # Their incarnations: a donor that was started again has kept nothing.
    donors: dict[WorkerId, int]
    since_s: float
    # Of the assignment that it was sent last.
    plan_version: int = -1
    # What it has reached; None while it loads.
    version: int | None = None

    @property
    def reached(self) -> int:
        """The first step whose update it has yet to fetch."""
        return self.base if self.version is None else self.version


def retained(observers: Iterable[Observer]) -> dict[WorkerId, Retain]:
    """What each donor has to keep. Who has loaded needs no snapshot any more, only what was exchanged since."""
    wanted: dict[WorkerId, Retain] = {}
    for observer in observers:
        versions = {observer.base} if observer.version is None else set()
        for donor in observer.donors:
            known = wanted.get(donor, Retain((), True, observer.reached))
            wanted[donor] = Retain(
                tuple(sorted(versions.union(known.versions))), True, min(observer.reached, known.updates_from)
            )
    return wanted


class AggregateDigests:
    """What the holders reported of the last committed steps: step -> group -> numeric class -> digest."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, dict[str, int]]] = {}

    def clear(self) -> None:
        self._known.clear()

    def note(self, step: int, reports: Mapping[WorkerId, Prepared], classes: Mapping[WorkerId, str]) -> None:
        """The reports of a step that is committed: within a class they agree."""
        of_step: dict[str, dict[str, int]] = {}
        for worker_id, report in sorted(reports.items()):
            for group in report.groups if worker_id in classes else ():
                of_step.setdefault(group.group, {})[classes[worker_id]] = group.aggregate_digest
        self._known[step] = of_step
        # Steps above are of a line that is void.
        for other in [s for s in self._known if not step - DIGEST_STEPS < s <= step]:
            del self._known[other]

    def odd_group(self, message: Ready, numeric_class: str) -> str:
        """A group whose update the observer has otherwise than holders of its class; "" also when nothing is known."""
        known = self._known.get(message.version - 1, {})
        for group, digest in sorted(message.aggregate_digests.items()):
            if known.get(group, {}).get(numeric_class, digest) != digest:
                return group
        return ""


def stage_words(span: Span) -> str:
    if span.first_stage == span.last_stage:
        return f"stage {span.first_stage}"
    return f"stages {span.first_stage}-{span.last_stage}"
