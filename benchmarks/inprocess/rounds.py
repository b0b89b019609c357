"""What replicas exchange between their own steps: slots, codecs and outer rules of every preset, in one process.

The arithmetic and the bytes are the worker's (of pairs, its whole `PairDevice`), and who meets whom is the
coordinator's matching. When a swap stands is decided plainly: nobody is late and nothing is lost.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inprocess.exchange import equal_members, exchange
from inprocess.swarm import Swarm, Worker
from starlings_compression.codec import Codec, make_codec
from starlings_coordinator.core.pairing.links import PassiveEstimates
from starlings_coordinator.core.pairing.matching import Candidate, Pair, match_slot
from starlings_job.codecs import exchange_bytes
from starlings_job.exchange_rules import ExchangeRules, Phase, pair_share
from starlings_protos.messages import WorkerId
from starlings_worker import wire
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    JudgePair,
    PairCommitted,
    PairJudged,
    PairKey,
    TakeOuterStep,
)
from starlings_worker.core.streaming.rules import pulls_before_a_step
from starlings_worker.flat import FlatVector
from starlings_worker.outer.diloco import DiLoCo
from starlings_worker.outer.fragments import Bounds, cut_into_fragments, fragment_of_slot
from starlings_worker.outer.gossip import Gossip, Pushed, PushSumState, exponential_peers
from starlings_worker.outer.quasi_global import QuasiGlobal, QuasiGlobalState
from starlings_worker.outer.sparseloco import SparseLoCo
from starlings_worker.outer.state import FragmentState
from starlings_worker.pair_device import PairDevice
from starlings_worker.robust import Contribution, aggregate


@dataclass(frozen=True, slots=True)
class Course:
    """When rounds are.

    steps: inner steps of the whole training, by which phases are told.
    lag: part of a round's H steps that pass before its last swap stands, with training going on. 0: at once.
    """

    steps: int
    seed: int
    lag: float = 0.0


class Rounds(ABC):
    """A preset between inner steps. `sent_bytes`: by all workers together."""

    def __init__(self, swarm: Swarm, rules: ExchangeRules, course: Course) -> None:
        self.swarm, self.rules, self.course = swarm, rules, course
        self.sent_bytes = 0
        self.refused = 0
        self.rounds = 0
        self._slots = 0
        self._next_slot = self._phase(0).inner_steps
        self._due: list[tuple[float, Callable[[], None]]] = []

    def inner_step(self, worker: Worker, step: int, learning_rate: float, clip_factor: float) -> None:
        """The optimizer's, of one stage of one replica."""
        worker.held.apply_step(step, learning_rate, clip_factor)

    def after_step(self, step: int) -> None:
        """Everybody has taken step `step`: what is due now happens."""
        done = step + 1
        while self._due and self._due[0][0] <= done:
            self._due.pop(0)[1]()
        if done < self._next_slot:
            return
        phase = self._phase(step)
        for stage in range(self.swarm.setup.stages):
            self._slot(stage, self._slots, phase, done)
        self._slots += 1
        self.rounds += 1
        self._next_slot = done + self._phase(done).inner_steps
        while self._due and self._due[0][0] <= done:
            self._due.pop(0)[1]()

    @torch.no_grad()
    def finish(self) -> None:
        """What is under way stands, and all replicas take their exact average, as a job does at its end."""
        while self._due:
            self._due.pop(0)[1]()
        for stage in range(self.swarm.setup.stages):
            vectors = [_vector(worker).parameters for worker in self.swarm.replicas_of(stage)]
            mean = torch.stack([vector.double() for vector in vectors]).mean(0).float()
            for vector in vectors:
                vector.copy_(mean)
            self.sent_bytes += len(vectors) * exchange_bytes("exact", mean.numel(), len(vectors))

    def _phase(self, step: int) -> Phase:
        return self.rules.phase_at(step, self.course.steps)

    @abstractmethod
    def _slot(self, stage: int, slot: int, phase: Phase, done: int) -> None: ...

    def _later(self, done: int, phase: Phase, part: float, action: Callable[[], None]) -> None:
        """After `part` of the round's lag."""
        due = (done + part * self.course.lag * phase.inner_steps, action)
        insort(self._due, due, key=lambda pair: pair[0])


class _Fragments:
    """State of one stage: per replica and fragment."""

    def __init__(self, workers: Sequence[Worker], rules: ExchangeRules, *, momentum: bool = True) -> None:
        self.bounds = cut_into_fragments(_vector(workers[0]).slots, rules.fragments)
        self.states = [
            [FragmentState.starting_at(theta_of(worker, cut), momentum=momentum) for cut in self.bounds]
            for worker in workers
        ]


