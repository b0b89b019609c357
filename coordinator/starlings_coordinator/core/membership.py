"""Who is here: admission, incarnations, probes one per host, silence, leaving, loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlings_coordinator.core.effects import CloseSession, Send
from starlings_coordinator.core.failures import PATIENCE, Failures
from starlings_coordinator.core.liveness import SUSPECT_FROM, SilenceDetector, SlowestBeat
from starlings_coordinator.core.members import Member, MemberState, Suspicion
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.records import WorkerAdmitted, WorkerGone, WorkerMeasured
from starlings_protos.invite import spoken_time
from starlings_protos.messages import (
    EngineDown,
    Finish,
    Hello,
    Leaving,
    ProbeReport,
    Refusal,
    Standby,
    Welcome,
    WorkerId,
)

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# The protocol versions that this coordinator speaks.
PROTOCOL_MIN, PROTOCOL_MAX = 1, 1
MEMBERS_MOST = 10_000
PARTINGS_KEPT = 1024
# Everybody is looked at as often as it matters and not at each tick: ten thousand cost a look some milliseconds, and
# are given up after minutes of silence. Where a stream has ended, a device is measured or somebody is silent, it is the
# latter at least.
LOOKS_PER_FLOOR, LOOK_AT_MOST_S = 24.0, 1.0
_UNMEASURED = (MemberState.JOINING, MemberState.PROBING)


def _is_well(member: Member, since_s: float) -> bool:
    """Whether time changes nothing about a member that was heard after `since_s`, as almost all were."""
    return (
        member.detector.last_heard_s > since_s
        and member.session is not None
        and member.suspicion is None
        and member.state is not MemberState.PROBING
        and member.set_aside_until_s is None
    )


def _silence(member: Member, now_s: float) -> str:
    words = f"nothing was heard of it for {now_s - member.detector.last_heard_s:.0f} s"
    if member.confirmations:
        words += f", and {member.confirmations} of its peers cannot reach it either"
    return words


class Membership:
    def __init__(self, core: Core) -> None:
        self._core = core
        # When the set of usable workers last changed; planning waits until it has settled.
        self.changed_at_s = 0.0
        self.changes = 0
        self._revoked: set[WorkerId] = set()
        # Worked out once: a thousand workers get them.
        self._job = (core.config.job.to_json(), core.config.job.digest())
        self._profile_json = core.config.profile.to_json()
        timings = core.config.timings
        self.failures = Failures(timings.set_aside_s, timings.set_aside_most_s)
        # Why those who are not here any more went, for people; the oldest first.
        self.partings: dict[WorkerId, str] = {}
        self._slowest = SlowestBeat(core.config.timings.heartbeat_told_s)
        self._look_again_at_s = float("-inf")
        # Who may be JOINING or PROBING, by host: all that are, and some that are not any more. To look through ten
        # thousand members whenever one joins would take as long as everything else about joining.
        self._unmeasured: dict[str, set[WorkerId]] = {}

    def changed(self) -> None:
        self.changed_at_s = self._core.now.monotonic_s
        self.changes += 1

    # ------------------------------------------------------------------ coming

    def connected(self, session: int, hello: Hello) -> None:
        core, worker_id = self._core, hello.worker_id
        refusal = self._objection(hello)
        if refusal is not None:
            core.refuse(session, worker_id, *refusal)
            return
        finished = core.state.finished
        if core.phase in (Phase.DONE, Phase.FAILED) and finished is not None:
            core.desk.ask(Send(session, worker_id, Finish(finished.done, finished.reason)))
            core.desk.ask(CloseSession(session, worker_id, None, "the job has ended"))
            return
        old = core.members.get(worker_id)
        if old is not None and old.session is not None:
            core.desk.close(old, Refusal.SUPERSEDED, "the same worker connected again; this session is over")
        if old is not None and self._goes_on(old.hello, old.incarnation, hello):
            self._resumed(old, session, hello)
            return
        if old is not None:
            self._failed(old, "it was started again")
            self.lose(old, "it was started again", announce=False)
        life = core.state.lives.get(worker_id)
        member = self._member(hello, session)
        if old is None and life is not None and self._goes_on(life.hello, life.incarnation, hello):
            # Of before this coordinator's start, and it held nothing that anybody waits for.
            member.incarnation, member.probe = life.incarnation, life.probe
            member.state = MemberState.JOINING if life.probe is None else MemberState.STANDBY
            member.reason = self._reason_to_stand_by(member)
            self._resumed(member, session, hello)
            return
        core.desk.announce("join", f"{worker_id} joined: {hello.device or 'unknown device'}")
        self._new_life(member)

    def _member(self, hello: Hello, session: int | None) -> Member:
        core, timings = self._core, self._core.config.timings
        detector = SilenceDetector(self._floor_s(), core.now.monotonic_s)
        member = Member(hello.worker_id, hello, 0, session, detector)
        member.grace_s, member.connected_wall_s = timings.reconnect_grace_s, core.now.wall_s
        core.members[hello.worker_id] = member
        self._to_be_measured(member)
        return member

    @property
    def heartbeat_interval_s(self) -> float:
        """What workers are told at present."""
        return self._core.config.heartbeat_interval_s(len(self._core.members))

    def _floor_s(self) -> float:
        """No shorter silence is a loss."""
        timings = self._core.config.timings
        slowest_s = self._slowest.look(self._core.now.monotonic_s, self.heartbeat_interval_s)
        return max(timings.silence_least_s, timings.silent_intervals * slowest_s)

    @staticmethod
    def _goes_on(known: Hello, incarnation: int, hello: Hello) -> bool:
        """Whether `hello` comes from the life that is known: the same supervisor, whose engine is still the same."""
        return known.session_nonce == hello.session_nonce and hello.incarnation in (0, incarnation)

    def recall(self, holders: tuple[WorkerId, ...]) -> bool:
        """After a restart: the holders of the live plan are members whose streams are down. False when one of them is
        not known well enough.
        """
        core = self._core
        lives = {worker_id: core.state.lives.get(worker_id) for worker_id in holders}
        if any(life is None or life.probe is None for life in lives.values()):
            return False
        for life in lives.values():
            assert life is not None
            member = self._member(life.hello, None)
            member.incarnation, member.probe = life.incarnation, life.probe
            member.state, member.reason = MemberState.TRAINING, "has to find the coordinator again"
            member.disconnected_at_s, member.grace_s = (
                core.now.monotonic_s,
                core.config.timings.restart_grace_s,
            )
        self.changed()
        self._look_soon()
        return True

    def _objection(self, hello: Hello) -> tuple[Refusal, str] | None:
        core = self._core
        if hello.worker_id in self._revoked:
            return Refusal.REVOKED, "this worker's certificate was revoked by the job's owner"
        if eviction := self._core.operating.eviction_of(hello.worker_id):
            return Refusal.EVICTED, eviction
        if hello.protocol_max < PROTOCOL_MIN:
            return Refusal.VERSION, (
                f"worker {hello.version} speaks protocol up to {hello.protocol_max}, this coordinator "
                f"{PROTOCOL_MIN} to {PROTOCOL_MAX}; upgrade the worker: uv tool upgrade starlings"
            )
        if hello.protocol_min > PROTOCOL_MAX:
            return Refusal.VERSION, (
                f"worker {hello.version} speaks protocol from {hello.protocol_min}, this coordinator only "
                f"{PROTOCOL_MIN} to {PROTOCOL_MAX}; ask the job's owner to upgrade the coordinator"
            )
        if hello.worker_id not in core.members and len(core.members) >= MEMBERS_MOST:
            return Refusal.LIMIT, f"the job has its limit of {MEMBERS_MOST} workers"
        other = core.members.get(hello.worker_id)
        if other is not None and self._is_used_elsewhere(other, hello):
            since = spoken_time(other.connected_wall_s)
            return Refusal.IN_USE, (
                f"this worker's directory is in use by {other.hello.host_name or 'another machine'} since {since}; "
                "a copy cannot take part: join with another --dir (or stop the other one first)"
            )
        digest = self._job[1]
        if hello.job_digest and hello.job_digest != digest:
            return Refusal.JOB_MISMATCH, (
                f"this worker directory belongs to another version of the job (digest {hello.job_digest[:12]}, "
                f"the coordinator has {digest[:12]}); join again with another --dir"
            )
        return None

    def _is_used_elsewhere(self, other: Member, hello: Hello) -> bool:
        """A living session of the same id from another machine: the directory was copied. On one machine a second
        session is a restart, since the directory is locked.
        """
        if other.session is None or other.hello.session_nonce == hello.session_nonce:
            return False
        elsewhere = bool(other.hello.host_id and hello.host_id and other.hello.host_id != hello.host_id)
        silent_s = self._core.now.monotonic_s - other.detector.last_heard_s
        return elsewhere and silent_s < max(other.detector.floor_s, self._floor_s())

    def _resumed(self, member: Member, session: int, hello: Hello) -> None:
        """The same life on a new stream. Messages may have been lost both ways, so what it does is begun anew."""
        core = self._core
        member.session, member.hello, member.disconnected_at_s = session, hello, None
        member.suspicion = None
        self._to_be_measured(member)
        member.grace_s, member.connected_wall_s = core.config.timings.reconnect_grace_s, core.now.wall_s
        if member.state is MemberState.TRAINING:
            member.reason = ""
        member.detector.forgive(core.now.monotonic_s)
        member.detector.floor_s = self._floor_s()
        core.desk.announce("rejoin", f"{member.worker_id} is connected again")
        core.desk.send(member, self._welcome(member, probe_now=member.state is MemberState.PROBING))
        if member.worker_id in core.state.spans and core.plan_is_live:
            core.planning.resume(member)
        elif member.reason and member.state is MemberState.STANDBY:
            core.desk.send(member, Standby(member.reason))
        self.changed()
        self._probe_next(member.host)

    def _new_life(self, member: Member) -> None:
        core = self._core
        # Above what it says too: a coordinator on an older copy of its log must not fence the living off.
        known = core.state.incarnations.get(member.worker_id, 0)
        incarnation = max(known, min(member.hello.incarnation, 1 << 62)) + 1
        core.desk.record(WorkerAdmitted(member.worker_id, incarnation, member.hello.device, member.hello))
        member.incarnation = incarnation
        member.state, member.reason = MemberState.JOINING, "waits for its turn to be measured"
        pause = self.failures.pause(member.worker_id, core.now.monotonic_s)
        if pause is not None and self.failures.count(member.worker_id, core.now.monotonic_s) >= PATIENCE:
            # Its engine may die of being measured.
            member.set_aside_until_s, member.reason = pause.until_s, pause.words
        self._to_be_measured(member)
        member.probe, member.ready, member.probe_started_at_s = None, None, None
        member.wish = 0
        self._probe_next(member.host)
        if member.state is MemberState.JOINING:
            core.desk.send(member, self._welcome(member, probe_now=False))

    def _welcome(self, member: Member, *, probe_now: bool) -> Welcome:
        core, config = self._core, self._core.config
        return Welcome(
            PROTOCOL_MAX,
            member.incarnation,
            *self._job,
            self.heartbeat_interval_s,
            config.assignment_key_der,
            core.now.wall_s,
            self._profile_json,
            probe_now,
            config.telemetry_interval_s(len(core.members)),
            core.paused,
            core.state.pause.reason if core.state.pause is not None else "",
        )

    # ------------------------------------------------------------------ probes

    @property
    def is_measuring(self) -> bool:
        unmeasured = (m for host in tuple(self._unmeasured) for m in self._to_measure(host))
        return any(m.here and m.set_aside_until_s is None for m in unmeasured)

    def _to_be_measured(self, member: Member) -> None:
        self._unmeasured.setdefault(member.host, set()).add(member.worker_id)

    def _to_measure(self, host: str) -> list[Member]:
        """Members of a host that are JOINING or PROBING, by id."""
        known = (self._core.members.get(worker_id) for worker_id in sorted(self._unmeasured.get(host, ())))
        found = [m for m in known if m is not None and m.host == host and m.state in _UNMEASURED]
        if found:
            self._unmeasured[host] = {m.worker_id for m in found}
        else:
            self._unmeasured.pop(host, None)
        return found

    def _probe_next(self, host: str) -> None:
        """One probe per host at a time: workers of one machine would measure each other."""
        core = self._core
        here = [m for m in self._to_measure(host) if m.here and m.set_aside_until_s is None]
        if any(m.state is MemberState.PROBING for m in here):
            return
        for member in here[:1]:
            member.state, member.reason = MemberState.PROBING, "its device is being measured"
            member.probe_started_at_s = core.now.monotonic_s
            core.desk.send(member, self._welcome(member, probe_now=True))

    def probed(self, member: Member, report: ProbeReport) -> None:
        if member.state not in (MemberState.PROBING, MemberState.STANDBY):
            self._core.dropped_messages += 1
            return
        seconds = (*report.forward_seconds.values(), *report.backward_seconds.values())
        rates = (report.uplink_bytes_per_s, report.downlink_bytes_per_s)
        # It is written down, and JSON knows no infinity.
        sound = all(0 <= s < 1e9 for s in seconds) and all(0 <= rate < 1e18 for rate in rates)
        if not report.addresses or not sound:
            self._core.refused_reports += 1
            self.dismiss(member, Refusal.MALFORMED, "its probe report makes no sense")
            return
        member.probe = report
        self._core.desk.record(WorkerMeasured(member.worker_id, member.incarnation, report))
        if member.state is MemberState.PROBING:
            member.state, member.reason = MemberState.STANDBY, self._reason_to_stand_by(member)
            if member.set_aside_until_s is not None or self._core.plan_is_live:
                self._core.desk.send(member, Standby(member.reason))
        self.changed()
        self._probe_next(member.host)

    def _reason_to_stand_by(self, member: Member) -> str:
        pause = self.failures.pause(member.worker_id, self._core.now.monotonic_s)
        if pause is not None:
            member.set_aside_until_s = pause.until_s
            return pause.words
        if self._core.plan_is_live:
            return "training is under way; this worker joins in as soon as there is a place for it"
        return "waits for a plan"

    # ------------------------------------------------------------------ going

    def disconnected(self, session: int, worker_id: WorkerId) -> None:
        member = self._core.members.get(worker_id)
        if member is None or member.session != session:
            return
        member.session = None
        member.disconnected_at_s = self._core.now.monotonic_s
        self._look_soon()
        if worker_id not in self._core.state.spans or not self._core.plan_is_live:
            self.changed()
        self._probe_next(member.host)

    def engine_down(self, member: Member, message: EngineDown) -> None:
        """The supervisor is still there; a new engine is a new incarnation."""
        core = self._core
        core.desk.announce("engine_down", f"{member.worker_id}: {message.reason}")
        if message.at is not None and core.plan_is_live and member.worker_id in core.state.spans:
            core.schedule.died_at(member, message.at, f"its engine ended: {message.reason}")
            if core.has_ended:
                return
        self._note_failure(member, f"its engine ended: {message.reason}", harmful=False)
        self._vacate(member, f"the engine of {member.worker_id} ended: {message.reason}")
        self.changed()
        if message.restarting and member.worker_id in core.members:
            self._new_life(member)
        else:
            member.state, member.reason, member.probe = MemberState.STANDBY, message.reason, None
            self._probe_next(member.host)

    def leaving(self, member: Member, message: Leaving) -> None:
        if member.leaving is not None:
            return
        member.leaving = message.reason or "it was asked to stop"
        self._core.desk.announce("leaving", f"{member.worker_id} wants to leave: {member.leaving}")
        self.changed()
        if member.worker_id not in self._core.state.spans or not self._core.plan_is_live:
            self.release(member)
        else:
            member.state, member.reason = MemberState.LEAVING, member.leaving
            self._core.finishing.holder_leaves(member)

    def release(self, member: Member) -> None:
        """Goodbye in order: nothing of the job depends on it any more."""
        core = self._core
        core.desk.announce("leave", f"{member.worker_id} left: {member.leaving or 'not needed any more'}")
        core.desk.send(member, Finish(False, "you may go: nothing depends on this worker any more"))
        self._forget(member, "it left in order")
        self._vacate(member, f"{member.worker_id} left")
        self.changed()
        self._probe_next(member.host)

    def revoked(self, worker_id: WorkerId) -> None:
        self._revoked.add(worker_id)
        member = self._core.members.get(worker_id)
        if member is not None:
            self.dismiss(member, Refusal.REVOKED, "this worker's certificate was revoked by the job's owner")

    def evict(self, member: Member, reason: str, message: str) -> None:
        """Sent away by the owner, for a time that is recorded; `message` is for the worker."""
        self._core.desk.close(member, Refusal.EVICTED, message)
        self.lose(member, reason, announce=False)

    def dismiss(self, member: Member, refusal: Refusal | None, reason: str) -> None:
        """Against its will. It may come back, and is planned with again after a while that doubles each time."""
        self._note_failure(member, reason, harmful=True)
        self._core.desk.close(member, refusal, reason)
        self.lose(member, reason)

    def set_aside(self, member: Member, reason: str) -> None:
        """The same for who holds nothing and may stay connected."""
        self._note_failure(member, reason, harmful=True)
        self._core.planning.stand_by(member, self._reason_to_stand_by(member))
        self.changed()

    def _note_failure(self, member: Member, reason: str, *, harmful: bool) -> None:
        self.failures.note(member.worker_id, reason, self._core.now.monotonic_s, harmful=harmful)

    def _failed(self, member: Member, reason: str) -> None:
        """By itself, while others counted on it; then it is lost."""
        if member.worker_id in self._core.state.spans and self._core.plan_is_live:
            self._note_failure(member, reason, harmful=False)

    def lose(self, member: Member, reason: str, *, announce: bool = True) -> None:
        core = self._core
        if announce:
            core.desk.announce("lost", f"{member.worker_id} was lost: {reason}")
        # No refusal: if it is alive after all, it comes back as a new life.
        core.desk.close(member, None, f"the coordinator gave this worker up: {reason}")
        member.state = MemberState.LOST
        self._forget(member, reason)
        self._vacate(member, f"{member.worker_id} was lost: {reason}")
        self.changed()
        self._probe_next(member.host)

    def _forget(self, member: Member, reason: str) -> None:
        """Recorded, so that a restarted coordinator does not go on with a life that this one gave up."""
        core = self._core
        self.partings[member.worker_id] = reason
        while len(self.partings) > PARTINGS_KEPT:
            del self.partings[next(iter(self.partings))]
        if core.members.pop(member.worker_id, None) is not None and member.worker_id in core.state.lives:
            core.desk.record(WorkerGone(member.worker_id, member.incarnation, reason))

    def _vacate(self, member: Member, reason: str) -> None:
        core = self._core
        if core.plan_is_live and member.worker_id in core.state.spans:
            core.planning.holder_gone(member.worker_id, reason)

    # ------------------------------------------------------------------ time

    def _look_soon(self) -> None:
        self._look_again_at_s = min(self._look_again_at_s, self._core.now.monotonic_s + LOOK_AT_MOST_S)

    def look_at_time(self, *, forgive: bool) -> None:
        """Silence, streams that did not come back, probes that never end."""
        core, now_s, timings = self._core, self._core.now.monotonic_s, self._core.config.timings
        if forgive:
            self._slowest.forgive(now_s)
        floor_s = self._floor_s()
        if now_s < self._look_again_at_s and not forgive:
            return
        self._look_again_at_s = now_s + floor_s / LOOKS_PER_FLOOR
        since_s = float("inf") if forgive else now_s - SUSPECT_FROM * floor_s
        unwell = [m for m in core.members.values() if not _is_well(m, since_s)]
        if unwell:
            self._look_soon()
        for member in unwell:
            if member.set_aside_until_s is not None and now_s >= member.set_aside_until_s:
                member.set_aside_until_s, member.reason = None, "waits for a plan"
                self.changed()
                self._probe_next(member.host)
            if forgive:
                member.detector.forgive(now_s)
                member.accused_by.clear()
                if member.disconnected_at_s is not None:
                    member.disconnected_at_s = now_s
            elif member.session is None and member.disconnected_at_s is not None:
                if now_s - member.disconnected_at_s >= member.grace_s:
                    self._failed(member, "its connection ended")
                    self.lose(member, "its connection ended")
            elif member.session is not None and member.detector.lost(now_s, floor_s, member.confirmations):
                self._failed(member, _silence(member, now_s))
                self.lose(member, _silence(member, now_s))
            elif (
                member.state is MemberState.PROBING
                and member.probe_started_at_s is not None
                and now_s - member.probe_started_at_s > timings.probe_s
            ):
                self.dismiss(member, None, f"its device was not measured within {timings.probe_s:.0f} s")
            else:
                self._suspect(member, floor_s)

    def _suspect(self, member: Member, floor_s: float) -> None:
        """Silent for a while, or heard again."""
        core, now_s, suspicion = self._core, self._core.now.monotonic_s, member.suspicion
        if suspicion is not None and suspicion.of_silence:
            if member.session is None or member.detector.last_heard_s > suspicion.since_s:
                member.suspicion = None
                if member.session is not None:
                    core.desk.announce("trusted", f"{member.worker_id} was heard again")
        elif member.session is not None and suspicion is None and member.detector.suspect(now_s, floor_s):
            member.suspicion = Suspicion(now_s, _silence(member, now_s))
            core.desk.announce("suspect", f"{member.worker_id}: {member.suspicion.reason}")

    def accused(self, worker_id: WorkerId, by: Member) -> None:
        """A peer could not reach it: that counts should it turn out to be silent."""
        member = self._core.members.get(worker_id)
        if member is not None and member is not by:
            member.accused_by[by.worker_id] = self._core.now.monotonic_s
            if member.suspicion is not None:
                self._look_again_at_s = float("-inf")
