"""What must hold across the whole swarm, whatever happened; each rule is checked literally, on symbols.

- A step is applied with exactly the step's microbatches, each once, in every stage (`applied`).
- Replicas of a block agree at every version, within a numeric class (`holds`); where there is one class only, every
  state is the one that an undisturbed machine would have (see reference.py).
- A step is committed when every holder of the plan has said Prepared, with one set of numbers (`step_committed`).
- A microbatch of one attempt is leased to one living worker at a time (`granted`).
- What a route claims passes every stage once (`done`).
- When a holder is lost, the attempt goes on only if nothing of it is counted on (`adopted`).
- What is served to others, and what a checkpoint holds, is one committed version exactly (`served`, `saved`).
- Nobody trains uncredited: who computes holds a place in a plan that was sent to this very life, and the gradient of a
  committed step was computed by lives that are not over, those that get the credit (see credit.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from starlings_coordinator.core.records import PlanAdopted, StepRecorded, WorkerAdmitted
from starlings_protos.messages import (
    Assignment,
    ExchangeOpened,
    Hop,
    Lease,
    LeaseKind,
    MicrobatchDone,
    MicrobatchKey,
    Prepared,
    Span,
    StepCommitted,
    WorkerId,
)
from starlings_simulator.credit import Credit
from starlings_simulator.reference import Reference
from starlings_simulator.symbolic import Device, Piece, require, whole_route
from starlings_worker.core.effects import ApplyStep, ReplayStep


@dataclass(slots=True)
class Checker:
    microbatches_per_step: int
    # None: numeric classes are mixed, or the coordinator has a schedule of its own.
    reference: Reference | None = None
    # (worker, since) -> whether a fault hit it since then, or the coordinator sent it away. None: not known.
    harmed: Callable[[WorkerId, float], bool] | None = None
    # (worker, life) -> the version on its device, -1 without one. None: that life is over, or not known.
    reached: Callable[[WorkerId, int], int | None] | None = None
    observing: set[WorkerId] = field(default_factory=set)
    credit: Credit = field(default_factory=Credit)
    # (version, block, numeric class) -> state; first come fixes it.
    states: dict[tuple[int, int, str], str] = field(default_factory=dict)
    # Attempt under which each step was committed in the present line of versions.
    committed: dict[int, StepCommitted] = field(default_factory=dict)
    leased: dict[MicrobatchKey, WorkerId] = field(default_factory=dict)
    # Who holds what in the newest plan since when, and who said Prepared for what.
    plan_version: int = 0
    planned_at_s: float = 0.0
    holders: dict[WorkerId, Span] = field(default_factory=dict)
    prepared: dict[tuple[int, int], set[WorkerId]] = field(default_factory=dict)
    # What is done, and the way it went; and the attempts whose exchange was opened.
    finished: dict[MicrobatchKey, tuple[Hop, ...]] = field(default_factory=dict)
    exchanged: set[tuple[int, int]] = field(default_factory=set)
    stage_count: int = 0
    steps_applied: int = 0
    highest_version: int = 0
    # Committed at some time, perhaps in a line of versions that is void by now: a life that was given up may not have
    # heard of that, and what it does on its own device harms nobody.
    ever_committed: int = 0
    void: set[tuple[int, int]] = field(default_factory=set)
    rewinds: int = 0
    # The first plan of the present line of versions: what was loaded under earlier ones may be of a line that is void,
    # and come when its versions exist again, with other bits.
    line_since: int = 0
    # Spans that were fetched, per worker: one resync is one of them.
    downloads: Counter[WorkerId] = field(default_factory=Counter)

    def assigned(self, assignment: Assignment) -> None:
        self.stage_count = len(assignment.stages)

    def planned(self, worker_id: WorkerId, assignment: Assignment, now_s: float) -> None:
        """The coordinator sends a worker its place in a plan; an observer has none yet."""
        if assignment.observer:
            self.observing.add(worker_id)
            return
        if worker_id in self.observing and self.reached is not None:
            reached = self.reached(worker_id, self.credit.lives.get(worker_id, 0))
            require(
                reached is None or reached >= assignment.version - 1,
                f"{worker_id} becomes a holder at version {assignment.version}, and has caught up to {reached} only",
            )
        self.observing.discard(worker_id)
        self.rewound(assignment.version, assignment.plan_version)
        if assignment.plan_version > self.plan_version:
            self.plan_version, self.planned_at_s = assignment.plan_version, now_s
            self.holders = {peer.worker_id: peer.span for peer in assignment.peers if peer.span is not None}
            self.holders[worker_id] = assignment.span
            self.prepared.clear()
        self.credit.planned(worker_id, assignment.plan_version)

    def adopted(self, record: PlanAdopted, dropped: Collection[WorkerId]) -> None:
        """A plan was written down. Who is in it no more has no lease any more, also if it lives on somewhere."""
        epoch = (record.step, record.attempt)
        self.credit.adopted([worker_id for worker_id, _ in record.spans])
        for worker_id in sorted(dropped):
            self.gone(worker_id)
            counted_on = [
                key.index
                for key, route in self.finished.items()
                if (key.step, key.attempt) == epoch and any(hop.worker_id == worker_id for hop in route)
            ]
            require(
                not counted_on and epoch not in self.exchanged,
                f"step {record.step} goes on in attempt {record.attempt} without {worker_id}, which has gradient of "
                f"microbatches {counted_on}, or is in the exchange",
            )

    def opened(self, message: ExchangeOpened) -> None:
        self.exchanged.add((message.step, message.attempt))

    def said_prepared(self, worker_id: WorkerId, message: Prepared) -> None:
        self.prepared.setdefault((message.step, message.attempt), set()).add(worker_id)

    def rewound(self, version: int, plan_version: int) -> None:
        """The job goes on from an older version under a new plan: what was committed after it is void."""
        if version >= self.highest_version:
            return
        self.rewinds += 1
        self.line_since = plan_version
        bare = [stage for stage in range(self.stage_count) if self._has_lost(stage)]
        require(
            bool(bare) or self.harmed is None,
            f"training goes back from version {self.highest_version} to {version}, and yet every stage has a holder to "
            f"whom nothing happened: {self.holders}",
        )
        self.highest_version = version
        self.void |= {(step, commit.attempt) for step, commit in self.committed.items() if step >= version}
        self.committed = {step: commit for step, commit in self.committed.items() if step < version}
        self.states = {key: state for key, state in self.states.items() if key[0] <= version}
        self.leased = {key: holder for key, holder in self.leased.items() if key.step < version}
        self.finished = {key: route for key, route in self.finished.items() if key.step < version}
        self.credit.rewound(version)

    def _has_lost(self, stage: int) -> bool:
        """Whether something happened to all holders of a stage since the plan was made."""
        holders = [worker_id for worker_id, span in self.holders.items() if stage in span]
        return self.harmed is not None and all(self.harmed(w, self.planned_at_s) for w in holders)

    def step_committed(self, message: StepCommitted) -> None:
        if message.step not in self.committed:
            missing = self.holders.keys() - self.prepared.get((message.step, message.attempt), set())
            require(
                not missing, f"step {message.step} is committed although {sorted(missing)} are not prepared"
            )
        known = self.committed.setdefault(message.step, message)
        require(
            (known.attempt, known.clip_factor, known.learning_rate)
            == (message.attempt, message.clip_factor, message.learning_rate),
            f"step {message.step} was committed twice, differently: {known} and {message}",
        )
        self.highest_version = max(self.highest_version, message.step + 1)
        self.ever_committed = max(self.ever_committed, self.highest_version)

    def admitted(self, record: WorkerAdmitted) -> None:
        """A new life has nothing yet."""
        self.observing.discard(record.worker_id)
        self.credit.admitted(record)

    def recorded(self, record: StepRecorded) -> None:
        self.credit.committed(record, self.microbatches_per_step, self.stage_count)

    def applied(self, worker_id: WorkerId, device: Device, effect: ApplyStep | ReplayStep) -> None:
        if any((effect.step, attempt) in self.void for attempt in device.attempts()):
            return
        commit = self.committed.get(effect.step)
        require(commit is not None, f"{worker_id} applies step {effect.step}, which was not committed")
        assert commit is not None
        device.exactly_once(effect.step, commit.attempt, self.microbatches_per_step)
        self.steps_applied += 1

    def holds(self, worker_id: WorkerId, device: Device) -> None:
        if self._is_of_a_void_line(device):
            return
        for block, state in device.states.items():
            self._is_right(worker_id, device.version, block, state, device.numeric_class + device.lineage)

    def _is_of_a_void_line(self, device: Device) -> bool:
        """With one numeric class every line has the same states."""
        return self.reference is None and device.plan_version < self.line_since

    def _is_right(
        self, who: str, version: int, block: int, state: str, numeric_class: str | None = None
    ) -> None:
        """`numeric_class`: None where it is not known whose arithmetic made the state."""
        require(
            version <= self.ever_committed,
            f"{who} has version {version}, and only {self.highest_version} is committed",
        )
        if self.reference is not None:
            wanted = self.reference.state(version, block)
            require(
                state == wanted,
                f"{who} has {state} as block {block} at version {version}, one machine would have {wanted}",
            )
        elif numeric_class is not None and version <= self.highest_version:
            known = self.states.setdefault((version, block, numeric_class), state)
            require(
                known == state,
                f"{who} has {state} as block {block} at version {version}, others have {known}",
            )

    def served(self, worker_id: WorkerId, version: int, block: int, state: str) -> None:
        """A worker gives a block of a version to another worker or to the keeper."""
        self._is_right(f"what {worker_id} serves", version, block, state)

    def served_update(self, worker_id: WorkerId, step: int, group: str, piece: Piece) -> None:
        """A donor gives what a group exchanged in a step: that of the committed attempt, each microbatch once."""
        commit = self.committed.get(step)
        require(commit is not None, f"{worker_id} serves the update of step {step}, which is not committed")
        assert commit is not None
        ends = ("first", "last") if group == "tied" else ("",)
        wanted = {
            (end, step, commit.attempt, index): 1.0
            for end in ends
            for index in range(self.microbatches_per_step)
        }
        require(dict(piece) == wanted, f"{worker_id} serves {piece} as the update of {group} in step {step}")

    def saved(self, version: int, states: dict[int, str]) -> None:
        for block, state in states.items():
            self._is_right("the checkpoint", version, block, state)

    def loaded(self, worker_id: WorkerId, device: Device, *, observes: bool = False) -> None:
        """A span came from the keeper; where classes differ, its state is of one class and now everybody's."""
        self.downloads[worker_id] += 1
        if self._is_of_a_void_line(device):
            return
        if observes and len({numeric_class for _, _, numeric_class in self.states}) > 1:
            device.lineage = f" as {worker_id} copied it at version {device.version}"
        if len({numeric_class for _, _, numeric_class in self.states} | {device.numeric_class}) > 1:
            for block, state in device.states.items():
                self.states[device.version, block, device.numeric_class] = state
        self.holds(worker_id, device)

    def granted(self, worker_id: WorkerId, lease: Lease) -> None:
        if lease.key.kind is not LeaseKind.TRAIN:
            return
        holder = self.leased.get(lease.key)
        require(
            holder is None or holder == worker_id,
            f"{lease.key} is leased to {worker_id} while {holder} has it",
        )
        require(lease.key not in self.finished, f"{lease.key} is leased again after it was done")
        self.leased[lease.key] = worker_id

    def done(self, worker_id: WorkerId, message: MicrobatchDone) -> None:
        require(
            whole_route(message.route, self.stage_count), f"{message.key}: the route {message.route} has gaps"
        )
        if message.key.kind is LeaseKind.TRAIN:
            self.leased.pop(message.key, None)
            self.finished[message.key] = message.route

    def gone(self, worker_id: WorkerId) -> None:
        """A worker died, or was given up: its leases are free."""
        self.leased = {key: holder for key, holder in self.leased.items() if holder != worker_id}
