"""Late joining: a worker that came while others train becomes an observer, catches up, and becomes a holder.

    standby -> placed (has a span) -> observing (loads version v, replays the steps committed since) -> holder

Nobody stops and no attempt rises for it. A placed worker starts at a commit: some holders of its stages, its donors,
keep that version and from then on what each step exchanges. It is admitted at a commit too, before anybody knows of the
next step, so that every step has one set of holders from beginning to end. All of this is soft: after a restart of the
coordinator observers start again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from starlings_coordinator.core.ledger import StepLedger
from starlings_coordinator.core.members import Member, MemberState
from starlings_coordinator.core.observers import AggregateDigests, Observer, retained, stage_words
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.placing import Placing
from starlings_protos.messages import CatchUpFailed, Peer, Ready, Retain, Span, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Failures to catch up in a row before a worker is set aside.
TRIES = 3
# One donor per stage suffices; a second goes on when it is lost. Each keeps a copy of its state.
DONORS_PER_STAGE = 2
# Versions kept for observers that load at the same time; each costs the donors another copy.
VERSIONS_AT_ONCE = 2


class Joining:
    donors_per_stage = DONORS_PER_STAGE

    def __init__(self, core: Core) -> None:
        self._core = core
        self.placing = Placing(core)
        self.observers: dict[WorkerId, Observer] = {}
        # Holders since the last commit: until the next one they may still be replaying the step before it.
        self._admitted: dict[WorkerId, Observer] = {}
        self._tries: dict[WorkerId, int] = {}
        # The last Retain that each donor was sent, and on which stream.
        self._told: dict[WorkerId, tuple[int | None, Retain]] = {}
        self._digests = AggregateDigests()

    # ------------------------------------------------------------------ after every event

    def go_on(self) -> None:
        if self._core.phase is not Phase.TRAINING:
            self._stop()
            return
        self._look_at_observers()
        self.tell_donors()
        self.placing.go_on({w: observer.placed.span for w, observer in self.observers.items()})

    def _stop(self) -> None:
        """Nothing is trained just now: whoever was joining is planned with, or not needed, like everybody else."""
        core = self._core
        joining = self.observers.keys() | self.placing.placed.keys()
        self.placing.clear()
        self.observers.clear()
        self._admitted.clear()
        self._tries.clear()
        self._digests.clear()
        self.tell_donors()
        reason = "training begins again from a saved version, and this worker is planned with"
        if core.phase is Phase.FINISHING:
            reason = "the job is ending; there is nothing left to join"
        for worker_id in sorted(joining):
            member = core.members.get(worker_id)
            if member is None or member.state not in (MemberState.OBSERVING, MemberState.STANDBY):
                continue
            if core.has_ended:
                member.state = MemberState.STANDBY
            else:
                core.planning.stand_by(member, reason)

    def _look_at_observers(self) -> None:
        core = self._core
        for worker_id, observer in list(self.observers.items()):
            member = core.members.get(worker_id)
            if member is None or not self._is_same_life(member, observer):
                del self.observers[worker_id]
            elif member.session != observer.session:
                self._start_again(member, observer, "its connection ended for a moment")
            else:
                self._look_at_donors(member, observer)

    @staticmethod
    def _is_same_life(member: Member, observer: Observer) -> bool:
        same = member.incarnation == observer.placed.incarnation
        return same and member.state is MemberState.OBSERVING and member.leaving is None

    def _look_at_donors(self, member: Member, observer: Observer) -> None:
        state = self._core.state
        left = {w: life for w, life in observer.donors.items() if self._still_donates(w, life)}
        if any(not any(s in state.spans[w] for w in left) for s in observer.placed.span.stages):
            self._start_again(member, observer, f"nobody keeps version {observer.base} of it any more")
        elif left != observer.donors or observer.plan_version != state.plan_version:
            observer.donors = left
            self.assign(member, observer)

    def _still_donates(self, worker_id: WorkerId, incarnation: int) -> bool:
        member = self._core.members.get(worker_id)
        return (
            member is not None and member.incarnation == incarnation and worker_id in self._core.state.spans
        )

    def _start_again(self, member: Member, observer: Observer, reason: str) -> None:
        """With the version of the next commit. Standby tells it to forget what it has, so that what it says of the
        version reached now is never taken for news of the next.
        """
        del self.observers[member.worker_id]
        self.placing.placed[member.worker_id] = observer.placed
        words = f"joins {stage_words(observer.placed.span)} from the next step on: {reason}"
        self._core.planning.stand_by(member, words)

    # ------------------------------------------------------------------ at a commit

    def start(self, ledger: StepLedger) -> frozenset[WorkerId]:
        """A commit was recorded, and nobody knows of it yet: whoever is placed starts with the new version. Returns its
        donors, who keep a copy when they have applied the step.
        """
        core, state, placed = self._core, self._core.state, self.placing.placed
        classes = {w: m.hello.numeric_class for w, m in core.members.items()}
        self._digests.note(ledger.step, ledger.prepared, classes)
        for worker_id in self._admitted:
            self._tries.pop(worker_id, None)
        self._admitted.clear()
        loading = {o.base for o in self.observers.values() if o.version is None}
        if not self.placing.is_worthwhile(state.step) or len(loading) >= VERSIONS_AT_ONCE:
            return frozenset()
        chosen: set[WorkerId] = set()
        for worker_id in sorted(placed):
            member, donors = (
                core.members.get(worker_id),
                self.choose_donors(placed[worker_id].span, worker_id),
            )
            if member is None or not member.usable or not donors:
                continue
            chosen |= donors.keys()
            observer = Observer(
                placed.pop(worker_id),
                member.session,
                state.step,
                state.attempt,
                donors,
                core.now.monotonic_s,
            )
            self.observers[worker_id] = observer
            member.state = MemberState.OBSERVING
            member.reason = f"joins {stage_words(observer.placed.span)}: loading version {state.step}"
        # Before the commit, so that they know what to keep when they apply it.
        self.tell_donors()
        return frozenset(chosen)

    def choose_donors(self, span: Span, worker_id: WorkerId) -> dict[WorkerId, int]:
        """Per stage, those of its own numeric class before others (whose bits differ), those who stay before those who
        leave, those that donate already, the lowest ids. Empty when some stage's holders are all away just now.
        """
        core = self._core
        newcomer = core.members.get(worker_id)
        own_class = newcomer.hello.numeric_class if newcomer is not None else ""
        chosen: dict[WorkerId, int] = {}
        for stage in span.stages:
            here = [core.members[w] for w in core.holders_of(stage) if core.members[w].here]
            here.sort(
                key=lambda m: (
                    m.hello.numeric_class != own_class,
                    m.leaving is not None,
                    m.worker_id not in chosen,
                    m.worker_id,
                )
            )
            if not here:
                return {}
            chosen |= {m.worker_id: m.incarnation for m in here[: self.donors_per_stage]}
        return chosen

    def committed(self) -> None:
        """The holders have been told. Observers queue the commit; who was at the version before it becomes a holder."""
        core, state = self._core, self._core.state
        ready: dict[WorkerId, Observer] = {}
        for worker_id, observer in sorted(self.observers.items()):
            member = core.members.get(worker_id)
            if (
                member is None
                or member.session != observer.session
                or not self._is_same_life(member, observer)
            ):
                continue  # Seen to when the event is over.
            if observer.base == state.step:
                self.assign(member, observer)
                words = (
                    f"{worker_id} copies version {observer.base} from {', '.join(sorted(observer.donors))}"
                )
                core.desk.announce("observing", f"{words}, to join {stage_words(observer.placed.span)}")
                continue
            core.schedule.remind(member)
            if observer.version is not None and observer.version >= state.step - 1:
                ready[worker_id] = observer
        if ready and not core.training_is_over:
            self.admit(ready)

    def admit(self, ready: dict[WorkerId, Observer]) -> None:
        core = self._core
        for worker_id, observer in ready.items():
            del self.observers[worker_id]
            self._admitted[worker_id] = observer
        core.planning.admit({w: o.placed.planned for w, o in ready.items()}, f"{', '.join(ready)} joined")
        for worker_id, observer in ready.items():
            words = f"{worker_id} holds {stage_words(observer.placed.span)} from step {core.state.step} on"
            took_s = core.now.monotonic_s - observer.since_s
            core.desk.announce("joined", f"{words}; copying and catching up took {took_s:.1f} s")

    # ------------------------------------------------------------------ what joiners and donors hear

    def assign(self, member: Member, observer: Observer) -> None:
        planning, state = self._core.planning, self._core.state
        observer.plan_version = state.plan_version
        planned = observer.placed.planned
        self._core.desk.send(
            member,
            replace(
                planning.assignment(member, observer.placed.span),
                observer=True,
                version=observer.base,
                step=observer.base,
                attempt=observer.attempt,
                slots=max(1, planned.slots),
                recompute=planned.recompute,
                donors=self.sources_of(member.worker_id, observer.base),
            ),
        )

    def donors_of(self, worker_id: WorkerId) -> tuple[Peer, ...]:
        """Who keeps what an observer, or a holder since the last commit, has yet to replay."""
        core = self._core
        observer = self.observers.get(worker_id) or self._admitted.get(worker_id)
        donors = sorted(observer.donors) if observer is not None else []
        return tuple(core.planning.peer(w) for w in donors if w in core.state.spans)

    def sources_of(self, worker_id: WorkerId, base: int) -> tuple[Peer, ...]:
        """Whom an observer copies version `base` from."""
        return self._core.planning.with_keeper(self.donors_of(worker_id), base)

    def _catching_up(self, member: Member) -> Observer | None:
        """What is known of an observer, or of a holder since the last commit, that may say so now."""
        observer = self.observers.get(member.worker_id)
        if observer is not None:
            return observer if member.session == observer.session else None
        admitted = self._admitted.get(member.worker_id)
        return (
            admitted if admitted is not None and admitted.placed.incarnation == member.incarnation else None
        )

    def _wanted(self) -> dict[WorkerId, Retain]:
        return retained([*self.observers.values(), *self._admitted.values()])

    def tell_donors(self) -> None:
        """Retain to everyone for whom it has changed, or who may not have heard it."""
        core, wanted = self._core, self._wanted()
        for worker_id in sorted(wanted.keys() | self._told.keys()):
            member = core.members.get(worker_id)
            if member is None:
                self._told.pop(worker_id, None)
                continue
            session, last = self._told.get(worker_id, (member.session, Retain()))
            retain = wanted.get(worker_id, Retain())
            if member.here and (session, last) != (member.session, retain):
                self._tell(member, retain)

    def _tell(self, member: Member, retain: Retain) -> None:
        self._told[member.worker_id] = (member.session, retain)
        if retain == Retain():
            del self._told[member.worker_id]
        self._core.desk.send(member, retain)

    def remind(self, member: Member) -> None:
        """Say what to keep to a holder on a new stream, also when that is nothing: it may have kept something for an
        earlier coordinator.
        """
        self._tell(member, self._wanted().get(member.worker_id, Retain()))

    # ------------------------------------------------------------------ what joiners say

    def ready(self, member: Member, message: Ready) -> bool:
        """Whether the report comes from somebody that catches up."""
        core, observer = self._core, self._catching_up(member)
        if observer is None:
            return False
        if message.version < observer.reached:
            core.dropped_messages += 1
            return True
        flaw = ""
        if message.version > core.state.step:
            flaw = f"it says that it has version {message.version}, which does not exist yet"
        elif odd := self._digests.odd_group(message, member.hello.numeric_class):
            flaw = f"its update of {odd} in step {message.version - 1} is not that of its replicas"
        if flaw:
            core.refused_reports += 1
            core.membership.dismiss(member, None, flaw)
            return True
        observer.version = message.version
        if member.worker_id in self.observers:
            words = stage_words(observer.placed.span)
            member.reason = f"joins {words}: at version {message.version} of {core.state.step}"
            self.reached(member.worker_id, observer)
        return True

    def reached(self, worker_id: WorkerId, observer: Observer) -> None:
        """An observer has the version that it reported. Holders are made at commits only."""

    def catch_up_failed(self, member: Member, message: CatchUpFailed) -> None:
        core, worker_id = self._core, member.worker_id
        observer = self._catching_up(member)
        if observer is None:
            self._holder_failed(member, message)
            return
        tries = self._tries[worker_id] = self._tries.get(worker_id, 0) + 1
        reason = f"it could not go on from version {message.version}: {message.reason}"
        core.desk.announce("catch_up_failed", f"{worker_id}: {reason}")
        holds = self._admitted.pop(worker_id, None) is not None
        if member.leaving is not None:
            core.membership.release(member)
            return
        self.observers[worker_id] = observer
        if tries < TRIES:
            self._start_again(member, observer, f"{reason} (try {tries} of {TRIES})")
        else:
            del self.observers[worker_id], self._tries[worker_id]
            core.membership.set_aside(member, reason)
        if holds and worker_id in core.state.spans:
            core.planning.holder_gone(worker_id, f"{worker_id} did not catch up: {message.reason}")

    def _holder_failed(self, member: Member, message: CatchUpFailed) -> None:
        """Nobody knows that it is catching up: perhaps it was admitted just before a restart of the coordinator."""
        core, worker_id = self._core, member.worker_id
        if core.phase is not Phase.TRAINING or worker_id not in core.state.spans:
            core.dropped_messages += 1
            return
        reason = f"{worker_id} did not catch up: {message.reason}"
        core.desk.announce("catch_up_failed", reason)
        core.planning.stand_by(member, reason)
        core.planning.holder_gone(worker_id, reason)
        self.placing.ask_anew()

    # ------------------------------------------------------------------ for tests

    def validate(self) -> None:
        """Invariants; raises AssertionError."""
        core, state, placed = self._core, self._core.state, self.placing.placed
        observing = {w for w, m in core.members.items() if m.state is MemberState.OBSERVING}
        assert observing == self.observers.keys(), "who observes is not who is known to"
        assert core.phase is Phase.TRAINING or not (observing or placed), "observers without training"
        assert not (observing | placed.keys()) & state.spans.keys(), "an observer holds a span"
        assert not observing & placed.keys(), "an observer that waits for its start"
        for worker_id, observer in self.observers.items():
            assert observer.base <= observer.reached <= state.step, f"{worker_id} is ahead of the job"
            assert observer.plan_version == state.plan_version, f"{worker_id} knows an old plan"
            for donor, life in observer.donors.items():
                assert core.members[donor].incarnation == life, f"{donor} donates for an earlier life"
            for stage in observer.placed.span.stages:
                assert any(stage in state.spans[w] for w in observer.donors), f"{worker_id} lacks a donor"
