"""The sample ledger of one (step, attempt): what is pooled, leased and done, and whether the step may be committed.

Pure bookkeeping; promises: a microbatch is leased to one worker at a time, done once, and a step is complete
only when every
microbatch is done and every stage's replicas together accumulated each of them exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlings_protos.messages import Hop, MicrobatchDone, Prepared, PreparedGroup, Span, WorkerId


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why a step cannot be committed; `culprits` may be empty when nobody can be named."""

    reason: str
    culprits: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenLease:
    worker_id: WorkerId
    granted_at_s: float


@dataclass(slots=True)
class StepLedger:
    step: int
    attempt: int
    samples: tuple[int, ...]
    microbatch: int
    loss_denominator: float
    # When a microbatch was last granted or done.
    moved_at_s: float
    pool: list[int] = field(default_factory=list)
    leases: dict[int, OpenLease] = field(default_factory=dict)
    done: dict[int, MicrobatchDone] = field(default_factory=dict)
    prepared: dict[WorkerId, Prepared] = field(default_factory=dict)
    opened_at_s: float | None = None
    # Stands in for samples leased at least once in this attempt.
    touched: set[int] = field(default_factory=set)
    # Workers that were lost while this attempt went on.
    gone: set[WorkerId] = field(default_factory=set)

    @classmethod
    def begin(
        cls,
        step: int,
        attempt: int,
        samples: tuple[int, ...],
        microbatch: int,
        loss_denominator: float,
        now_s: float = 0.0,
    ) -> StepLedger:
        count = len(samples) // microbatch
        pool = list(range(count))[::-1]
        return cls(step, attempt, samples, microbatch, loss_denominator, now_s, pool=pool)

    @property
    def count(self) -> int:
        return len(self.samples) // self.microbatch

    @property
    def complete(self) -> bool:
        return len(self.done) == self.count

    def samples_of(self, index: int) -> tuple[int, ...]:
        return self.samples[index * self.microbatch : (index + 1) * self.microbatch]

    def grant(self, worker_id: WorkerId, now_s: float) -> int | None:
        """The next microbatch for `worker_id`, in order; None when the pool is empty."""
        if not self.pool:
            return None
        index = self.pool.pop()
        self.leases[index] = OpenLease(worker_id, now_s)
        self.moved_at_s = now_s
        self.touched.add(index)
        return index

    def outstanding(self, worker_id: WorkerId) -> int:
        return sum(1 for lease in self.leases.values() if lease.worker_id == worker_id)

    def finish(
        self,
        message: MicrobatchDone,
        sender: WorkerId,
        spans: Mapping[WorkerId, Span],
        stages: int,
        target_count: int,
        now_s: float = 0.0,
    ) -> str:
        """Note a microbatch as done; "" when it was taken, else why not. `target_count`: what its samples have."""
        key = message.key
        if (key.step, key.attempt) != (self.step, self.attempt):
            return "it is of another step or attempt"
        lease = self.leases.get(key.index)
        if lease is None or lease.worker_id != sender:
            return "the sender holds no lease of it"
        if not message.route or message.route[0].worker_id != sender:
            return "its route does not begin with the lease's holder"
        if (flaw := route_flaw(message.route, spans, stages)) != "":
            return flaw
        if not math.isfinite(message.loss_sum):
            return "its loss is not finite"
        if message.target_count != target_count:
            return f"it reports {message.target_count} target tokens, its samples have {target_count}"
        del self.leases[key.index]
        self.moved_at_s = now_s
        self.done[key.index] = message
        return ""

    def passed(self, worker_id: WorkerId) -> bool:
        """Whether `worker_id` is on the route of anything that is done: its part of that gradient is counted on."""
        return any(hop.worker_id == worker_id for message in self.done.values() for hop in message.route)

    def leave_out(self, worker_id: WorkerId) -> list[int]:
        """A worker is lost, and the attempt goes on: its leases return to the pool, as the next to be granted. Returns
        their indices.
        """
        assert not self.passed(worker_id)
        returned = sorted(index for index, lease in self.leases.items() if lease.worker_id == worker_id)
        for index in reversed(returned):
            del self.leases[index]
            self.pool.append(index)
        self.gone.add(worker_id)
        return returned

    def contributors(self, stage: int) -> frozenset[WorkerId]:
        """Who accumulated gradient for `stage`, by the routes of what is done."""
        return frozenset(
            hop.worker_id
            for message in self.done.values()
            for hop in message.route
            if hop.first_stage <= stage <= hop.last_stage
        )

    def expected_indices(self, worker_id: WorkerId, stage: int) -> frozenset[int]:
        return frozenset(
            index
            for index, message in self.done.items()
            for hop in message.route
            if hop.worker_id == worker_id and hop.first_stage <= stage <= hop.last_stage
        )

    def judge(
        self, groups: Mapping[str, tuple[WorkerId, ...]], classes: Mapping[WorkerId, str]
    ) -> tuple[dict[str, float], Flaw | None]:
        """Squared norm per group as its lowest worker id computed it, and the flaw that forbids the commit.

        `groups` names the members of each exchange group; all of them have reported Prepared.
        """
        norms: dict[str, float] = {}
        for group, members in groups.items():
            reports: dict[WorkerId, PreparedGroup] = {}
            for member in members:
                found = [report for report in self.prepared[member].groups if report.group == group]
                if len(found) != 1:
                    return {}, Flaw(f"{member} reported {group} {len(found)} times", (member,))
                reports[member] = found[0]
            if group.startswith("stage:"):
                flaw = self._coverage(int(group.removeprefix("stage:")), group, reports)
                if flaw is not None:
                    return {}, flaw
            flaw = digest_flaw(group, {m: r.aggregate_digest for m, r in reports.items()}, classes)
            if flaw is not None:
                return {}, flaw
            norms[group] = reports[min(members)].squared_norm
            if not math.isfinite(norms[group]) or norms[group] < 0:
                return {}, Flaw(f"the gradient of {group} is not finite")
        return norms, None

    def _coverage(self, stage: int, group: str, reports: Mapping[WorkerId, PreparedGroup]) -> Flaw | None:
        seen: set[int] = set()
        for worker_id, report in reports.items():
            mine = set(report.microbatches)
            if len(mine) != len(report.microbatches) or mine != self.expected_indices(worker_id, stage):
                return Flaw(
                    f"{worker_id} accumulated {_brief(mine)} for {group}, the routes say "
                    f"{_brief(self.expected_indices(worker_id, stage))}",
                    (worker_id,),
                )
            if seen & mine:
                return Flaw(f"microbatches {_brief(seen & mine)} are twice in {group}")
            seen |= mine
        if seen != set(range(self.count)):
            return Flaw(f"microbatches {_brief(set(range(self.count)) - seen)} are missing in {group}")
        return None


