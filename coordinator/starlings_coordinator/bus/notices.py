"""What the coordinator says on the bus, from what the core shows to people. Pure; every payload fits its topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlings_coordinator.core.core import Core
from starlings_coordinator.core.views import Headline
from starlings_protos import bus_pb2
from starlings_protos.bus.payloads import LIMIT_BYTES, Form, encode
from starlings_protos.bus.topics import Kind
from starlings_protos.convert import to_proto
from starlings_protos.messages import WorkerId
from starlings_protos.status import Event, LossPoint

# A plan whose words or step alone have changed is told of this often at most.
WORDS_EVERY_S = 5.0
STEP_EVERY_S = 30.0
# Who follows hears this often that the coordinator lives, also when nothing happens.
QUIET_EVERY_S = 5.0
# A worker that the core has given up is forgotten on the bus after this long: until then people see what became of it.
FORGOTTEN_AFTER_S = 600.0
# At a time, so that they fit into the queue and nobody is held up.
FORGOTTEN_AT_ONCE = 64
# Ten thousand members are looked through this often for those who are gone: it matters to nobody's second.
ABSENT_EVERY_S = 10.0


def plan_payload(core: Core, headline: Headline, wall_s: float, form: Form) -> bytes:
    """The plan; holdings that do not fit are left out, those of the last ids first, and counted."""
    state = core.state
    notice = bus_pb2.PlanNotice(
        plan_version=state.plan_version,
        phase=headline.phase,
        waiting_for=headline.waiting_for,
        step=headline.step,
        steps_total=headline.steps_total,
        wall_time_s=wall_s,
    )
    if core.plan_is_shown:
        for stage in state.stages:
            to_proto(stage, notice.stages.add())
        for worker_id, span in sorted(state.spans.items()):
            to_proto(span, notice.holdings.add(worker_id=worker_id).span)
    payload, limit = encode(notice, form), LIMIT_BYTES[Kind.PLAN]
    while len(payload) > limit and notice.holdings:
        keep = min(len(notice.holdings) - 1, int(len(notice.holdings) * 0.98 * limit / len(payload)))
        notice.holdings_left_out += len(notice.holdings) - keep
        del notice.holdings[keep:]
        payload = encode(notice, form)
    return payload


def event_payload(
    core: Core,
    headline: Headline,
    events: Sequence[Event],
    losses: Sequence[LossPoint],
    wall_s: float,
    form: Form,
) -> bytes:
    """How far training is, with what happened since the notice before; what does not fit of that is left out, the
    oldest first.
    """
    job = core.config.job
    notice = bus_pb2.EventNotice(
        phase=headline.phase,
        step=headline.step,
        steps_total=headline.steps_total,
        tokens=headline.tokens,
        tokens_total=job.steps_total * job.tokens_per_step,
        tokens_per_second=headline.tokens_per_second,
        wall_time_s=wall_s,
    )
    for event in events:
        to_proto(event, notice.events.add())
    for point in losses:
        to_proto(point, notice.losses.add())
    payload = encode(notice, form)
    while len(payload) > LIMIT_BYTES[Kind.EVENT] and (notice.events or notice.losses):
        _halve(notice.losses)
        _halve(notice.events)
        payload = encode(notice, form)
    return payload


def _halve(items: Any) -> None:
    """The newer half stays."""
    del items[: (len(items) + 1) // 2]


@dataclass(slots=True)
class Told:
    """What was said last, and so what is worth saying. Asked now and then with the present state."""

    plan: tuple[object, ...] = ()
    words: str = ""
    step: int = -1
    plan_at_s: float = float("-inf")
    event: int = 0
    loss_step: int = -1
    progress: Headline | None = None
    progress_at_s: float = float("-inf")

    def wants_plan(self, core: Core, headline: Headline, now_s: float) -> bool:
        plan = (core.state.plan_version, core.plan_is_shown, headline.phase)
        age_s = now_s - self.plan_at_s
        wanted = (
            plan != self.plan
            or (headline.waiting_for != self.words and age_s >= WORDS_EVERY_S)
            or (headline.step != self.step and age_s >= STEP_EVERY_S)
        )
        if wanted:
            self.plan, self.words, self.step, self.plan_at_s = (
                plan,
                headline.waiting_for,
                headline.step,
                now_s,
            )
        return wanted

    def news(
        self, core: Core, headline: Headline, now_s: float
    ) -> tuple[tuple[Event, ...], tuple[LossPoint, ...]] | None:
        """Events and loss points that were not told of yet; None when there is nothing to say."""
        events = tuple(e for e in core.events if e.sequence > self.event)
        if headline.step <= self.loss_step:
            # Training went back to a checkpoint: those steps are trained again.
            self.loss_step = headline.step - 1
        losses = []
        for point in reversed(core.state.loss_curve):
            if point.step <= self.loss_step:
                break
            losses.append(point)
        if not events and headline == self.progress and now_s - self.progress_at_s < QUIET_EVERY_S:
            return None
        self.progress, self.progress_at_s = headline, now_s
        self.event = events[-1].sequence if events else self.event
        self.loss_step = losses[0].step if losses else self.loss_step
        return events, tuple(reversed(losses))


class Absent:
    """Whom the core does not know any more, and since when."""

    def __init__(self) -> None:
        self._since_s: dict[WorkerId, float] = {}
        self._forgotten: set[WorkerId] = set()
        self._look_again_at_s = float("-inf")

    def due(self, core: Core, now_s: float) -> tuple[WorkerId, ...]:
        """Who is to be forgotten now; each once per absence, up to `ABSENT_EVERY_S` later than could be. Who was here
        for a shorter time than that in between may count as away all the while.
        """
        if now_s < self._look_again_at_s:
            return ()
        gone = core.state.incarnations.keys() - core.members.keys()
        self._forgotten &= gone
        self._since_s = {w: self._since_s.get(w, now_s) for w in gone - self._forgotten}
        due = sorted(w for w, since_s in self._since_s.items() if now_s - since_s >= FORGOTTEN_AFTER_S)
        self._forgotten |= set(due[:FORGOTTEN_AT_ONCE])
        self._look_again_at_s = now_s + (0.0 if len(due) > FORGOTTEN_AT_ONCE else ABSENT_EVERY_S)
        return tuple(due[:FORGOTTEN_AT_ONCE])
