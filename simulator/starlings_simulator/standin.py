"""A coordinator in a few pages: no persistence, no patience, no detectors beyond missed heartbeats.

It stands in for the real core where the worker's side alone is under test, and is the dumb twin that the real
one can be compared with. Same interface: `handle(event, now) -> (records, effects)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlings_coordinator.core.effects import CloseSession, ComputePlan, Effect, JobEnded, Send
from starlings_coordinator.core.events import (
    Booted,
    Event,
    Now,
    PlanComputed,
    Ticked,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from starlings_protos.messages import (
    KEEPER,
    Assignment,
    EngineDown,
    ExchangeFailed,
    ExchangeGroup,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    Finish,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    Peer,
    PlanRequest,
    PlanWorker,
    Prepared,
    ProbeReport,
    Ready,
    Span,
    Stage,
    StateReport,
    StateWanted,
    StepCommitted,
    StepRestarted,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerId,
)
from starlings_protos.telemetry import Telemetry


@dataclass(slots=True)
class Member:
    session: int
    hello: Hello
    incarnation: int
    heard_at_s: float
    probe: ProbeReport | None = None
    span: Span | None = None
    slots: int = 0
    ready: bool = False
    wish: int = 0
    prepared: Prepared | None = None
    state: StateReport | None = None


@dataclass(slots=True)
class StandIn:
    """One sync job of `steps` steps.

    Holders lost in training: next attempt, or back to version 0 when a stage is bare.
    """

    steps: int
    microbatches: int
    samples_per_microbatch: int
    count_targets: Callable[[Sequence[int]], int]
    min_workers: int
    held_out_microbatches: int = 2
    settle_s: float = 1.0
    lost_after_s: float = 6.0
    tied: bool = False
    phase: str = "gathering"
    members: dict[WorkerId, Member] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    plan_version: int = 0
    step: int = 0
    attempt: int = 0
    last_attempt: int = 0
    attempts: dict[int, int] = field(default_factory=lambda: {0: 0})
    pool: list[MicrobatchKey] = field(default_factory=list)
    leased: dict[MicrobatchKey, tuple[WorkerId, float]] = field(default_factory=dict)
    done: dict[MicrobatchKey, MicrobatchDone] = field(default_factory=dict)
    exchange_open: bool = False
    requests: int = 0
    incarnations: int = 0
    joined_at_s: float = 0.0
    out: list[Effect] = field(default_factory=list)

    def handle(self, event: Event, now: Now) -> tuple[tuple[object, ...], tuple[Effect, ...]]:
        now_s = now.monotonic_s
        match event:
            case WorkerConnected():
                self._connected(event.session, event.hello, now_s)
            case WorkerDisconnected():
                pass  # Missed heartbeats decide.
            case WorkerSaid():
                member = self.members.get(event.worker_id)
                if member is not None and member.session == event.session:
                    member.heard_at_s = now_s
                    self._said(event.worker_id, member, event.message, now_s)
            case PlanComputed():
                self._planned(event)
            case Ticked() | Booted():
                self._look_at_time(now_s)
            case _:
                pass
        effects = tuple(self.out)
        self.out.clear()
        return (), effects

    def validate(self) -> None:
        assert not set(self.leased) & set(self.pool)
        assert not set(self.done) & set(self.pool)

    def waiting_words(self) -> str:
        return "waiting for workers" if self.phase == "gathering" else ""

    @property
    def holders(self) -> dict[WorkerId, Member]:
        return {
            worker_id: member for worker_id, member in sorted(self.members.items()) if member.span is not None
        }

    # ------------------------------------------------------------------ membership

    def _send(self, worker_id: WorkerId, message: ToWorker) -> None:
        member = self.members.get(worker_id)
        if member is not None:
            self.out.append(Send(member.session, worker_id, message))

    def _connected(self, session: int, hello: Hello, now_s: float) -> None:
        old = self.members.get(hello.worker_id)
        if old is not None and old.hello.session_nonce == hello.session_nonce:
            old.session, old.heard_at_s, old.wish = session, now_s, 0
            self._welcome(hello.worker_id, old, probe_now=old.probe is None)
            self._repeat(hello.worker_id)
            return
        if old is not None:
            self._lost(hello.worker_id)
        self.incarnations += 1
        member = self.members[hello.worker_id] = Member(session, hello, self.incarnations, now_s)
        self.joined_at_s = now_s
        self._welcome(hello.worker_id, member, probe_now=True)

    def _welcome(self, worker_id: WorkerId, member: Member, *, probe_now: bool) -> None:
        self._send(worker_id, Welcome(1, member.incarnation, b"", "", 1.0, b"", 0.0, b"", probe_now))

    def _repeat(self, worker_id: WorkerId) -> None:
        """The stream may have swallowed anything: say again what the worker must know."""
        member = self.members[worker_id]
        if member.span is None:
            return
        self._send(worker_id, self._assignment(worker_id))
        if self.phase == "loading":
            return
        if self.step > 0:
            self._send(worker_id, self._commit(self.step - 1, self.last_attempt))
        self._send(worker_id, StepRestarted(self.step, self.attempt, "reconnected"))
        mine = [key for key, (holder, _) in self.leased.items() if holder == worker_id]
        if mine:
            self._send(worker_id, LeaseGrant(tuple(self._lease(key) for key in mine)))
        if self.phase == "training" and self.exchange_open:
            self._send(worker_id, self._opened(worker_id))
        if self.phase == "averaging":
            self._send(worker_id, StateWanted(self.step, True))
            self._send(worker_id, self._opened(worker_id, ExchangePurpose.STATE))

    def _lost(self, worker_id: WorkerId) -> None:
        member = self.members.pop(worker_id, None)
        if member is None or member.span is None:
            return
        covered = {stage for other in self.holders.values() for stage in other.span.stages}  # type: ignore[union-attr]
        if self.phase != "training" or len(covered) < len(self.stages):
            self._gather()
            return
        self.plan_version += 1
        for other in self.holders:
            self._send(other, self._assignment(other))
        self._restart(f"{worker_id} was lost")

    def _gather(self) -> None:
        """Back to the start: version 0 with whoever is here."""
        self.phase = "gathering"
        # An attempt's number is never used twice, also when a step comes again.
        self.attempt = max(self.attempt, *self.attempts.values()) + 1
        self.step = self.last_attempt = 0
        self.pool, self.leased, self.done, self.exchange_open = [], {}, {}, False
        for member in self.members.values():
            member.span = None
            member.ready = False

    def _look_at_time(self, now_s: float) -> None:
        for worker_id, member in list(self.members.items()):
            if now_s - member.heard_at_s > self.lost_after_s:
                self.out.append(CloseSession(member.session, worker_id, None, "silent for too long"))
                self._lost(worker_id)
        if self.phase == "training":
            late = [key for key, (_, until_s) in self.leased.items() if now_s > until_s]
            if late:
                self._restart(f"{late[0]} took too long")
        probed = {who: member for who, member in self.members.items() if member.probe is not None}
        if self.phase == "gathering" and len(probed) >= self.min_workers:
            if now_s - self.joined_at_s < self.settle_s:
                return
            self.phase = "planning"
            self.requests += 1
            workers = tuple(PlanWorker(who, {}, {}, 1) for who in sorted(probed))
            self.out.append(
                ComputePlan(
                    PlanRequest(self.requests, workers, 7, self.samples_per_microbatch, self.microbatches, 16)
                )
            )

    # ------------------------------------------------------------------ planning

    def _planned(self, event: PlanComputed) -> None:
        reply = event.reply
        if reply.request_id != self.requests or self.phase != "planning":
            return
        if reply.impossible or any(planned.worker_id not in self.members for planned in reply.workers):
            self.phase = "gathering"
            return
        self.stages = reply.stages
        self.plan_version += 1
        for planned in reply.workers:
            member = self.members[planned.worker_id]
            member.span, member.slots, member.ready = planned.span, planned.slots, False
        self.phase = "loading"
        for worker_id in self.holders:
            self._send(worker_id, self._assignment(worker_id))

    def _assignment(self, worker_id: WorkerId) -> Assignment:
        member = self.members[worker_id]
        assert member.span is not None
        peers = tuple(
            Peer(
                other_id,
                (),
                other.span,
                other.incarnation,
                tuple(0.01 for _ in other.span.stages) if other.span else (),
                tuple(0.02 for _ in other.span.stages) if other.span else (),
                other.slots,
            )
            for other_id, other in self.holders.items()
            if other_id != worker_id
        )
        return Assignment(
            self.plan_version,
            self.stages,
            member.span,
            self.step,
            (Peer(KEEPER),),
            peers,
            member.slots,
            False,
            "all",
            (),
            0,
            self.step,
            self.attempt,
            1 << 30,
        )

    # ------------------------------------------------------------------ what workers say

    def _said(self, worker_id: WorkerId, member: Member, message: ToCoordinator, now_s: float) -> None:
        match message:
            case ProbeReport():
                member.probe = message
            case Heartbeat() | Telemetry():
                pass
            case Ready():
                if self.phase == "loading" and message.plan_version == self.plan_version:
                    member.ready = True
                    if all(other.ready for other in self.holders.values()):
                        self.phase = "training"
                        self._begin_step()
            case LeaseRequest():
                member.wish = message.count
            case MicrobatchDone():
                self._microbatch_done(message)
            case MicrobatchFailed() | ExchangeFailed():
                self._failed(message)
            case Prepared():
                self._prepared(member, message)
            case StateReport():
                self._state(member, message)
            case EngineDown() | Leaving():
                self._lost(worker_id)
                if isinstance(message, Leaving):
                    self.out.append(Send(member.session, worker_id, Finish(False, "left in order")))
                else:
                    self.incarnations += 1
                    again = Member(member.session, member.hello, self.incarnations, now_s)
                    self.members[worker_id] = again
                    self.joined_at_s = now_s
                    self._welcome(worker_id, again, probe_now=True)
            case _:
                pass
        self._grant(now_s)

    # ------------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        self.attempts[self.step] = max(self.attempt, self.attempts.get(self.step, 0))
        self.pool = [
            MicrobatchKey(LeaseKind.TRAIN, self.step, self.attempt, index)
            for index in range(self.microbatches)
        ]
        self.leased, self.done, self.exchange_open = {}, {}, False
        for member in self.members.values():
            member.prepared = None

    def _restart(self, reason: str) -> None:
        if self.phase not in ("training", "averaging"):
            return
        self.attempt += 1
        self._begin_step()
        for worker_id in self.holders:
            self._send(worker_id, StepRestarted(self.step, self.attempt, reason))
        if self.phase == "averaging":
            self._average()

    def _average(self) -> None:
        """Everybody adopts the mean state and reports it."""
        self.pool = []
        for worker_id, member in self.holders.items():
            member.state = None
            self._send(worker_id, StateWanted(self.step, True))
            self._send(worker_id, self._opened(worker_id, ExchangePurpose.STATE))

    def _lease(self, key: MicrobatchKey) -> Lease:
        count = self.samples_per_microbatch
        samples = tuple(key.step * 1000 + key.index * count + row for row in range(count))
        return Lease(key, samples, float(self.microbatches * self.count_targets(samples)), 60.0)

    def _grant(self, now_s: float) -> None:
        for worker_id, member in self.holders.items():
            if member.span is None or 0 not in member.span or not member.wish or not self.pool:
                continue
            keys, self.pool = self.pool[: member.wish], self.pool[member.wish :]
            member.wish -= len(keys)
            for key in keys:
                self.leased[key] = (worker_id, now_s + 60.0)
            self._send(worker_id, LeaseGrant(tuple(self._lease(key) for key in keys)))

    def _microbatch_done(self, message: MicrobatchDone) -> None:
        key = message.key
        if key not in self.leased:
            return
        del self.leased[key]
        self.done[key] = message
        if len(self.done) < (self.microbatches if self.phase == "training" else self.held_out_microbatches):
            return
        if self.phase == "training":
            self.exchange_open = True
            for worker_id in self.holders:
                self._send(worker_id, self._opened(worker_id))
        elif self.phase == "finishing":
            self.phase = "done"
            for worker_id in self.members:
                self._send(worker_id, Finish(True, "the job is done"))
            self.out.append(JobEnded(0, "done"))

    def _opened(
        self, worker_id: WorkerId, purpose: ExchangePurpose = ExchangePurpose.GRADIENT
    ) -> ExchangeOpened:
        groups = []
        span = self.members[worker_id].span
        assert span is not None
        last = len(self.stages) - 1
        wanted = [(f"stage:{stage}", {stage}) for stage in span.stages]
        if self.tied and last > 0 and purpose is ExchangePurpose.GRADIENT and (0 in span or last in span):
            wanted.append(("tied", {0, last}))
        for name, stages in wanted:
            members = [
                who for who, other in self.holders.items() if other.span and stages & set(other.span.stages)
            ]
            active = {
                hop.worker_id
                for done in self.done.values()
                for hop in done.route
                if any(hop.first_stage <= stage <= hop.last_stage for stage in stages)
            }
            # One member in three aggregates nothing, to have empty parts.
            shares = [0.0 if len(members) > 2 and index % 3 == 1 else 1.0 for index in range(len(members))]
            weight = 1.0 / len(members)
            groups.append(
                ExchangeGroup(
                    name,
                    tuple(
                        ExchangeMember(
                            who,
                            weight if purpose is ExchangePurpose.STATE else float(who in active),
                            share / sum(shares),
                        )
                        for who, share in zip(members, shares, strict=True)
                    ),
                )
            )
        return ExchangeOpened(self.step, self.attempt, tuple(groups), 30.0, purpose)

    def _failed(self, message: MicrobatchFailed | ExchangeFailed) -> None:
        if isinstance(message, ExchangeFailed):
            epoch = (message.step, message.attempt)
        elif message.key.kind is LeaseKind.TRAIN:
            epoch = (message.key.step, message.key.attempt)
        else:
            self.pool.append(message.key)
            self.leased.pop(message.key, None)
            return
        if epoch == (self.step, self.attempt):
            self._restart(message.reason)

    def _prepared(self, member: Member, message: Prepared) -> None:
        if (message.step, message.attempt) != (self.step, self.attempt) or self.phase != "training":
            return
        member.prepared = message
        if any(other.prepared is None for other in self.holders.values()):
            return
        for stage in range(len(self.stages)):
            indices = [
                index
                for other in self.holders.values()
                if other.prepared is not None
                for group in other.prepared.groups
                if group.group == f"stage:{stage}"
                for index in group.microbatches
            ]
            assert sorted(indices) == list(range(self.microbatches)), f"stage {stage}: {sorted(indices)}"
        for worker_id in self.holders:
            self._send(worker_id, self._commit(self.step, self.attempt))
        self.last_attempt = self.attempt
        self.step, self.attempt = self.step + 1, self.attempts.get(self.step + 1, -1) + 1
        if self.attempt:
            # The step was tried before a rewind; a commit lets holders expect its attempt 0.
            for worker_id in self.holders:
                self._send(worker_id, StepRestarted(self.step, self.attempt, "comes again after a rewind"))
        if self.step < self.steps:
            self._begin_step()
            return
        self.phase = "averaging"
        self._begin_step()
        self._average()

    def _commit(self, step: int, attempt: int) -> StepCommitted:
        return StepCommitted(step, attempt, 0.1, 1.0, 1.0, step == self.steps - 1)

    def _state(self, member: Member, message: StateReport) -> None:
        member.state = message
        if self.phase == "averaging" and all(other.state for other in self.holders.values()):
            self.phase = "finishing"
            self.pool = [
                MicrobatchKey(LeaseKind.EVALUATE, 0, 0, index) for index in range(self.held_out_microbatches)
            ]
            self.done, self.leased = {}, {}
