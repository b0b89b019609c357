"""What the owner commands while a job runs: to pause it and let it go on, to send a worker away and let it back.

Every command is answered once (`Answer`), after its record is stored; said twice, it changes nothing the second time.

*Paused*, nothing is leased any more. `sync` finishes the step that has begun, because it is a transaction; in `async`
workers give back what they have not begun, finish the rest, and take no slots of exchanges. Everybody stays connected
and keeps state; who comes is measured and planned with; checkpoints are saved as ever. A restart goes on paused.

*Evicted*, a worker's life is over: its stream is closed with the reason, what it leased is leased again, and a new life
is refused until the time is over. So nothing that it still says counts.

| trouble | what follows |
| --- | --- |
| the coordinator is killed after the record | Welcome tells of the pause; who is evicted is refused |
| a worker is away while a pause begins or ends | Welcome says which it is; its leases are given back, or run out |
| a worker is lost in a pause | as ever; a `sync` step that was being finished is then begun again after the pause |
| the only holder of a stage is to be evicted | refused with what would be lost; if forced, as if it were lost |
| the job is stopped in a pause | the pause ends first |
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from starlings_coordinator.core.effects import Answer
from starlings_coordinator.core.events import (
    DrainAsked,
    EvictionRequested,
    OwnerCommand,
    PauseRequested,
    ReadmissionRequested,
    ResumeRequested,
)
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.records import (
    PauseRecorded,
    ResumeRecorded,
    WorkerEvicted,
    WorkerReadmitted,
)
from starlings_protos.invite import spoken_duration, spoken_time
from starlings_protos.messages import WorkerId
from starlings_protos.status import CommandReply, Pause
from starlings_protos.stream_messages import DrainOrder, JobPaused

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Nobody is sent away for longer without being sent away for good.
EVICTION_MOST_S = 10 * 365 * 86400.0


class Operating:
    def __init__(self, core: Core) -> None:
        self._core = core

    def asked(self, command: OwnerCommand) -> None:
        match command:
            case PauseRequested():
                self._pause(command)
            case ResumeRequested():
                self._resume(command)
            case DrainAsked():
                self._drain(command)
            case EvictionRequested():
                self._evict(command)
            case ReadmissionRequested():
                self._readmit(command)
            case _:
                assert_never(command)

    def _answer(self, command: OwnerCommand, text: str, *, changed: bool) -> None:
        reply = CommandReply(changed, text, self._core.phase.value)
        self._core.desk.ask(Answer(command.request, reply))

    def _refuse(self, command: OwnerCommand, why: str) -> None:
        reply = CommandReply(False, why, self._core.phase.value)
        self._core.desk.ask(Answer(command.request, reply, refused=True))

    # ------------------------------------------------------------------ pause

    @property
    def holds_up(self) -> bool:
        """Whether a pause is why nothing moves."""
        return self._core.paused and self._core.phase not in (Phase.FINISHING, Phase.DONE, Phase.FAILED)

    def words(self) -> str:
        pause = self._core.state.pause
        assert pause is not None
        words = f"paused by the owner since {spoken_time(pause.at_s)}: {pause.reason}"
        return f"{words} (what is under way is being finished)" if self.settling else words

    @property
    def settling(self) -> bool:
        """Something that was begun before the pause is not over."""
        return self._core.phase is Phase.TRAINING and self._core.schedule.under_way

    def shown(self) -> Pause | None:
        pause = self._core.state.pause
        return Pause(pause.reason, pause.at_s, self.settling) if pause is not None else None

    def _pause(self, command: PauseRequested) -> None:
        core, known = self._core, self._core.state.pause
        if core.has_ended or core.phase is Phase.FINISHING:
            self._refuse(
                command, "Nothing is trained any more, so there is nothing to pause: the job is ending."
            )
        elif known is not None:
            since = spoken_time(known.at_s)
            self._answer(
                command, f"The job has been paused since {since} already: {known.reason}.", changed=False
            )
        else:
            core.desk.record(PauseRecorded(command.reason, core.now.wall_s))
            core.desk.announce("paused", f"the owner paused the job: {command.reason}")
            self._tell_all()
            finishing = "; what is under way is being finished" if self.settling else ""
            self._answer(
                command,
                f"The job is paused{finishing}. Workers keep what they have; `starlings resume` goes on.",
                changed=True,
            )

    def _resume(self, command: ResumeRequested) -> None:
        if not self._core.paused:
            self._answer(command, "The job is not paused.", changed=False)
            return
        self._end_pause("the owner lets the job go on")
        self._answer(command, "The job goes on.", changed=True)

    def job_ends(self) -> None:
        """An end in order needs everybody's work."""
        if self._core.paused:
            self._end_pause("the job is to end, so it goes on")

    def _end_pause(self, words: str) -> None:
        core = self._core
        core.desk.record(ResumeRecorded())
        core.desk.announce("resumed", words)
        core.rates.start(core.now.monotonic_s)
        self._tell_all()

    def _tell_all(self) -> None:
        core, pause = self._core, self._core.state.pause
        message = JobPaused(pause is not None, pause.reason if pause is not None else "")
        for _, member in sorted(core.members.items()):
            core.desk.send(member, message)

    # ------------------------------------------------------------------ leaving in order

    def _drain(self, command: DrainAsked) -> None:
        """Nothing to record: the worker does the rest, and whoever misses the message is asked again."""
        core, member = self._core, self._core.members.get(command.worker_id)
        if member is None or not member.here:
            self._refuse(command, f"{command.worker_id} is not connected, so nobody can be asked to leave.")
        elif member.leaving is not None:
            self._answer(command, f"{command.worker_id} is leaving already: {member.leaving}.", changed=False)
        else:
            core.desk.announce(
                "drain", f"the owner asks {command.worker_id} to leave in order: {command.reason}"
            )
            core.desk.send(member, DrainOrder(command.reason))
            self._answer(
                command,
                f"{command.worker_id} is asked to leave: it finishes what it has begun, hands over what nobody else "
                "has, and its process ends with exit code 0.",
                changed=True,
            )

    # ------------------------------------------------------------------ eviction

    def eviction_of(self, worker_id: WorkerId) -> str:
        """What to tell a worker that may not come in; "" for one that may."""
        known = self._core.state.evicted.get(worker_id)
        if known is None or self._is_over(known):
            return ""
        return _words_for_worker(known)

    def _is_over(self, eviction: WorkerEvicted) -> bool:
        return eviction.until_s > 0 and self._core.now.wall_s >= eviction.until_s

    def look_at_time(self) -> None:
        core = self._core
        if not core.state.evicted or core.has_ended:
            return
        for worker_id, eviction in sorted(core.state.evicted.items()):
            if self._is_over(eviction):
                core.desk.record(WorkerReadmitted(worker_id))
                core.desk.announce(
                    "readmitted", f"{worker_id} may come back: the time for which it was evicted is over"
                )

    def _evict(self, command: EvictionRequested) -> None:
        core, worker_id = self._core, command.worker_id
        member = core.members.get(worker_id)
        if core.has_ended:
            self._refuse(command, "The job has ended; nobody takes part in it any more.")
            return
        loss = self._loss(member) if member is not None else ""
        if loss and not command.force:
            self._refuse(command, loss)
            return
        now_s = core.now.wall_s
        bounded = math.isfinite(command.for_s) and 0 < command.for_s <= EVICTION_MOST_S
        hello = member.hello if member is not None else None
        known = core.state.evicted.get(worker_id)
        device = (hello.device, hello.device_class) if hello is not None else ("", "")
        if known is not None and hello is None:
            device = (known.device, known.device_class)
        record = WorkerEvicted(
            worker_id, command.reason, now_s, now_s + command.for_s if bounded else 0.0, *device
        )
        core.desk.record(record)
        until = _until(record)
        core.desk.announce("evicted", f"{worker_id} was sent away by the owner {until}: {command.reason}")
        if member is not None:
            reason = f"the owner sent it away {until}: {command.reason}"
            core.membership.evict(member, reason, _words_for_worker(record))
        here = "" if member is not None else " It is not connected just now."
        lost = " Training goes on from the newest saved version." if loss else ""
        self._answer(command, f"{worker_id} is sent away {until}.{here}{lost}", changed=True)

    def _readmit(self, command: ReadmissionRequested) -> None:
        core, worker_id = self._core, command.worker_id
        if worker_id not in core.state.evicted:
            self._answer(command, f"{worker_id} is not evicted.", changed=False)
            return
        core.desk.record(WorkerReadmitted(worker_id))
        core.desk.announce("readmitted", f"{worker_id} may come back: the owner lets it")
        words = f"{worker_id} may come back. If its process has ended, it has to be started again there."
        self._answer(command, words, changed=True)

    def _loss(self, member: Member) -> str:
        """What would be lost with a worker, as a sentence with a way out; "" for nothing."""
        core, span = self._core, self._core.state.spans.get(member.worker_id)
        if span is None or core.phase not in (Phase.TRAINING, Phase.FINISHING):
            return ""
        alone = [stage for stage in span.stages if not self._others_hold(stage, member)]
        if not alone:
            return ""
        version = core.planning.restart_version
        steps = core.state.step - version
        back = f"training would begin again from version {version}, the newest that is saved"
        lost = f", and {steps} steps ({steps * core.config.job.tokens_per_step:,} tokens) would be lost"
        return (
            f"{member.worker_id} is the only one that holds stage {' and '.join(map(str, alone))}: {back}"
            f"{lost if steps > 0 else ''}. Add --force to do it all the same, or `starlings drain` it, which hands its "
            "state over first."
        )

    def _others_hold(self, stage: int, member: Member) -> bool:
        members = self._core.members
        return any(
            members[w].here for w in self._core.holders_of(stage) if w in members and w != member.worker_id
        )


def _until(eviction: WorkerEvicted) -> str:
    if not eviction.until_s:
        return "until the owner lets it back"
    lasts = spoken_duration(eviction.until_s - eviction.at_s)
    return f"for {lasts}, until {spoken_time(eviction.until_s)}"


def _words_for_worker(eviction: WorkerEvicted) -> str:
    back = (
        "start it again then"
        if eviction.until_s
        else "ask the owner, who can let it back with `starlings evict --readmit`"
    )
    return f"the job's owner sent this worker away {_until(eviction)}: {eviction.reason} ({back})"


def eviction_words(eviction: WorkerEvicted) -> str:
    """For people who look at the job."""
    return f"sent away by the owner {_until(eviction)}: {eviction.reason}"