def route_flaw(route: Iterable[Hop], spans: Mapping[WorkerId, Span], stages: int) -> str:
    """Why `route` is no way through all stages over holders of the plan; "" when it is."""
    expected = 0
    seen: set[WorkerId] = set()
    for hop in route:
        span = spans.get(hop.worker_id)
        if span is None or hop.first_stage not in span or hop.last_stage not in span:
            return f"{hop.worker_id} does not hold stages {hop.first_stage}-{hop.last_stage}"
        if hop.first_stage != expected or hop.last_stage < hop.first_stage or hop.worker_id in seen:
            return "its route is not a way through the stages"
        seen.add(hop.worker_id)
        expected = hop.last_stage + 1
    return "" if expected == stages else f"its route ends before stage {expected}"


def digest_flaw(
    group: str, digests: Mapping[WorkerId, int | str], classes: Mapping[WorkerId, str]
) -> Flaw | None:
    """Replicas of one numeric class must agree bit for bit; from three on, the odd one is named."""
    by_class: dict[str, dict[WorkerId, int | str]] = {}
    for worker_id, digest in digests.items():
        by_class.setdefault(classes.get(worker_id, ""), {})[worker_id] = digest
    for members in by_class.values():
        counts: dict[int | str, list[WorkerId]] = {}
        for worker_id, digest in sorted(members.items()):
            counts.setdefault(digest, []).append(worker_id)
        if len(counts) > 1:
            biggest = max(counts.values(), key=len)
            named = len(members) >= 3 and len(biggest) * 2 > len(members)
            odd = tuple(w for same in counts.values() if same is not biggest for w in same)
            who = f"; {', '.join(odd)} differ from the majority" if named else ""
            return Flaw(f"replicas of {group} disagree{who}", odd if named else ())
    return None


def _brief(indices: Iterable[int]) -> str:
    numbers = sorted(indices)
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "") if numbers else "none"
