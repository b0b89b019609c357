"""What must hold across the whole swarm, whatever happened; each rule is checked literally, on symbols.

- A step is applied with exactly the step's microbatches, each once, in every stage (`applied`).
- Replicas of a block agree at every version, within a numeric class (`holds`).
- A step is committed when every holder of the plan has said Prepared, with one set of numbers (`step_committed`).
- A microbatch of one attempt is leased to one living worker at a time (`granted`).
- What a route claims passes every stage once (`done`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlings_protos.messages import (
    Assignment,
    Lease,
    LeaseKind,
    MicrobatchDone,
    MicrobatchKey,
    Prepared,
    StepCommitted,
    WorkerId,
)
from starlings_simulator.symbolic import Device, require, whole_route
from starlings_worker.core.effects import ApplyStep, ReplayStep


@dataclass(slots=True)
class Checker:
    microbatches_per_step: int
    # (version, block, numeric class) -> state; first come fixes it.
    states: dict[tuple[int, int, str], str] = field(default_factory=dict)
    # Attempt under which each step was committed in the present line of versions.
    committed: dict[int, StepCommitted] = field(default_factory=dict)
    leased: dict[MicrobatchKey, WorkerId] = field(default_factory=dict)
    # Who holds a span of the newest plan, and who said Prepared for what.
    plan_version: int = 0
    holders: set[WorkerId] = field(default_factory=set)
    prepared: dict[tuple[int, int], set[WorkerId]] = field(default_factory=dict)
    finished: set[MicrobatchKey] = field(default_factory=set)
    stage_count: int = 0
    steps_applied: int = 0
    highest_version: int = 0
    rewinds: int = 0

    def assigned(self, assignment: Assignment) -> None:
        self.stage_count = len(assignment.stages)

    def planned(self, worker_id: WorkerId, assignment: Assignment) -> None:
        """The coordinator sends a worker its place in a plan."""
        if assignment.plan_version > self.plan_version:
            self.plan_version = assignment.plan_version
            self.holders = {worker_id} | {peer.worker_id for peer in assignment.peers}
            self.prepared.clear()
        self.rewound(assignment.version)

    def said_prepared(self, worker_id: WorkerId, message: Prepared) -> None:
        self.prepared.setdefault((message.step, message.attempt), set()).add(worker_id)

    def rewound(self, version: int) -> None:
        """The job goes on from an older version: what was committed after it is void."""
        if version >= self.highest_version:
            return
        self.rewinds += 1
        self.highest_version = version
        self.committed = {step: commit for step, commit in self.committed.items() if step < version}
        self.states = {key: state for key, state in self.states.items() if key[0] <= version}
        self.leased = {key: holder for key, holder in self.leased.items() if key.step < version}
        self.finished = {key for key in self.finished if key.step < version}

    def step_committed(self, message: StepCommitted) -> None:
        if message.step not in self.committed:
            missing = self.holders - self.prepared.get((message.step, message.attempt), set())
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

    def applied(self, worker_id: WorkerId, device: Device, effect: ApplyStep | ReplayStep) -> None:
        commit = self.committed.get(effect.step)
        require(commit is not None, f"{worker_id} applies step {effect.step}, which was not committed")
        assert commit is not None
        device.exactly_once(effect.step, commit.attempt, self.microbatches_per_step)
        self.steps_applied += 1

    def holds(self, worker_id: WorkerId, device: Device) -> None:
        for block, state in device.states.items():
            key = (device.version, block, device.numeric_class + device.lineage)
            known = self.states.setdefault(key, state)
            require(
                known == state,
                f"{worker_id} has {state} as block {block} at version {device.version}, others have {known}",
            )

    def loaded(self, worker_id: WorkerId, device: Device, *, observes: bool = False) -> None:
        """A span came from the keeper; where classes differ, its state is of one class and now everybody's."""
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
            self.finished.add(message.key)

    def gone(self, worker_id: WorkerId) -> None:
        """A worker died: its leases are free."""
        self.leased = {key: holder for key, holder in self.leased.items() if holder != worker_id}