class PairRounds(Rounds):
    """`pairs`, `noloco`, `palsgd`: all replicas' devices are asked what their cores would ask of them in a slot."""

    def __init__(self, swarm: Swarm, rules: ExchangeRules, course: Course) -> None:
        super().__init__(swarm, rules, course)
        self.devices = {
            w.worker_id: PairDevice(rules, {w.stage: _vector(w)}, w.held.optimizer) for w in swarm.workers
        }
        self._dice = random.Random(f"pulls {course.seed}")
        self._sat_out: set[WorkerId] = set()
        # By worker and fragment: rounds in a row without an average.
        self._alone: Counter[tuple[WorkerId, int]] = Counter()

    def inner_step(self, worker: Worker, step: int, learning_rate: float, clip_factor: float) -> None:
        super().inner_step(worker, step, learning_rate, clip_factor)
        pulls = pulls_before_a_step(self.rules, self._dice.random)
        if pulls:
            self.devices[worker.worker_id].pull(worker.stage, pulls, learning_rate)

    def _slot(self, stage: int, slot: int, phase: Phase, done: int) -> None:
        workers = [worker.worker_id for worker in self.swarm.replicas_of(stage)]
        fragment = fragment_of_slot(slot, self.rules.fragments)
        for one in workers:
            step = TakeOuterStep(
                stage, slot, fragment, phase == self.rules.warmup, self._alone[one, fragment]
            )
            self.devices[one].execute(step)
        swaps = self.rules.swaps_in(phase)
        meetings = self._meetings(stage, slot, swaps)
        averaged: set[WorkerId] = set()

        def begin(swap: int) -> None:
            pairs = [
                (PairKey(stage, fragment, slot, swap, number), pair)
                for number, pair in enumerate(meetings[swap], 1)
            ]
            for key, pair in pairs:
                for one in pair:
                    self.devices[one].execute(EncodePair(key))
                    self.sent_bytes += sum(memoryview(p.data).nbytes for p in self.devices[one].outgoing(key))
            self._later(done, phase, (swap + 1) / swaps, lambda: stand(swap, pairs))

        def stand(swap: int, pairs: list[tuple[PairKey, Pair]]) -> None:
            for key, pair in pairs:
                if self._meet(key, pair):
                    averaged.update(pair)
                else:
                    self.refused += 1
            if swap + 1 < swaps:
                begin(swap + 1)
                return
            for one in workers:
                self._alone[one, fragment] = 0 if one in averaged else self._alone[one, fragment] + 1

        begin(0)

    def _meetings(self, stage: int, slot: int, swaps: int) -> list[tuple[Pair, ...]]:
        """Who meets whom in each swap: as the coordinator matches equals."""
        workers = [w.worker_id for w in self.swarm.replicas_of(stage)]
        matchings = match_slot(
            [Candidate(worker_id, sat_out=worker_id in self._sat_out) for worker_id in workers],
            PassiveEstimates(),
            job_seed=self.course.seed,
            stage=stage,
            slot=slot,
            swaps=swaps,
            byte_count=0,
        )
        self._sat_out -= set(workers)
        self._sat_out |= set(matchings[-1].sitting)
        return [matching.pairs for matching in matchings]

    def _meet(self, key: PairKey, pair: Pair) -> bool:
        """Both payloads arrive, and stand if both sides find them plausible."""
        sides = [(self.devices[one], other) for one, other in (pair, pair[::-1])]
        for device, partner in sides:
            device.keep(key, {part.name: part.data for part in self.devices[partner].outgoing(key)})
        judged = [device.execute(JudgePair(key, partner)) for device, partner in sides]
        stands = all(isinstance(verdict, PairJudged) and not verdict.refused for verdict in judged)
        if stands:
            for device, partner in sides:
                outcome = device.execute(CommitPair(key, partner, pair_share(1, 1)))
                assert isinstance(outcome, PairCommitted), outcome
        for device, _ in sides:
            device.forget(key)
        return stands


