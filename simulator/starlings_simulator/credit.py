"""Whose work a committed step is made of: lives of workers, what each computed, and who is credited for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from starlings_coordinator.core.records import StepRecorded, WorkerAdmitted
from starlings_protos.messages import MicrobatchKey, WorkerId
from starlings_simulator.symbolic import require

Life = tuple[WorkerId, int]


@dataclass(slots=True)
class Credit:
    """`lives`: the newest incarnation of each worker, as the coordinator wrote it down. `holders`: the lives that have
    a place in the newest plan; what others computed in the present attempt went with them.
    """

    lives: dict[WorkerId, int] = field(default_factory=dict)
    holders: set[Life] = field(default_factory=set)
    admissions: Counter[WorkerId] = field(default_factory=Counter)
    # (worker, plan version) -> the life to which this place was given.
    _places: dict[tuple[WorkerId, int], int] = field(default_factory=dict)
    # (step, attempt) -> (stage, index) -> who added it to an accumulator.
    _computed: dict[tuple[int, int], dict[tuple[int, int], list[Life]]] = field(default_factory=dict)

    def admitted(self, record: WorkerAdmitted) -> None:
        before = self.lives.get(record.worker_id, 0)
        require(
            record.incarnation > before,
            f"{record.worker_id} begins life {record.incarnation} after life {before}: nothing fences the old one",
        )
        self.lives[record.worker_id] = record.incarnation
        self.admissions[record.worker_id] += 1

    def adopted(self, holders: Collection[WorkerId]) -> None:
        """A plan was written down."""
        self.holders = {(worker_id, self.lives.get(worker_id, 0)) for worker_id in holders}

    def planned(self, worker_id: WorkerId, plan_version: int) -> None:
        if self.lives:
            self._places[worker_id, plan_version] = self.lives[worker_id]

    def computes(self, worker_id: WorkerId, incarnation: int, plan_version: int, key: MicrobatchKey) -> None:
        """A worker begins a computation under the plan that it knows."""
        if not self.lives:
            return  # A coordinator without a log.
        place = self._places.get((worker_id, plan_version))
        require(
            place == incarnation,
            f"{worker_id} computes {key} in life {incarnation}; plan {plan_version} gave a place to life {place}",
        )

    def accumulated(self, worker_id: WorkerId, incarnation: int, key: MicrobatchKey, stages: range) -> None:
        """A backward pass has ended and its gradient is in the accumulators of these stages."""
        step = self._computed.setdefault((key.step, key.attempt), {})
        for stage in stages:
            step.setdefault((stage, key.index), []).append((worker_id, incarnation))

    def committed(self, record: StepRecorded, count: int, stage_count: int) -> None:
        """Every microbatch was computed once in each stage by those who hold it now; credit follows work."""
        everything = self._computed.get((record.step, record.attempt), {})
        computed = {
            what: [life for life in lives if life in self.holders] for what, lives in everything.items()
        }
        for stage in range(stage_count):
            for index in range(count):
                lives = computed.get((stage, index), [])
                require(
                    len(lives) == 1 and self.lives[lives[0][0]] == lives[0][1],
                    f"microbatch {index} of the committed step {record.step} was computed for stage {stage} by "
                    f"{everything.get((stage, index), [])}; the holders are {sorted(self.holders)}",
                )
        hops = {(life[0], index) for (_, index), lives in computed.items() for life in lives}
        work = Counter(worker_id for worker_id, _ in hops)
        tokens = sum(credit for _, credit in record.credits)
        require(
            dict(record.credits) == {w: n * tokens // sum(work.values()) for w, n in work.items()},
            f"step {record.step} credits {record.credits}, the work was {dict(work)}",
        )
        for epoch in [epoch for epoch in self._computed if epoch[0] < record.step]:
            del self._computed[epoch]

    def rewound(self, version: int) -> None:
        for epoch in [epoch for epoch in self._computed if epoch[0] >= version]:
            del self._computed[epoch]
