"""What a job's pieces of work take: seconds on a machine's device, bytes on the wire. From the job's own accounts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

from starlings_compression.spec import parse_spec
from starlings_job.codecs import boundary_bytes, return_spec
from starlings_job.exchange_rules import Phase
from starlings_job.exchange_traffic import swap_bytes, vector_bytes
from starlings_job.optimizers import state_bytes_per_parameter
from starlings_job.profile import Profile
from starlings_job.spec import JobSpec
from starlings_protos.messages import Stage
from starlings_simulator.timed.machines import Machine

# Bytes of values that pass a processor per parameter: a step of the optimizer reads and writes weights, gradient and
# two moments; the others are vectors of four bytes that are read and written.
_STEP_BYTES, _OUTER_BYTES, _ENCODE_BYTES, _JUDGE_BYTES, _COMMIT_BYTES = 28.0, 28.0, 12.0, 12.0, 32.0
_REDUCE_BYTES, _ASSEMBLE_BYTES = 12.0, 8.0


class Costs:
    def __init__(self, job: JobSpec, profile: Profile) -> None:
        self.job = job
        self.profile = profile
        self._trained = [0, *accumulate(block.trainable_count for block in profile.blocks)]
        self._held = [0, *accumulate(block.parameter_count for block in profile.blocks)]
        self._seconds: dict[tuple[int, bool], list[float]] = {}

    # ------------------------------------------------------------------ seconds

    def forward_s(self, machine: Machine, stages: Iterable[Stage]) -> float:
        return self._run_s(machine, stages, forward=True)

    def backward_s(self, machine: Machine, stages: Sequence[Stage], *, again: bool) -> float:
        """`again`: the forward pass is computed once more before, from the run's input."""
        seconds = self._run_s(machine, stages, forward=False)
        return seconds + (self.forward_s(machine, stages) if again else 0.0)

    def _run_s(self, machine: Machine, stages: Iterable[Stage], *, forward: bool) -> float:
        key = (id(machine), forward)
        sums = self._seconds.get(key)
        if sums is None:
            by_kind = machine.forward_seconds if forward else machine.backward_seconds
            sums = self._seconds[key] = [
                0.0,
                *accumulate(by_kind[block.kind] for block in self.profile.blocks),
            ]
        return sum(sums[stage.last_block + 1] - sums[stage.first_block] for stage in stages)

    def step_s(self, machine: Machine, stages: Iterable[Stage]) -> float:
        """The optimizer's step."""
        return _STEP_BYTES * sum(map(self.trained, stages)) / machine.elementwise_bytes_per_s

    def pass_s(self, machine: Machine, what: str, elements: float) -> float:
        """A piece of an exchange: "outer", "encode", "judge", "commit", "reduce" or "assemble"."""
        return _PASS_BYTES[what] * elements / machine.elementwise_bytes_per_s

    # ------------------------------------------------------------------ sizes

    def trained(self, stage: Stage) -> int:
        """Parameters of the stage that are trained and exchanged."""
        return self._trained[stage.last_block + 1] - self._trained[stage.first_block]

    @property
    def fragments(self) -> int:
        rules = self.job.pair_rules
        return rules.fragments if rules is not None else 1

    def boundary_bytes(self, stage: Stage, *, backward: bool) -> int:
        """One microbatch behind `stage`, with its records on the way forward."""
        microbatch = self.job.train.microbatch
        elements = self.profile.blocks[stage.last_block].boundary_bytes_per_sample // 4 * microbatch
        size = boundary_bytes(self.job.pipeline.codec, (elements,), backward=backward)
        return size + (0 if backward else self.lease_bytes(microbatch))

    def lease_bytes(self, samples: int) -> int:
        return self.profile.record_bytes * samples

    def part_bytes(self, elements: int, share: float, members: int, *, aggregate: bool) -> int:
        """A contribution to one part of a vector, or its aggregate."""
        part = max(1, round(elements * share))
        spec = parse_spec(self.job.exchange.codec)
        return vector_bytes(return_spec(spec, members).text if aggregate else self.job.exchange.codec, part)

    def swap_bytes(self, stage: Stage, *, warmup: bool) -> int:
        rules = self.job.pair_rules
        assert rules is not None, "a job without pairs swaps nothing"
        phase: Phase = rules.warmup if warmup and rules.warmup is not None else rules.main
        return swap_bytes(rules, phase, self.trained(stage))

    @cached_property
    def state_bytes_per_parameter(self) -> float:
        """Of a replica's state as it is copied: weights and what the optimizer keeps."""
        return 4.0 + state_bytes_per_parameter(self.job.train.optimizer, self.job.train.momentum)

    def state_bytes(self, stages: Iterable[Stage], *, fresh: bool) -> float:
        """`fresh`: version 0, of which there are weights alone."""
        held = sum(self._held[s.last_block + 1] - self._held[s.first_block] for s in stages)
        return held * (4.0 if fresh else self.state_bytes_per_parameter)


_PASS_BYTES = {
    "outer": _OUTER_BYTES,
    "encode": _ENCODE_BYTES,
    "judge": _JUDGE_BYTES,
    "commit": _COMMIT_BYTES,
    "reduce": _REDUCE_BYTES,
    "assemble": _ASSEMBLE_BYTES,
}
