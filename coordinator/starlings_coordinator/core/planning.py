"""From gathered workers to a loaded plan, and what becomes of a plan when a holder goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from starlings_coordinator.core.digests import odd_ones
from starlings_coordinator.core.effects import ComputePlan
from starlings_coordinator.core.members import Member, MemberState
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.plan_flaws import flaw_of
from starlings_coordinator.core.records import PlanAdopted, PlanDropped, PlanLoaded
from starlings_coordinator.core.traffic import traffic_words
from starlings_coordinator.core.views import gossip_peers
from starlings_coordinator.core.waiting import (
    ForKeeper,
    ForPlanner,
    ForProbes,
    ForRetry,
    ForRoom,
    ForSettling,
    ForWorkers,
    Reason,
    Waiting,
)
from starlings_job.cut import fixed_cut, stage_count
from starlings_protos.messages import (
    KEEPER,
    Assignment,
    Peer,
    PlannedWorker,
    PlanReply,
    PlanRequest,
    Ready,
    Span,
    Stage,
    Standby,
    StepRestarted,
    WorkerId,
)

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core


# While this many gather, what they wait for is looked at this often and not at each message: a look is at everybody,
# and ten thousand that join at once would cost a minute and a half of it. With more it is less often, up to the third
# while they come and go, and up to the last while nothing changes.
CROWD, CROWD_LOOK_S, CROWD_LOOK_MOST_S, CROWD_UNCHANGED_S = 500, 0.5, 2.0, 10.0


class Planning:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.waiting = Waiting(ForWorkers(0, 1, 0))
        self._because = ""
        self._keeper_addresses: tuple[str, ...] = ()
        self._keeper_versions: frozenset[int] = frozenset()
        self._request_id = 0
        self._asked_at_s = 0.0
        # The membership (`Membership.changes`) that the pending or last answer is about.
        self.asked_about = -1
        self._impossible: tuple[int, str] | None = None
        self._retry: tuple[float, str] | None = None
        # Since when enough workers are there to plan with.
        self._enough_since_s: float | None = None
        # When everybody was looked at last, and at which membership (`Membership.changes`).
        self._looked_at_s, self._looked_at = float("-inf"), -1

    # ------------------------------------------------------------------ the keeper

    def keeper_started(self, addresses: tuple[str, ...], versions: tuple[int, ...]) -> None:
        moved = bool(self._keeper_addresses) and addresses != self._keeper_addresses
        self._keeper_addresses, self._keeper_versions = addresses, frozenset(versions)
        if moved and self._core.phase is Phase.LOADING:
            self.gather_again("the keeper was started again elsewhere")

    def keeper_lost(self) -> None:
        self._keeper_addresses = ()

    def keeper_has(self, version: int) -> None:
        self._keeper_versions |= {version}

    def is_saved(self, version: int) -> bool:
        return version in self._keeper_versions

    @property
    def restart_version(self) -> int:
        """Where training can begin: the newest version that the keeper serves of those that belong to this line of
        steps. With a log that knows no plan (a new one beside old checkpoints), the newest of all.
        """
        state = self._core.state
        known = [v for v in self._keeper_versions if v <= state.step or not state.plan_version]
        return max(known, default=state.restart_version)

    # ------------------------------------------------------------------ gathering

    def go_on(self) -> None:
        core = self._core
        if core.phase is Phase.GATHERING:
            changes = core.membership.changes
            pause_s = min(CROWD_LOOK_MOST_S, CROWD_LOOK_S * (len(core.members) // CROWD))
            if pause_s and isinstance(self.waiting.reason, ForWorkers) and self._looked_at == changes:
                pause_s = CROWD_UNCHANGED_S
            if core.now.monotonic_s < self._looked_at_s + pause_s:
                return
            self._looked_at_s, self._looked_at = core.now.monotonic_s, changes
            reason = self._obstacle()
            if reason is None:
                self._ask()
            else:
                self.waiting = Waiting(reason, self._because)
        elif core.phase is Phase.PLANNING:
            if core.now.monotonic_s - self._asked_at_s > core.config.timings.plan_s:
                self._retry_later("the planner did not answer")
        elif core.phase is Phase.LOADING:
            self._watch_loading()

    def _obstacle(self) -> Reason | None:
        core, now_s = self._core, self._core.now.monotonic_s
        members = core.members.values()
        usable = sum([m.usable for m in members])
        need = max(core.config.job.swarm.min_workers, 1)
        if usable < need:
            self._enough_since_s = None
            aside = [m for m in members if m.set_aside_until_s is not None and m.here]
            if aside and usable + len(aside) >= need:
                first = min(aside, key=lambda m: (m.set_aside_until_s or 0.0, m.worker_id))
                return ForRetry(
                    f"{first.worker_id} is {first.reason}", max(0.0, (first.set_aside_until_s or 0.0) - now_s)
                )
            have = sum([m.here and m.leaving is None for m in members])
            return ForWorkers(have, need, usable)
        version = self.restart_version
        if not self._keeper_addresses or version not in self._keeper_versions:
            return ForKeeper(version)
        if self._impossible is not None and self._impossible[0] == core.membership.changes:
            return ForRoom(self._impossible[1])
        if self._retry is not None and now_s < self._retry[0]:
            return ForRetry(self._retry[1], self._retry[0] - now_s)
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        if now_s - self._enough_since_s > core.config.timings.gather_most_s:
            return None
        measured_later = sum(
            1
            for m in core.members.values()
            if m.here
            and m.set_aside_until_s is None
            and m.state in (MemberState.JOINING, MemberState.PROBING)
        )
        if measured_later:
            return ForProbes(measured_later)
        settled_at_s = core.membership.changed_at_s + core.config.job.swarm.settle_s
        if now_s < settled_at_s:
            return ForSettling(settled_at_s - now_s)
        return None

    def _usable(self) -> list[Member]:
        return [m for _, m in sorted(self._core.members.items()) if m.usable]

    def _ask(self) -> None:
        core = self._core
        self._asked_at_s = core.now.monotonic_s
        self.asked_about = core.membership.changes
        self._retry = None
        core.phase = Phase.PLANNING
        self.waiting = Waiting(ForPlanner(), self._because)
        # The cut is fixed once anything was trained, or by the job.
        trained = core.state.stages if self.restart_version > 0 else ()
        stages = trained or fixed_cut(core.config.job.pipeline.stages)
        core.desk.ask(ComputePlan(self.request(self._usable(), stages, {})))

    def request(
        self, members: Iterable[Member], stages: tuple[Stage, ...], held: Mapping[WorkerId, Span]
    ) -> PlanRequest:
        """The next question for the planner; who holds a span already keeps it."""
        job = self._core.config.job
        self._request_id += 1
        return PlanRequest(
            self._request_id,
            tuple(member.plan_worker(held.get(member.worker_id)) for member in members),
            job.job.seed,
            job.train.microbatch,
            job.microbatches_per_step,
            job.bytes_per_parameter,
            stages,
            stages_most=job.stages_most,
            stages_wanted=0 if self.restart_version > 0 else stage_count(job.pipeline.stages),
        )

    def _retry_later(self, reason: str) -> None:
        core = self._core
        self._retry = (core.now.monotonic_s + core.config.timings.retry_s, reason)
        core.phase = Phase.GATHERING

    def planner_failed(self, request_id: int, reason: str) -> None:
        if self._core.phase is Phase.PLANNING and request_id == self._request_id:
            self._core.desk.announce("planner", f"the planner failed: {reason}")
            self._retry_later(f"the planner failed: {reason}")

    # ------------------------------------------------------------------ a plan

    def computed(self, reply: PlanReply) -> None:
        core = self._core
        if core.phase is not Phase.PLANNING or reply.request_id != self._request_id:
            core.dropped_messages += 1
            return
        core.phase = Phase.GATHERING
        if core.membership.changes != self.asked_about:
            return  # Somebody came or went meanwhile: asked again once that has settled.
        if reply.impossible:
            self._impossible = (self.asked_about, reply.impossible)
            core.desk.announce("plan", f"no plan: {reply.impossible}")
            return
        spans = {p.worker_id: p.span for p in reply.workers if p.span is not None}
        there = {m.worker_id for m in self._usable()}
        job = core.config.job
        most = 0 if core.state.stages else job.stages_most
        wanted = stage_count(job.pipeline.stages)
        flaw = flaw_of(reply, spans, there, len(core.config.profile.blocks), most, wanted)
        if flaw:
            self._retry_later(f"the planner's answer is wrong: {flaw}")
            return
        self._adopt(reply, spans)

    def _adopt(self, reply: PlanReply, spans: dict[WorkerId, Span]) -> None:
        core, state = self._core, self._core.state
        version = self.restart_version
        lost = state.step - version
        attempt = 0
        if state.plan_version:
            attempt = state.attempt + 1 if version == state.step else state.highest_attempt + 1
        core.desk.record(
            PlanAdopted(
                state.plan_version + 1,
                reply.stages,
                tuple(sorted(spans.items())),
                version,
                attempt,
                self._because or "first plan",
                tuple(planned for planned in reply.workers if planned.span is not None),
            )
        )
        if lost > 0:
            core.desk.announce(
                "rewind", f"training goes on from version {version}: {lost} steps are done again"
            )
        idle_reasons = {planned.worker_id: planned.reason for planned in reply.workers}
        self._because = ""
        core.phase = Phase.LOADING
        ratio = reply.predicted_microbatches_per_s / max(reply.bound_microbatches_per_s, 1e-12)
        core.desk.announce(
            "plan",
            f"plan {state.plan_version}: {len(reply.stages)} stages on {len(spans)} workers, {ratio:.0%} of the bound"
            + (f"; {reply.binding}" if reply.binding else "")
            + traffic_words(core.config.job, core.config.profile, reply.stages, spans),
        )
        for member in core.members.values():
            span = spans.get(member.worker_id)
            member.ready, member.wish = None, 0
            if span is not None:
                member.state, member.reason = MemberState.LOADING, "loads its span"
                member.load_started_at_s = core.now.monotonic_s
                core.desk.send(member, self.assignment(member, span))
            elif member.usable:
                self.stand_by(member, idle_reasons.get(member.worker_id) or "no span fits")

    def stand_by(self, member: Member, reason: str) -> None:
        if member.state is not MemberState.LEAVING:
            member.state, member.reason = MemberState.STANDBY, reason
        self._core.desk.send(member, Standby(reason))

    def assignment(self, member: Member, span: Span) -> Assignment:
        core, state, job = self._core, self._core.state, self._core.config.job
        planned = state.planned.get(member.worker_id)
        peers = tuple(
            self.peer(w) for w in sorted(state.spans) if w != member.worker_id and w in core.members
        )
        return Assignment(
            plan_version=state.plan_version,
            stages=state.stages,
            span=span,
            version=state.step,
            donors=(*core.joining.donors_of(member.worker_id), Peer(KEEPER, self._keeper_addresses)),
            peers=peers,
            slots=self._slots_of(member.worker_id),
            recompute=planned.recompute if planned is not None else False,
            topology="all",
            gossip_peers=gossip_peers(member.worker_id, span, state.spans),
            seed=job.job.seed,
            step=state.step,
            attempt=state.attempt,
            tensor_limit_bytes=core.config.profile.tensor_limit_bytes(job.train.microbatch),
            base_plan_version=state.base_plan_version,
        )

    def peer(self, worker_id: WorkerId) -> Peer:
        """A holder as others need to know it."""
        core, state = self._core, self._core.state
        return core.members[worker_id].peer(
            state.spans[worker_id], state.stages, core.config.profile, self._slots_of(worker_id)
        )

    def with_keeper(self, donors: tuple[Peer, ...], version: int) -> tuple[Peer, ...]:
        """The keeper comes last, if it has `version`."""
        keeper = (Peer(KEEPER, self._keeper_addresses),) if version in self._keeper_versions else ()
        return (*donors, *keeper)

    def _slots_of(self, worker_id: WorkerId) -> int:
        planned = self._core.state.planned.get(worker_id)
        return max(1, planned.slots) if planned is not None else 1

    # ------------------------------------------------------------------ loading

    def ready(self, member: Member, message: Ready) -> None:
        core, state = self._core, self._core.state
        if message.plan_version != state.plan_version or core.phase is not Phase.LOADING:
            return  # Of an older plan, or an answer to new peers while training goes on.
        span = state.spans.get(member.worker_id)
        if span is None:
            return
        names = core.config.profile.block_names
        expected = {names[b] for s in span.stages for b in state.stages[s].blocks}
        if message.version != state.step or set(message.block_digests) != expected:
            core.refused_reports += 1
            core.membership.dismiss(
                member,
                None,
                f"it is ready with version {message.version} of other blocks than planned",
            )
            return
        member.ready, member.state, member.reason = (
            message,
            MemberState.TRAINING,
            "ready; waits for the others",
        )
        if all(holder.ready is not None for holder in core.holders):
            self._everybody_is_ready()

    def _everybody_is_ready(self) -> None:
        core = self._core
        digests = {h.worker_id: h.ready.block_digests for h in core.holders if h.ready}
        for worker_id in sorted(odd_ones(digests)):
            # The first dismissal ends this plan; the others are not counted on in the next either.
            core.membership.dismiss(
                core.members[worker_id], None, "it loaded other weights than its replicas"
            )
        if core.phase is not Phase.LOADING:
            return
        for holder in core.holders:
            if holder.leaving is None:
                holder.reason = ""
        core.desk.record(PlanLoaded(core.state.plan_version))
        core.phase = Phase.TRAINING
        core.schedule.begin()

    def _watch_loading(self) -> None:
        core = self._core
        for holder in core.holders:
            late_s = core.now.monotonic_s - holder.load_started_at_s
            if holder.ready is None and late_s > core.config.timings.load_s:
                core.membership.dismiss(holder, None, f"it did not load its span within {late_s:.0f} s")
                return

    def loading_words(self) -> str:
        slow = [h.worker_id for h in self._core.holders if h.ready is None]
        return f"waiting for {', '.join(slow[:4])}{' ...' if len(slow) > 4 else ''} to load"

    # ------------------------------------------------------------------ a plan that changes

    def holder_gone(self, worker_id: WorkerId, reason: str) -> None:
        """With every stage still held, go on without it, in the same attempt when nothing that it did is counted on;
        otherwise from the newest checkpoint.
        """
        core, state = self._core, self._core.state
        left = {w: span for w, span in state.spans.items() if w != worker_id and w in core.members}
        uncovered = [s for s in range(len(state.stages)) if not any(s in span for span in left.values())]
        if core.phase is Phase.LOADING or uncovered:
            if uncovered:
                reason = f"stage {uncovered[0]} has no holder any more: {reason}"
            self.gather_again(reason)
        elif core.schedule.counts_on(worker_id):
            self._reissue(left, reason)
        else:
            self._leave_out(worker_id, left, reason)

    def reissue(self, reason: str) -> None:
        """The same spans again, as a new attempt."""
        self._reissue(dict(self._core.state.spans), reason)

    def recall(self) -> bool:
        """After a restart of the coordinator: the plan goes on with its holders, whose streams are down just now. False
        when it cannot; then its holders are gathered again.
        """
        core, state = self._core, self._core.state
        reason = "the coordinator was started again"
        if not state.plan_loaded or not core.membership.recall(tuple(sorted(state.spans))):
            self.gather_again(reason)
            return False
        core.phase = Phase.TRAINING
        core.schedule.recalled(reason)
        core.schedule.begin()
        return True

    def resume(self, member: Member) -> None:
        """A holder is back on a new stream within its grace: it keeps its place, and hears again what it missed.

        The commit comes first: with it the worker is at the assignment's version.
        """
        core, state = self._core, self._core.state
        core.joining.remind(member)
        core.schedule.remind(member)
        core.desk.send(member, self.assignment(member, state.spans[member.worker_id]))
        reason = f"{member.worker_id} was disconnected for a moment"
        if core.phase is Phase.TRAINING:
            core.schedule.start_over(reason)
        elif core.phase is Phase.FINISHING:
            core.schedule.announce_attempt(reason)
            core.finishing.begin()

    def admit(self, planned: Mapping[WorkerId, PlannedWorker], reason: str) -> None:
        """Further holders from the present step on, which nobody knows of yet: so its attempt stays as it is."""
        core, state = self._core, self._core.state
        spans = state.spans | {w: p.span for w, p in planned.items() if p.span is not None}
        self._change_holders(spans, state.attempt, reason, tuple(planned[w] for w in sorted(planned)))
        core.desk.announce("plan", f"plan {state.plan_version}: {reason}")
        for worker_id in planned:
            newcomer = core.members[worker_id]
            newcomer.state, newcomer.reason = MemberState.TRAINING, ""
            newcomer.ready, newcomer.wish = None, 0
        for holder in core.holders:
            core.desk.send(holder, self.assignment(holder, state.spans[holder.worker_id]))

    def _leave_out(self, worker_id: WorkerId, left: dict[WorkerId, Span], reason: str) -> None:
        """The attempt goes on: what the lost worker had leased is leased again, and the hop before it sends what was
        under way along another route. Who has gradient of a route through it says so (MicrobatchFailed).
        """
        core, state = self._core, self._core.state
        self._change_holders(left, state.attempt, reason)
        what = core.schedule.leave_out(worker_id)
        core.desk.announce("plan", f"plan {state.plan_version}: {what}: {reason}")
        for holder in core.holders:
            core.desk.send(holder, self.assignment(holder, state.spans[holder.worker_id]))

    def _change_holders(
        self,
        spans: dict[WorkerId, Span],
        attempt: int,
        reason: str,
        planned: tuple[PlannedWorker, ...] = (),
    ) -> None:
        """Others hold the same stages from now on, and nobody has to load."""
        state = self._core.state
        holders = tuple(sorted(spans.items()))
        version = state.plan_version + 1
        self._core.desk.record(
            PlanAdopted(version, state.stages, holders, state.step, attempt, reason, planned, loads=False)
        )

    def _reissue(self, spans: dict[WorkerId, Span], reason: str) -> None:
        core, state = self._core, self._core.state
        self._change_holders(spans, state.attempt + 1, reason)
        exchanging = core.ledger is not None and core.ledger.opened_at_s is not None
        where = f"step {state.step} begins again{' (it was being exchanged)' if exchanging else ''}"
        core.desk.announce("plan", f"plan {state.plan_version}: {where}: {reason}")
        for holder in core.holders:
            core.desk.send(holder, self.assignment(holder, state.spans[holder.worker_id]))
            core.desk.send(holder, StepRestarted(state.step, state.attempt, reason))
        if core.phase is Phase.TRAINING:
            core.schedule.begin_again()
        else:
            core.finishing.begin()

    def gather_again(self, reason: str) -> None:
        core = self._core
        core.desk.record(PlanDropped(core.state.plan_version, reason))
        core.desk.announce("gathering", reason)
        for holder in core.holders:
            if holder.leaving is None:
                self.stand_by(holder, reason)
        core.ledger = None
        core.phase = Phase.GATHERING
        core.finishing.reset()
        self._because = reason
        for member in list(core.members.values()):
            member.ready = None
            if member.leaving is not None:
                core.membership.release(member)