class GroupRounds(Rounds):
    """`diloco` through the group exchange with its error feedback, `sparseloco` with its own."""

    def __init__(self, swarm: Swarm, rules: ExchangeRules, course: Course) -> None:
        super().__init__(swarm, rules, course)
        self._stages = [
            _Fragments(swarm.replicas_of(s), rules, momentum=rules.preset == "diloco")
            for s in range(swarm.setup.stages)
        ]
        if rules.preset == "diloco" and rules.fragments > 1:
            raise ValueError("the group exchange carries whole vectors")
        self._codec = make_codec(rules.codec)

    def _slot(self, stage: int, slot: int, phase: Phase, done: int) -> None:
        fragments, workers = self._stages[stage], self.swarm.replicas_of(stage)
        number = fragment_of_slot(slot, self.rules.fragments)
        cut = fragments.bounds[number]
        states = [own[number] for own in fragments.states]
        overlapped = self.course.lag > 0
        if self.rules.preset == "diloco":
            diloco = DiLoCo(self.rules)
            for state, worker in zip(states, workers, strict=True):
                _vector(worker).gradient.copy_(diloco.at_slot(state, theta_of(worker, cut), phase).z)
            mean = self._mean_of_gradients(workers, slot)

            def stand() -> None:
                for state, worker in zip(states, workers, strict=True):
                    diloco.commit(state, theta_of(worker, cut), mean, phase, overlapped=overlapped)

        else:
            sparse = SparseLoCo(self.rules)
            sent = []
            for state, worker in zip(states, workers, strict=True):
                values, size = travelled(self._codec, sparse.at_slot(state, theta_of(worker, cut), phase).z)
                sent.append(values)
                self.sent_bytes += size * (len(workers) - 1)
            found = aggregate(
                [Contribution(str(k), values, 1.0) for k, values in enumerate(sent)], self.rules.robust
            )
            self.refused += len(found.dropped)

            def stand() -> None:
                assert found.vector is not None
                for state, worker, own in zip(states, workers, sent, strict=True):
                    sparse.commit(
                        state, theta_of(worker, cut), own, found.vector, phase, overlapped=overlapped
                    )

        self._later(done, phase, 1.0, stand)

    def _mean_of_gradients(self, workers: list[Worker], slot: int) -> Tensor:
        """What lies in the accumulators, averaged by the worker's own exchange; the accumulators are zero after it."""
        buffers = {worker.worker_id: worker.buffers for worker in workers}
        group = equal_members(_vector(workers[0]).group, list(buffers), 1.0 / len(workers))
        self.sent_bytes += exchange(buffers, group, slot).sent_bytes
        mean = _vector(workers[0]).gradient.clone()
        for worker in workers:
            worker.buffers.commit(slot)
            worker.held.zero_gradients()
        return mean


class GossipRounds(Rounds):
    """`gossip`: half to one peer after every step, by the one-peer exponential graph."""

    def __init__(self, swarm: Swarm, rules: ExchangeRules, course: Course) -> None:
        super().__init__(swarm, rules, course)
        self._gossip, self._inner = Gossip(rules), QuasiGlobal(rules)
        self._codec = make_codec(rules.codec)
        self._weights = {worker.worker_id: PushSumState() for worker in swarm.workers}
        self._memories = {
            worker.worker_id: QuasiGlobalState.starting_at(_vector(worker).parameters)
            for worker in swarm.workers
        }

    @torch.no_grad()
    def inner_step(self, worker: Worker, step: int, learning_rate: float, clip_factor: float) -> None:
        vector = _vector(worker)
        vector.gradient.mul_(clip_factor)
        self._inner.step(self._memories[worker.worker_id], vector.parameters, vector.gradient, learning_rate)
        worker.held.zero_gradients()

    def _slot(self, stage: int, slot: int, phase: Phase, done: int) -> None:
        workers = self.swarm.replicas_of(stage)
        states = [self._weights[worker.worker_id] for worker in workers]
        sent = []
        for state, worker in zip(states, workers, strict=True):
            pushed = self._gossip.at_slot(state, _vector(worker).parameters)
            values, size = travelled(self._codec, pushed.x)
            self.sent_bytes += size
            sent.append(Pushed(values, pushed.weight))
        for place, (state, worker) in enumerate(zip(states, workers, strict=True)):
            peers = exponential_peers(slot, place, len(workers))
            theta, came = _vector(worker).parameters, sent[peers.receives_from]
            verdict = self._gossip.judge(state, theta, came, str(peers.receives_from))
            self.refused += not self._gossip.commit(state, theta, sent[place], came, verdict)
            self._inner.after_gossip(self._memories[worker.worker_id], theta)


def rounds_of(swarm: Swarm, rules: ExchangeRules, course: Course) -> Rounds:
    """Of every preset but allreduce, which is no round (`training.train_synchronously`)."""
    kinds = {"all": GroupRounds, "pairs": PairRounds, "exponential": GossipRounds}
    return kinds[rules.topology](swarm, rules, course)


def travelled(codec: Codec, values: Tensor) -> tuple[Tensor, int]:
    """What a receiver makes of a vector, and its bytes."""
    data = wire.encode(codec, values, "a payload")
    return wire.decode(codec, data, tuple(values.shape), values.device), memoryview(data).nbytes


def theta_of(worker: Worker, cut: Bounds) -> Tensor:
    """A fragment of the weights, a view."""
    return _vector(worker).parameters[cut[0] : cut[1]]


def _vector(worker: Worker) -> FlatVector:
    """Its only one: without a barrier nothing is tied."""
    (vector,) = worker.held.vectors.values()
    return vector
