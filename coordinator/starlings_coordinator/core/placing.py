"""A place for those who come while others train: spans that the planner gives them beside the present ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlings_coordinator.core.effects import ComputePlan
from starlings_coordinator.core.members import Member, MemberState
from starlings_coordinator.core.observers import Placed, stage_words
from starlings_protos.messages import PlannedWorker, PlanReply, Span, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Copying is not worth it when fewer steps are left after the copied version.
STEPS_WORTHWHILE = 2


@dataclass(frozen=True, slots=True)
class Question:
    """What the planner was asked."""

    request_id: int
    asked_at_s: float
    spans: dict[WorkerId, Span]
    # Incarnations of those to be placed.
    newcomers: dict[WorkerId, int]


class Placing:
    """`placed`: who has a span and starts at the next commit."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.placed: dict[WorkerId, Placed] = {}
        self._question: Question | None = None
        # The membership (`Membership.changes`) that the last question was about.
        self._asked_about = -1
        self._ask_again_at_s = 0.0
        self._waiting_since_s: float | None = None

    def clear(self) -> None:
        self.placed.clear()
        self._question, self._asked_about, self._waiting_since_s = None, -1, None

    def ask_anew(self) -> None:
        """The last answer counts no more."""
        self._asked_about = -1

    def is_worthwhile(self, version: int) -> bool:
        core = self._core
        return not core.training_is_over and core.config.job.steps_total - version >= STEPS_WORTHWHILE

    def go_on(self, observing: Mapping[WorkerId, Span]) -> None:
        """Ask the planner where those who stand by would help most, once the membership has settled. `observing`: spans
        that are as good as held.
        """
        core, now_s, timings = self._core, self._core.now.monotonic_s, self._core.config.timings
        for worker_id, placed in list(self.placed.items()):
            member = core.members.get(worker_id)
            if member is None or member.incarnation != placed.incarnation or member.probe is None:
                del self.placed[worker_id]
        if self._question is not None:
            if now_s - self._question.asked_at_s > timings.plan_s:
                self._ask_later()
            return
        newcomers = [m for _, m in sorted(core.members.items()) if self._waits(m)]
        changes = core.membership.changes
        if not newcomers or not self.is_worthwhile(core.state.step + 1):
            self._waiting_since_s = None
        elif changes not in (self._asked_about, core.planning.asked_about) and self._has_settled():
            self._asked_about, self._waiting_since_s = changes, None
            self._ask(newcomers, observing)

    def _waits(self, member: Member) -> bool:
        worker_id = member.worker_id
        standing_by = member.usable and member.state is MemberState.STANDBY
        return standing_by and worker_id not in self._core.state.spans and worker_id not in self.placed

    def _has_settled(self) -> bool:
        """Several who come at once are placed together; whoever keeps coming and going holds that up only so long."""
        core, now_s = self._core, self._core.now.monotonic_s
        if now_s < self._ask_again_at_s:
            return False
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if now_s - self._waiting_since_s > core.config.timings.gather_most_s:
            return True
        settled_at_s = core.membership.changed_at_s + core.config.job.swarm.settle_s
        return not core.membership.is_measuring and now_s >= settled_at_s

    def _ask(self, newcomers: list[Member], observing: Mapping[WorkerId, Span]) -> None:
        core = self._core
        held = self._held() | dict(observing) | {w: placed.span for w, placed in self.placed.items()}
        members = [m for w in held if (m := core.members.get(w)) is not None and m.probe is not None]
        request = core.planning.request([*members, *newcomers], core.state.stages, held)
        lives = {m.worker_id: m.incarnation for m in newcomers}
        spans = dict(core.state.spans)
        self._question = Question(request.request_id, core.now.monotonic_s, spans, lives)
        core.desk.ask(ComputePlan(request))

    def _held(self) -> dict[WorkerId, Span]:
        """Spans that stay as they are. Whoever wants to leave is not counted on where the others hold all stages."""
        core = self._core
        spans = dict(core.state.spans)
        staying = {w: span for w, span in spans.items() if core.members[w].leaving is None}
        if all(any(s in span for span in staying.values()) for s in range(len(core.state.stages))):
            return staying
        return spans

    def _ask_later(self) -> None:
        self._question, self._asked_about = None, -1
        self._ask_again_at_s = self._core.now.monotonic_s + self._core.config.timings.retry_s

    # ------------------------------------------------------------------ the planner's answer

    def planner_failed(self, request_id: int, reason: str) -> bool:
        """Whether the question was one from here."""
        if self._question is None or request_id != self._question.request_id:
            return False
        self._core.desk.announce("planner", f"the planner failed: {reason}")
        self._ask_later()
        return True

    def computed(self, reply: PlanReply) -> bool:
        """Whether the reply is the answer to a question from here. It comes from another process, so it is checked;
        what it says of present holders does not matter.
        """
        core, question = self._core, self._question
        if question is None or reply.request_id != question.request_id:
            return False
        self._question = None
        newcomers = [
            member
            for worker_id, incarnation in sorted(question.newcomers.items())
            if (member := core.members.get(worker_id)) is not None
            and member.incarnation == incarnation
            and self._waits(member)
        ]
        if reply.impossible or reply.stages != core.state.stages:
            for member in newcomers:
                core.planning.stand_by(member, reply.impossible or "the planner found no place for it")
        elif core.state.spans != question.spans:
            self.ask_anew()  # The holders are others by now.
        else:
            planned = {p.worker_id: p for p in reply.workers}
            for member in newcomers:
                self._place(member, planned.get(member.worker_id, PlannedWorker(member.worker_id)))
        return True

    def _place(self, member: Member, planned: PlannedWorker) -> None:
        core, span = self._core, planned.span
        if span is None or not 0 <= span.first_stage <= span.last_stage < len(core.state.stages):
            core.planning.stand_by(member, planned.reason or "no span fits")
            return
        self.placed[member.worker_id] = Placed(planned, span, member.incarnation)
        core.planning.stand_by(member, f"joins {stage_words(span)} from the next step on")
